"""``deepinfer doctor``: whether this machine can serve, what is missing and what to do about it.

Exit code 0: fine. 1: it serves, but something is worse than it could be. 2: it cannot serve.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

VERDICTS = ("fine", "degraded", "cannot serve")  # by exit code
DEGRADED, CANNOT_SERVE = 1, 2

# Distribution -> what is lost without it, and whether serving goes on.
PACKAGES = {
    "torch": ("nothing runs", CANNOT_SERVE),
    "sglang": ("nothing serves", CANNOT_SERVE),
    "transformers": ("SGLang cannot read a config", CANNOT_SERVE),
    "deepseek-recipe": ("chat requests fail: it renders and parses the V4.1 dialogue format", CANNOT_SERVE),
    "xgrammar": ("json schema, regex and ebnf requests fail", DEGRADED),
    "openai-harmony": ("SGLang switches /v1/responses off", DEGRADED),
}


@dataclass
class Report:
    """What was found. ``problems`` decides the verdict."""

    platform: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    hooks: dict[str, str] = field(default_factory=dict)
    ops: dict[str, dict[str, str]] = field(default_factory=dict)  # op -> provider -> "in use", "available" or why not
    ascend: dict[str, dict[str, str | bool]] = field(default_factory=dict)  # item -> found, wanted, supported; if any
    checkpoint: str | None = None
    problems: list[tuple[int, str]] = field(default_factory=list)  # exit code it causes, what and what to do

    @property
    def exit_code(self) -> int:
        return max((severity for severity, _ in self.problems), default=0)

    def as_json(self) -> str:
        found = asdict(self) | {"problems": [text for _, text in self.problems]}
        return json.dumps(found | {"verdict": VERDICTS[self.exit_code]}, ensure_ascii=False, indent=2)

    def __str__(self) -> str:
        lines = [f"platform   {self.platform}"]
        lines += [f"{name:<16} {version or 'not installed'}" for name, version in self.versions.items()]
        lines += ["", "hooks"] + [f"  {name:<18} {state}" for name, state in self.hooks.items()]
        names = sorted({provider for row in self.ops.values() for provider in row})
        width = 2 + max(map(len, names), default=0)
        lines += ["", "ops" + " " * 19 + "".join(f"{name:<{width}}" for name in names)]
        lines += [f"  {op:<20}" + "".join(f"{row[name]:<{width}}" for name in names) for op, row in self.ops.items()]
        if self.ascend:
            lines += ["", f"{'Ascend':<13}{'found':<24}supported"]
            lines += [f"  {item:<11}{row['found']:<24}{row['wanted']}" for item, row in self.ascend.items()]
        if self.checkpoint:
            lines += ["", f"checkpoint {self.checkpoint}"]
        lines += ["", *(f"{VERDICTS[severity]}: {text}" for severity, text in self.problems)]
        return "\n".join([*lines, f"verdict: {VERDICTS[self.exit_code]}"])


def examine(model_path: str | None = None) -> Report:
    report = Report()
    report.versions, problems = _versions()
    report.problems += problems
    if report.versions["torch"] is None:
        return report
    report.ops, problems = _ops()
    report.problems += problems
    report.ascend, problems = _ascend()
    report.problems += problems
    if not any(severity == CANNOT_SERVE for severity, _ in report.problems):
        report.platform, report.hooks, problems = _sglang()
        report.problems += problems
    if model_path is not None:
        report.checkpoint = model_path
        report.problems += _checkpoint(Path(model_path))
    return report


def _versions() -> tuple[dict[str, str | None], list[tuple[int, str]]]:
    from .. import patches

    versions: dict[str, str | None] = {"python": sys.version.split()[0]}
    problems = []
    for name, (loss, severity) in {"deepinfer_plugin": ("", 0), **PACKAGES}.items():
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
            problems.append((severity, f"{name} is not installed: {loss}; pip install {name}"))
    reason = patches.unsupported_sglang()
    if versions["sglang"] is not None and reason:
        problems.append(
            (CANNOT_SERVE, f"{reason}: SGLang serves its own models; pip install sglang=={patches.SGLANG_VERSION}")
        )
    return versions, problems


def _ops() -> tuple[dict[str, dict[str, str]], list[tuple[int, str]]]:
    import torch

    from ..kernels import providers, table

    device = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    rows, reasons = table(device, os.environ.get("DEEPINFER_PROFILE", "model"))
    ops, problems = {}, []
    for row in rows:
        ops[row.op] = {
            provider: "in use" if provider == row.chosen else "available" if has else "-"
            for provider, has in row.available.items()
        }
    unserved = [row.op for row in rows if row.chosen is None]
    if unserved:
        advice = "hide the accelerator (CUDA_VISIBLE_DEVICES=) or force the ops to 'reference' (DEEPINFER_OPS)"
        problems.append((CANNOT_SERVE, f"no provider serves {', '.join(unserved)} on {device}; {advice}"))
    slow = [row.op for row in rows if row.chosen == "reference"]
    if slow and device != "cpu":
        problems.append((DEGRADED, f"the slow torch reference serves {', '.join(slow)} on {device}"))
    if device != "cpu":  # for which there is nothing but the reference
        meant = {
            provider.name
            for provider in providers()
            if provider.device in (None, device.split(":")[0]) and not provider.special  # of another one's ops
        }
        missing = [
            f"provider {name} is not available on {device}: {why}" for name, why in reasons.items() if name in meant
        ]
        problems += [(DEGRADED, text) for text in missing]
    return ops, problems


def _ascend() -> tuple[dict[str, dict[str, str | bool]], list[tuple[int, str]]]:
    """The support table of a machine that has anything of an Ascend; nothing on any other."""
    from ..kernels.ascend import soc

    machine = soc.machine()
    if machine == soc.Machine():
        return {}, []
    rows: dict[str, dict[str, str | bool]] = {
        item: {"found": found, "wanted": wanted, "supported": supported}
        for item, (found, wanted, supported) in machine.support().items()
    }
    problem = machine.problem()
    return rows, [(CANNOT_SERVE, f"this Ascend cannot serve: {problem}")] if problem else []


def _sglang() -> tuple[str, dict[str, str], list[tuple[int, str]]]:
    """Load SGLang's plugins as a server would, then look at what came of it."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins import load_plugins

    from .. import patches

    load_plugins()
    hooks = {hook.name: patches.state(hook) for hook in patches.HOOKS}
    problems = [
        (CANNOT_SERVE if hook.required else DEGRADED, f"hook {hook.name} on {hook.target} is {found}: {hook.why}")
        for hook in patches.HOOKS
        if (found := hooks[hook.name]) != "in place"
    ]
    if problems and all(found == "missing" for found in hooks.values()):
        advice = "is SGLANG_PLUGINS set to something else, or SGLANG_PLATFORM? `pip show -f deepinfer_plugin`"
        problems.insert(0, (CANNOT_SERVE, f"SGLang has not loaded this plugin; {advice}"))
    platform = f"{type(current_platform).__module__}.{type(current_platform).__name__}"
    return platform, hooks, problems


