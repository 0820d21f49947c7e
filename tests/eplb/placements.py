"""Random legal placements."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st


def shuffled(random, layers, experts, physical, ranks):
    """int64 [layers, physical]: every expert somewhere, on no rank twice, replicas at random."""
    slots = physical // ranks
    found = np.stack([random.permutation(experts)[np.arange(physical) % experts] for _ in range(layers)])
    for layer in found:

        def rank_of(slot, layer=layer):
            return layer[slot // slots * slots :][:slots]

        for _ in range(4 * physical):
            a, b = random.integers(0, physical, 2)
            if layer[a] not in rank_of(b) and layer[b] not in rank_of(a):
                layer[[a, b]] = layer[[b, a]]
            expert = random.integers(0, experts)
            if (layer == layer[a]).sum() > 1 and expert not in rank_of(a):
                layer[a] = expert
    return found.astype(np.int64)


@st.composite
def sizes(draw):
    """Layers, experts, slots, ranks; every number of replicas that is legal, often none."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    experts = draw(st.integers(1, 12))
    legal = [count for count in range(experts, experts * ranks + 1) if count % ranks == 0]
    physical = draw(st.sampled_from([legal[0], *legal]))
    return draw(st.integers(1, 3)), experts, physical, ranks
