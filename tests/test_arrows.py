"""Who may import whom: adapters -> model -> kernels, and neither of the last two knows of SGLang."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = {"model": "deepinfer_plugin.model", "kernels": "deepinfer_plugin.kernels"}
ALLOWED = {"model": ("deepinfer_plugin.model", "deepinfer_plugin.kernels"), "kernels": ("deepinfer_plugin.kernels",)}
FILES = [file for folder in PACKAGE for file in sorted((ROOT / folder).rglob("*.py"))]


def imports(file: Path) -> list[str]:
    """Absolute names of every module the file imports, wherever in it the import stands."""
    relative = file.relative_to(ROOT)
    parts = [*PACKAGE[relative.parts[0]].split("."), *relative.with_suffix("").parts[1:]]
    package = parts[:-1]  # of a module and of an __init__ alike, since __init__ counts as a part
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # "from .. import x" may name a module
            found += [module] if node.module else [f"{module}.{alias.name}" for alias in node.names]
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_arrows(file):
    folder = file.relative_to(ROOT).parts[0]
    for name in imports(file):
        assert not within(name, "sglang"), f"{file} imports {name}: only adapters and patches may know SGLang"
        if within(name, "deepinfer_plugin"):
            assert any(within(name, allowed) for allowed in ALLOWED[folder]), f"{file} imports {name}"
        assert name.split(".")[0] not in PACKAGE, f"{file} imports {name}: {folder} has no top-level name"


def test_model_reaches_kernels_through_the_table_only():
    for file in FILES:
        if file.relative_to(ROOT).parts[0] == "model":
            for name in imports(file):
                assert not within(name, "deepinfer_plugin.kernels.cuda"), f"{file} imports {name}"
                assert not within(name, "deepinfer_plugin.kernels.ascend"), f"{file} imports {name}"


def test_the_check_sees_imports():
    """A checker that finds nothing would pass everything."""
    assert any("deepinfer_plugin.kernels" in imports(file) for file in FILES if "model" in file.parts)
    assert any("deepinfer_plugin.model.config" in imports(file) for file in FILES if "model" in file.parts)
