"""Fetch DeepSeek's tile-kernels wheel: its torch references are what tests/kernels compares our formats and ops with.

The wheel is pure Python, but it asks for a newer Python and for packages the tests do not need, so it is downloaded
without them and unpacked next to the repository's other caches; nothing of it is installed or imported as a package.
Running this again does nothing.

    python tests/fetch_tile_kernels.py [folder]      # default: .cache/tile_kernels of the repository
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "2.1.0"
WHEEL = f"tile_kernels-{VERSION}-py3-none-any.whl"
SHA256 = "df3ddffcf53ebc19404d2723bf2a629b46ce14cf4744a7739a80b0a9e366cf1f"
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "tile_kernels"
UNPACKED = CACHE / VERSION  # holds the package folder tile_kernels/
ATTEMPTS = 3


def fetch(cache: Path = CACHE) -> Path:
    """Folder that holds the unpacked wheel; a wheel that is already in ``cache`` is not downloaded again.

    Raises:
        RuntimeError: the download failed, or the file is not the wheel we know.
    """
    unpacked, wheel = cache / VERSION, cache / WHEEL
    if unpacked.is_dir():
        return unpacked
    cache.mkdir(parents=True, exist_ok=True)
    if not wheel.is_file() or _sha256(wheel) != SHA256:
        wheel.unlink(missing_ok=True)
        _download(wheel)
    if (found := _sha256(wheel)) != SHA256:
        wheel.unlink()
        raise RuntimeError(f"{WHEEL}: sha256 is {found}, expected {SHA256}")
    # Unpack beside, then rename: an interrupted run leaves no half folder behind that the next one would trust.
    partial = Path(tempfile.mkdtemp(dir=cache))
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        if not unpacked.is_dir():
            partial.rename(unpacked)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return unpacked


def _download(wheel: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--dest", str(wheel.parent), f"tile-kernels=={VERSION}"]
    for _ in range(ATTEMPTS):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0 and wheel.is_file():
            return
    raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr.strip()}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    print(fetch(*map(Path, sys.argv[1:2])))
