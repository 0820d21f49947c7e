"""How many threads compute on a CPU."""

from __future__ import annotations

LARGE_HIDDEN = 1024  # from here on a projection of one row is worth a second thread


def compute_threads(hidden_size: int, cores: int) -> int:
    """Threads for the process that computes. Ops of a small model are shorter than the barrier between threads, and on
    cores shared with the other processes of a server a barrier can cost more than the whole forward."""
    return cores if hidden_size >= LARGE_HIDDEN else 1
