import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_plugin.model.rows import Rows

requests = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=6)


@given(requests)
def test_rows_of_ragged_requests(batch):
    starts, lengths = [s for s, _, _ in batch], [n for _, n, _ in batch]
    replayed = [min(r, n) for _, n, r in batch]
    total = sum(lengths)
    slots = [i + 1 for i in range(len(batch))]
    rows = Rows.build(
        torch.arange(total), starts, lengths, slots, torch.zeros(len(batch), 4, dtype=torch.int64), replayed
    )
    row = 0
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for offset in range(length):
            assert rows.positions[row] == start + offset
            assert rows.requests[row] == index and rows.row_slots[row] == slots[index]
            assert rows.fresh[row] == offset and rows.ring_rows[row] == length - offset
            assert bool(rows.writes_pages[row]) == (offset >= replayed[index])
            assert rows.window_floor[row] == (start if replayed[index] else 0)
            row += 1
        assert rows.last[index] == row - 1
    assert rows.count == total and rows.cu_rows.tolist()[-1] == total
