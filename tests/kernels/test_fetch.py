"""The script that fetches the tile-kernels wheel: idempotent, never trusts a wrong or half-unpacked file."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest

from tests import fetch_tile_kernels as script


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A small wheel that the script takes for the real one."""
    path = tmp_path / "small.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tile_kernels/torch/cast.py", "x = 1\n")
    monkeypatch.setattr(script, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path.read_bytes()


def serve(monkeypatch: pytest.MonkeyPatch, content: bytes) -> list[Path]:
    """Downloads give ``content``; the targets are recorded."""
    asked: list[Path] = []

    def download(target: Path) -> None:
        asked.append(target)
        target.write_bytes(content)

    monkeypatch.setattr(script, "_download", download)
    return asked


def test_downloads_and_unpacks_once(wheel, tmp_path, monkeypatch):
    asked, cache = serve(monkeypatch, wheel), tmp_path / "new" / "cache"
    folder = script.fetch(cache)
    assert (folder / "tile_kernels/torch/cast.py").read_text() == "x = 1\n"
    (folder / "mark").touch()
    assert script.fetch(cache) == folder and (folder / "mark").exists()
    assert asked == [cache / script.WHEEL]
    assert sorted(path.name for path in cache.iterdir()) == sorted([script.VERSION, script.WHEEL])


def test_goes_on_after_an_interrupted_run(wheel, tmp_path, monkeypatch):
    """A wheel without its folder is only unpacked; a damaged one is downloaded again."""
    asked = serve(monkeypatch, wheel)
    (tmp_path / script.WHEEL).write_bytes(wheel)
    assert script.fetch(tmp_path).is_dir() and not asked
    shutil.rmtree(tmp_path / script.VERSION)
    (tmp_path / script.WHEEL).write_bytes(wheel[:20])
    assert script.fetch(tmp_path).is_dir() and len(asked) == 1


def test_refuses_another_file(wheel, tmp_path, monkeypatch):
    serve(monkeypatch, b"not the wheel")
    with pytest.raises(RuntimeError, match=r"sha256 is \w+, expected"):
        script.fetch(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
