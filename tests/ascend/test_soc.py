"""What a machine says it has, from fake file trees, and tiles from a chip's limits. Needs no torch_npu."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_plugin.kernels.ascend import soc
from deepinfer_plugin.kernels.ascend.soc import Machine, Soc

GOOD = Machine("Ascend950PR_9589", 8, "25.5.0", "9.2.0-beta.2", "2.13.0rc1")


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "cores", "bandwidth"),
    [
        ("Ascend950PR_9579", 28, 1600),
        ("Ascend950PR_9589", 32, 1600),
        ("Ascend950DT_9591", 36, 4000),
        ("Ascend950DT_95A1", 36, 4000),
        ("Ascend950PR_950z", 4, 1600),
        ("Ascend950PR_950x", 8, 1600),
        ("Ascend950", 28, 1600),
    ],
)
def test_chips(name, cores, bandwidth):
    found = soc.soc_of(name)
    assert (found and (found.cores, found.memory_gb_s)) == (cores and (cores, bandwidth))


@pytest.mark.parametrize("name", ["Ascend910B3", "Ascend910_9392", "Ascend310P3", "Ascend9500", "NVIDIA H200", ""])
def test_other_chips(name):
    assert soc.soc_of(name) is None


def test_files(tmp_path):
    root = tree(
        tmp_path,
        usr__local__Ascend__driver__version_info="",
        opt__cann__version_info="",
    )
    (root / "usr/local/Ascend/driver/version.info").write_text("package_version=25.5.0\nother=1\n")
    toolkit = root / "opt/cann/aarch64-linux/ascend_toolkit_install.info"
    toolkit.parent.mkdir(parents=True)
    toolkit.write_text("package_name=Ascend-cann-toolkit\nversion=9.2.0\npath=/opt/cann\n")
    (root / "dev").mkdir()
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (root / "dev" / name).touch()
    found = soc.files(root, {"ASCEND_HOME_PATH": "/opt/cann"})
    assert found == Machine(None, 2, "25.5.0", "9.2.0", None)
    assert soc.files(root, {}).cann is None, "only where the variable points"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("version=9.2.0", "9.2.0"),
        ("Version=9.2.0-beta.2", "9.2.0-beta.2"),
        ("[x]\nruntime_running_version=[9.2.T1:9.2.0]", "9.2.0"),
        ("nothing here", None),
        (None, None),
    ],
)
def test_version_lines(text, version):
    assert soc._version_line(text) == version


def test_nothing_there(tmp_path):
    assert soc.files(tmp_path, {}) == Machine()


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (GOOD, None),
        (Machine(), "no Ascend device was found"),
        (Machine("Ascend910B3", 8, "25.5.0", "9.2.0", "2.13.0"), "not supported: found Ascend910B3"),
        (Machine("Ascend950PR_9589", 8, "25.5.0", "8.5.0", "2.13.0"), "CANN 9.2 or newer; not supported: found 8.5.0"),
        (Machine("Ascend950PR_9589", 8, "25.5.0", None, "2.13.0"), "CANN 9.2 or newer; none was found"),
        (Machine("Ascend950PR_9589", 8, "25.5.0", "9.2.0", "2.10.0.post2"), "not supported: found 2.10.0.post2"),
        (Machine("Ascend950PR_9589", 8, "25.5.0", "10.0.0", "2.14.0"), None),
    ],
)
def test_support(machine, words):
    problem = machine.problem()
    assert (problem is None) if words is None else (problem is not None and words in problem)
    assert all(fine for _, _, fine in machine.support().values()) == (words is None)


# ---- tiles ---------------------------------------------------------------------------------------------------------


def test_tiles_fit_the_unified_buffer():
    chip = Soc("Ascend950PR_9589", 32, 1600)
    for width in (1, 31, 512, 20480, 163840):
        for buffers in (1, 2, 3):
            try:
                rows = chip.rows(width, fixed=1024, buffers=buffers)
            except ValueError:
                assert buffers * width + 1024 > chip.ub_simt - 32 * buffers
                continue
            used = rows * buffers * -(-width // 32) * 32 + 1024
            assert used <= chip.ub_simt and (rows == 128 or used * 2 > chip.ub_simt - 1024 * 2)


def test_sixty_four_heads_do_not_fit():
    """64 heads x 512 channels of float32, the accumulator of one attention row, is what overflowed upstream."""
    chip = Soc("Ascend950PR_9589", 32, 1600)
    with pytest.raises(ValueError, match="do not fit 221184 bytes"):
        chip.rows(64 * 512 * 4, buffers=2)
    assert chip.rows(512 * 4, buffers=2) == 32, "heads in tiles of 32 do"


def test_peak():
    assert round(Soc("Ascend950PR_9589", 32, 1600).bf16_flops / 1e12) == 433