def _checkpoint(path: Path) -> Iterator[tuple[int, str]]:
    """The files, without reading a weight: config, every shard's header, calibration, and a tokenizer that knows the
    dialogue and that Engram was trained with."""
    from ..model.checkpoint import Checkpoint, CheckpointError
    from ..model.config import ConfigError, V41Config
    from ..model.engram_table import EngramError, EngramTable
    from ..speculative.calibration import CalibrationError, calibration_of
    from ..tokenizer_check import tokenizer_problem

    problem = tokenizer_problem(path)
    if problem:
        yield CANNOT_SERVE, f"{path}: {problem}; a server would not start"
    try:
        config = V41Config.load(path)
    except ConfigError as error:
        yield CANNOT_SERVE, str(error)
        return
    checks: list[Callable[[], Any]] = [lambda: Checkpoint.open(path, config)]
    if not problem:
        checks.append(lambda: EngramTable.load(path, config))
    if config.draft_block:
        checks.append(lambda: calibration_of(path, None, config.draft_block))
    for check in checks:
        try:
            check()
        except (CheckpointError, EngramError, CalibrationError) as error:
            yield CANNOT_SERVE, str(error)


def run(args: argparse.Namespace) -> int:
    report = examine(args.model_path)
    print(report.as_json() if args.json else report)
    return report.exit_code


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help="say whether this machine can serve, and what is missing")
    parser.add_argument("--json", action="store_true", help="one JSON object: ops, hooks, versions, verdict, ...")
    parser.add_argument("--model-path", metavar="DIR", help="check a checkpoint directory too, without its weights")
    parser.set_defaults(run=run)
