"""Triton kernels without a GPU: the contract suite once more, in Triton's interpreter.

It has to be chosen before Triton is imported, so it is a process of its own. The tests of the suite that compare many
subsets of rows take minutes there and run on a GPU only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CONTRACT = Path(__file__).with_name("test_contract.py")
CHOSEN = (
    "cuda and (agree_with_reference or agrees_with_reference or no_rows or repeats or left_alone or sum_of_their_rows)"
)


def interpreted(file: Path, *options: str) -> int:
    """How many tests of a file pass."""
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-x", "-p", "no:cacheprovider", *options]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    return int(re.search(r"(\d+) passed", ran.stdout)[1])


def test_contract_in_the_interpreter():
    passed = interpreted(CONTRACT, "-k", CHOSEN)
    assert passed > 300, f"only {passed} tests ran: the provider was not offered"


def test_peers_in_the_interpreter():
    assert interpreted(CONTRACT.with_name("test_peers.py")) == 20
