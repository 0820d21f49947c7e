"""A fresh machine to a served, streamed answer: start a server, talk to it through the OpenAI client, print the cost.

python examples/demo.py --model-path DIR
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from openai import OpenAI

from deepinfer_plugin.local_server import LocalServer, ServerDied

SYSTEM = "You are a helpful assistant. " + "Answer briefly and precisely. " * 20
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


class Chat:
    """One client; prints what it streams and what each request cost."""

    def __init__(self, url: str, max_tokens: int):
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
        self.max_tokens = max_tokens

    def ask(self, messages: list[dict[str, Any]], thinking: bool = False, **options: Any) -> str:
        print(f"user> {messages[-1]['content']}")
        started, first, content, usage, mode, drafts = time.perf_counter(), 0.0, "", None, "", None
        stream = self.client.chat.completions.create(
            model="default",
            messages=messages,
            max_tokens=self.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"chat_template_kwargs": {"thinking": thinking}, "return_spec_tokens_details": True},
            **options,
        )
        for chunk in stream:
            usage = chunk.usage or usage
            drafts = spec_details(chunk) or drafts
            delta = chunk.choices[0].delta if chunk.choices else None
            for kind, piece in self.pieces(delta):
                first = first or time.perf_counter() - started
                print(piece if kind == mode else f"{mode and chr(10)}{kind}> {piece}", end="", flush=True)
                mode = kind
                content += piece if kind == "assistant" else ""
        total = time.perf_counter() - started
        count = usage.completion_tokens if usage else 0
        cached = getattr(getattr(usage, "prompt_tokens_details", None), "cached_tokens", 0) or 0
        rate = f"{count / total:.1f} tokens/s with the prompt"
        prompt = usage.prompt_tokens if usage else 0
        print(f"\n  [{prompt} prompt tokens, {cached} cached; first after {first:.2f} s; {count} tokens, {rate}]")
        if drafts:
            rounds, right = drafts["spec_verify_ct"], drafts["spec_num_correct_drafts"]
            verified = rounds * (drafts["spec_cap_length"] - 1)
            print(f"  [{rounds} verifications: {verified:.0f} drafts verified, {right} right]")
        print()
        return content

    @staticmethod
    def pieces(delta: Any) -> list[tuple[str, str]]:
        if delta is None:
            return []
        found = [("thinks", getattr(delta, "reasoning_content", None)), ("assistant", delta.content)]
        for call in delta.tool_calls or ():
            found += [("calls", call.function.name and f"{call.function.name} "), ("calls", call.function.arguments)]
        return [(kind, piece) for kind, piece in found if piece]


def spec_details(chunk: Any) -> dict[str, Any] | None:
    """What speculation did for a request: SGLang adds it to the last chunk."""
    return ((chunk.model_extra or {}).get("sglext") or {}).get("spec_tokens_details")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--log", default=".cache/demo-server.log")
    args = parser.parse_args()

    print(f"starting a server on {args.model_path} (log: {args.log}) ...", flush=True)
    with LocalServer(args.model_path, "--enable-cache-report", log=args.log) as server:
        print(f"ready at {server.url} after {server.ready_s:.1f} s\n")
        chat = Chat(server.url, args.max_tokens)
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        for question in ("What is a page?", "What is speculative decoding?"):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": chat.ask(messages)})
        chat.ask([{"role": "user", "content": "Who are you?"}], thinking=True)
        chat.ask([{"role": "user", "content": "What is the weather in Paris?"}], tools=[WEATHER])
        schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        question = "Maria is 34 years old and lives in Oslo."
        chat.ask([{"role": "user", "content": question}], response_format=schema)
        print(f"server memory, all processes: {server.rss_bytes() / 2**30:.2f} GiB")
    print(
        "The model was trained for minutes on one GPU: it knows the format, little else (its card is beside it).\n"
        "Serve a real one: make serve MODEL=/path/to/DeepSeek-V4.1-Flash"
    )


if __name__ == "__main__":
    try:
        main()
    except (ServerDied, TimeoutError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:  # the server has been stopped on the way here
        sys.exit(130)
