"""What SGLang makes of us, asked in a process of its own.

Importing SGLang takes seconds and loading plugins happens once a process, so one child process imports it and then
forks for every question. ``ask(question, ...)`` runs ``python -m tests.probes`` and returns what each question
answered.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def ask(
    *questions: tuple[str, dict[str, Any]], env: dict[str, str] | None = None, sglang: str | None = None
) -> list[Any]:
    """Answers of ``(function name, keyword arguments)``; ``sglang`` is the version SGLang pretends to have."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.probes", json.dumps({"questions": questions, "sglang": sglang})],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


# ---- questions -----------------------------------------------------------------------------------------------------


def resolved(argv: list[str], env: dict[str, str] | None = None, plugins: bool = True) -> dict[str, Any]:
    """Every argument as a server started with ``argv`` resolves it, what SGLang then thinks of the model, and what
    its child processes get to see."""
    import pickle

    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.parser.template_detection import resolve_auto_parsers
    from sglang.srt.platforms import current_platform
    from sglang.srt.server_args import prepare_server_args

    os.environ.update(env or {})
    if plugins:
        _load_plugins()
    args = prepare_server_args(argv)
    args.resolve_once()
    args.check_server_args()
    resolve_auto_parsers(args)
    model = model_config_of(args)
    arguments = args.resolved_dict()
    return {
        "arguments": {name: value for name, value in arguments.items() if name not in ("random_seed", "nccl_port")},
        "in_child": {**arguments} == pickle.loads(pickle.dumps(args)).resolved_dict(),
        "flags": getattr(pickle.loads(pickle.dumps(args)), "_deepinfer_flags", None),
        "architecture": model.hf_config.architectures[0],
        "model_type": model.hf_config.model_type,
        "context": model.context_len,
        "quantization": model.quantization,
        "multimodal": model.is_multimodal,
        "platform": type(current_platform).__name__,
        "omp_num_threads": os.environ["OMP_NUM_THREADS"],
    }


def errors(argvs: list[list[str]], env: dict[str, str] | None = None) -> list[str]:
    """The error that each command line stops with, "" where it resolves."""
    from sglang.srt.server_args import prepare_server_args

    os.environ.update(env or {})
    _load_plugins()
    found = []
    for argv in argvs:
        try:
            prepare_server_args(argv).resolve_once()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("")
    return found


def hooks(env: dict[str, str] | None = None, other_plugin: str | None = None) -> dict[str, str]:
    """State of every hook, once a second plugin has wrapped (AROUND) or replaced (REPLACE) the targets too."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from deepinfer_plugin import patches

    os.environ.update(env or {})
    _load_plugins()
    if other_plugin is not None:
        for target in [hook.target for hook in patches.HOOKS]:
            HookRegistry.register(target, lambda original=None, *args, **kwargs: None, HookType[other_plugin])
            HookRegistry._patched.discard(target)
            HookRegistry._hooks[target] = HookRegistry._hooks[target][-1:]
        HookRegistry.apply_hooks()
    return {hook.name: patches.state(hook) for hook in patches.HOOKS}


def platform() -> dict[str, Any]:
    """What the platform answers where SGLang asks early."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.utils.common import get_device

    try:
        device = get_device()
    except RuntimeError as error:
        device = str(error)
    return {
        "name": type(current_platform).__name__,
        "device": device,
        "out_of_tree": current_platform.is_out_of_tree(),
        "triton": current_platform.capabilities.supports_triton,
    }


def warnings() -> list[str]:
    """What loading our plugin logs at WARNING or above."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepinfer_plugin").addHandler(handler)
    _load_plugins()
    return records


def applied(env: dict[str, str] | None = None) -> list[str]:
    """Targets SGLang has hooked for anybody, and parsers registered by us."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS
    from sglang.srt.configs.model_config_parser_registry import _MODEL_CONFIG_PARSER_REGISTRY
    from sglang.srt.plugins.hook_registry import HookRegistry

    os.environ.update(env or {})
    _load_plugins()
    return [*HookRegistry._patched, *_HOOKS, *(name for name in _MODEL_CONFIG_PARSER_REGISTRY if name == "deepinfer")]


def doctor(env: dict[str, str] | None = None, model_path: str | None = None) -> dict[str, Any]:
    """The doctor's JSON, with its exit code."""
    from deepinfer_plugin.cli.doctor import examine

    os.environ.update(env or {})
    report = examine(model_path)
    return {**json.loads(report.as_json()), "exit_code": report.exit_code}


def _load_plugins() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


# ---- the child process ---------------------------------------------------------------------------------------------


def main() -> None:
    request = json.loads(sys.argv[1])
    if request["sglang"] is not None:
        from importlib import metadata

        true_version = metadata.version
        metadata.version = lambda name: request["sglang"] if name == "sglang" else true_version(name)  # type: ignore
    import sglang.srt.managers.tokenizer_manager
    import sglang.srt.server_args  # noqa: F401
    import torch

    torch.set_num_threads(1)
    print(json.dumps([_in_fork(globals()[name], arguments) for name, arguments in request["questions"]]))


def _in_fork(question: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            answer = {"ok": question(**arguments)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with os.fdopen(writer, "w") as out:
            out.write(json.dumps(answer, default=str))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as source:
        answer = json.loads(source.read())
    os.waitpid(child, 0)
    if "error" in answer:
        sys.exit(f"{question.__name__}: {answer['error']}")
    return answer["ok"]


if __name__ == "__main__":
    main()
