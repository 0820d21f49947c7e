"""Self-checks of a served model: one at every start, one on every forward in debug mode."""

from __future__ import annotations

import torch

from deepinfer_plugin.model.block import expand_embedding
from deepinfer_plugin.model.memory import StatePool
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.rows import Rows

TOLERANCE = 1e-3


class SelfCheckError(RuntimeError):
    """The loaded model does not compute what it must; serving it would only look like serving."""


def check_stream_mix(network: Network) -> None:
    """At layer 0 all residual streams equal the embedding, so any mix whose weights sum to 1 must give the
    embedding back. A kernel that loses the weights scales every activation of the network by the same wrong factor
    and still answers fluently for a while.

    Raises:
        SelfCheckError: with the provider and the factor measured.
    """
    config = network.config
    ids = torch.arange(min(64, config.vocab_size), device=network.norm.weight.device)
    embedding = network.embed_tokens(ids)
    streams, first = expand_embedding(embedding, config.hc_mult)
    for pre in (first, torch.full_like(first, 1 / config.hc_mult)):
        out = network.ops.hc_collapse(streams, pre).double()
        factor = float((out * embedding.double()).sum() / embedding.double().square().sum())
        if not abs(factor - 1) <= TOLERANCE:
            raise SelfCheckError(
                f"op hc_collapse of provider {network.ops.choices['hc_collapse']!r} gives {factor:.3f} x the embedding "
                "at layer 0, where all streams equal it and the weights sum to 1: it ignores its mix weights; "
                "force another provider for this op"
            )


def check_window(rows: Rows, state: StatePool, window: int) -> None:
    """Every window key a request's rows will read from the rings must carry the position it is read as.

    Debug mode only: it waits for the device.

    Raises:
        SelfCheckError: names slot, ring and position.
    """
    length = state.layout.ring_length
    for request, slot in enumerate(rows.slots.tolist()):
        first, end = rows.cu_rows[request].item(), rows.cu_rows[request + 1].item()
        if slot == 0 or first == end:
            continue
        start, floor = rows.positions[first].item(), rows.window_floor[first].item()
        positions = torch.arange(max(floor, start - window + 1, 0), start, device=state.tags.device)
        tags = state.tags[:, slot, positions % length]
        wrong = (tags != positions).nonzero()
        if len(wrong):
            ring, column = wrong[0].tolist()
            raise SelfCheckError(
                f"ring {ring} of state slot {slot} holds position {tags[ring, column]} where position "
                f"{positions[column]} is read: the slot was not rebuilt for the request that starts at {start}"
            )
