"""The same imports from an editable install and from a wheel, and no names that belong to others."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (".py", ".cu", ".cuh")
FOLDERS = ("deepinfer_plugin", "model", "kernels", "patches")
CHECK = """
import importlib.util, json
import deepinfer_plugin, deepinfer_plugin.patches, deepinfer_plugin.kernels, deepinfer_plugin.model
from deepinfer_plugin.cli import main
from deepinfer_plugin.model import V41
spec = {name: importlib.util.find_spec(name) for name in ("model", "kernels", "patches")}
print(json.dumps({
    "package": [deepinfer_plugin.__file__, deepinfer_plugin.model.__file__, deepinfer_plugin.kernels.__file__],
    "top_level": {name: found.origin for name, found in spec.items() if found is not None},
}))
"""


def check(cwd: Path, **env: str) -> dict:
    """Import everything in a fresh interpreter that does not stand in the repository."""
    import json

    command = [sys.executable, "-P", "-c", CHECK]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the sources, so that the repository stays clean, and unpacked."""
    root = tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / "source" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, root / "source" / file)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", root, root / "source"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(root.glob("*.whl"))) as archive:
        archive.extractall(root / "site")
    return root / "site"


def test_the_wheel_has_every_file(wheel):
    """The list of packages in pyproject.toml is written by hand, because the folders are mapped."""
    names = {"deepinfer_plugin": ""} | {folder: f"{folder}/" for folder in FOLDERS[1:]}
    sources = {
        f"deepinfer_plugin/{names[folder]}{file.relative_to(ROOT / folder)}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.*")
        if file.suffix in SOURCES
    }
    assert {str(file.relative_to(wheel)) for file in wheel.rglob("*.*") if file.suffix in SOURCES} == sources


def test_the_wheel_takes_no_other_top_level_name(wheel):
    packages = [item.name for item in wheel.iterdir() if not item.name.endswith(".dist-info")]
    assert packages == ["deepinfer_plugin"]


def test_imports_from_the_wheel(wheel, tmp_path):
    found = check(tmp_path, PYTHONPATH=str(wheel))
    assert all(file.startswith(str(wheel)) for file in found["package"])
    assert not any(str(origin).startswith((str(wheel), str(ROOT / "model"))) for origin in found["top_level"].values())


def test_imports_from_the_editable_install(tmp_path):
    found = check(tmp_path)
    assert all(file.startswith(str(ROOT)) for file in found["package"])
    ours = [str(ROOT / folder) for folder in FOLDERS]
    assert not any(str(origin).startswith(tuple(ours)) for origin in found["top_level"].values())


def test_entry_points(wheel):
    (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
    points = {(point.group, point.name): point.value for point in distribution.entry_points}
    assert points == {
        ("sglang.srt.plugins", "deepinfer"): "deepinfer_plugin:register",
        ("sglang.srt.platforms", "deepinfer"): "deepinfer_plugin:activate",
        ("console_scripts", "deepinfer"): "deepinfer_plugin.cli:main",
    }
