"""A fresh machine to a served, streamed answer: start a server, chat with it through the OpenAI client, print what it
cost.

python examples/demo.py --model-path DIR
"""

from __future__ import annotations

import argparse
import sys
import time

from openai import OpenAI

from deepinfer_plugin.local_server import LocalServer

SYSTEM = "You are a helpful assistant. " + "Answer briefly and precisely. " * 12


def stream(client: OpenAI, messages: list[dict[str, str]], max_tokens: int) -> tuple[str, float, float, object]:
    """One streamed chat completion: its text, seconds to the first token, seconds in all, usage."""
    started, first, text, usage = time.perf_counter(), 0.0, "", None
    chunks = client.chat.completions.create(
        model="default",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    for chunk in chunks:
        usage = chunk.usage or usage
        delta = chunk.choices[0].delta if chunk.choices else None
        piece = (delta.content or getattr(delta, "reasoning_content", None) or "") if delta else ""
        if piece:
            first = first or time.perf_counter() - started
            text += piece
            print(piece, end="", flush=True)
    print()
    return text, first, time.perf_counter() - started, usage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--log", default=".cache/demo-server.log")
    args = parser.parse_args()

    print(f"starting a server on {args.model_path} (log: {args.log}) ...", flush=True)
    with LocalServer(args.model_path, "--enable-cache-report", log=args.log) as server:
        print(f"ready at {server.url} after {server.ready_s:.1f} s\n")
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
        messages = [{"role": "system", "content": SYSTEM}]
        for turn, question in enumerate(("What is speculative decoding?", "And why does a page hold 128 tokens?"), 1):
            messages.append({"role": "user", "content": question})
            print(f"user> {question}\nassistant> ", end="")
            text, first, total, usage = stream(client, messages, args.max_tokens)
            messages.append({"role": "assistant", "content": text})
            count = getattr(usage, "completion_tokens", 0)
            details = getattr(usage, "prompt_tokens_details", None)
            cached = getattr(details, "cached_tokens", 0) or 0
            rate = (count - 1) / (total - first) if count > 1 and total > first else float("nan")
            print(
                f"  turn {turn}: {getattr(usage, 'prompt_tokens', 0)} prompt tokens ({cached} from the prefix cache), "
                f"first token {first:.2f} s, {count} tokens at {rate:.1f}/s\n"
            )
        print(f"server memory, all processes: {server.rss_bytes() / 2**30:.2f} GiB")
    print(
        "The tiny checkpoint has random weights: it exercises every layer kind and format, and its text is noise.\n"
        "Serve a real one: make serve MODEL=/path/to/DeepSeek-V4.1-Flash"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
