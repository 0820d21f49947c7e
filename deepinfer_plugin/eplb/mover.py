"""Experts on their way, a bounded number of bytes between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from deepinfer_plugin.model.expert_map import ExpertMap
from deepinfer_plugin.model.moe import Experts
from deepinfer_plugin.model.parallel import Group

from .migration import Move, Round


class Mover:
    """Carries out rounds of moves (``migration.py``) for one set of experts. All ranks call it alike, between the same
    forwards.

    What is on its way lies in two buffers beside the slots, of one expert each: one that leaves, one that arrives. So
    every slot serves what it held until its round has arrived everywhere; then all ranks put it in place and change
    the map, at the same step.

    chunk_bytes: what a rank sends, and receives, at a time.
    """

    def __init__(self, layers: Sequence[Experts], places: ExpertMap, group: Group, chunk_bytes: int):
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={chunk_bytes} is not supported; legal: a positive number")
        self.layers, self.places, self.group, self.chunk_bytes = layers, places, group, chunk_bytes
        self.expert_bytes = layers[0].expert_bytes
        self.leaving, self.arriving = torch.empty(
            2, self.expert_bytes, dtype=torch.uint8, device=layers[0].ops.device
        ).unbind()
        self.rounds: list[Round] = []
        self.travelled = 0  # bytes of each expert of the first round

    @property
    def busy(self) -> bool:
        return bool(self.rounds)

    @property
    def calls_per_round(self) -> int:
        """How often ``step`` is called for a round."""
        return -(-self.expert_bytes // self.chunk_bytes) + 1

    def begin(self, rounds: Iterable[Round]) -> None:
        self.rounds, self.travelled = list(rounds), 0

    def step(self) -> int:
        """Carry the next chunk, or put in place what has arrived: bytes that travelled, of all ranks."""
        if not self.rounds:
            return 0
        if self.travelled == self.expert_bytes:
            self._put_in_place(self.rounds.pop(0))
            self.travelled = 0
            return 0
        return self._carry(self.rounds[0])

    def _carry(self, moves: Round) -> int:
        sent, received = self._mine(moves)
        if sent is not None and not self.travelled:
            self.layers[sent.layer].read(sent.source % self.places.slots, self.leaving)
        chunk = slice(self.travelled, min(self.travelled + self.chunk_bytes, self.expert_bytes))
        size = chunk.stop - chunk.start
        send, receive = ([0] * self.group.size for _ in range(2))
        if sent is not None:
            send[sent.slot // self.places.slots] = size
        if received is not None:
            receive[received.source // self.places.slots] = size
        arrived = self.group.all_to_all(self.leaving[chunk] if sent is not None else self.leaving[:0], send, receive)
        if received is not None:
            self.arriving[chunk].copy_(arrived)
        self.travelled = chunk.stop
        return size * len(moves)

    def _put_in_place(self, moves: Round) -> None:
        _, received = self._mine(moves)
        if received is not None:
            self.layers[received.layer].write(received.slot % self.places.slots, self.arriving)
        self.places.move((move.layer, move.slot, move.expert) for move in moves)

    def _mine(self, moves: Round) -> tuple[Move | None, Move | None]:
        """What this rank sends in a round, and what it receives."""
        rank, slots = self.group.rank, self.places.slots
        sent = next((move for move in moves if move.source // slots == rank), None)
        return sent, next((move for move in moves if move.slot // slots == rank), None)
