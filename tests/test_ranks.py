"""How ranks share a machine."""

from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.ranks import BINDING, SAME_MEMORY, RankCounts, core_parts, share_machine


def test_cores_are_divided_and_shared_where_there_are_too_few():
    assert core_parts(2, [0, 1]) == [[0], [1]]
    assert core_parts(2, [4, 5, 6, 7, 9]) == [[4, 5], [6, 7, 9]]
    assert core_parts(4, [2, 3]) == [[2], [3], [2], [3]]


def test_binding_is_set_for_several_ranks_and_never_replaced():
    found = {}
    share_machine(RankCounts(1, 1), [0, 1, 2], found)
    assert found == {}
    share_machine(RankCounts(2, 1), [0, 1, 2], found)
    assert found == {BINDING: "0|1,2", SAME_MEMORY: "0"}
    share_machine(RankCounts(2, 1), [7], found)
    assert found == {BINDING: "0|1,2", SAME_MEMORY: "0"}


def test_the_first_rank_is_the_largest(tiny):
    place = RankCounts(4, 2).largest(V41Config.load(tiny))
    assert (place.heads.of, place.experts.of) == (2, 4)
    assert len(place.experts.part(10)) == 3
