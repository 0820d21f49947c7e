"""What a prefill must know about its requests and SGLang's ``ForwardBatch`` does not carry.

``ForwardBatch.init_new`` is the last place that sees the requests themselves; ``patches`` calls ``attach`` there.
The facts travel in ``model_specific_states``, a declared field, because the eager runner hands the model a
``dataclasses.replace`` copy of the batch and loose attributes do not survive that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

KEY = "deepinfer"
LONGEST = "deepinfer_longest"
REPLAYED_TOKENS = "replayed_tokens"  # its name in a response's meta_info


@dataclass(frozen=True)
class RequestFacts:
    """Host-side facts of a prefill batch, one entry per request."""

    tokens: list[Sequence[int]]  # prompt and output so far, by reference: only read while this forward is prepared
    starts: list[int]  # position of the request's first row, replayed rows included
    begins: list[bool]  # the state slot is new to the request: forget what its previous owner left there
    replayed: list[int]  # leading rows that run again only to rebuild the window
    prompt_ends: list[int]  # tokens to prefill over all chunks; a retracted request prefills its output too

    def lookback(self, request: int, length: int) -> list[int]:
        """The ``length`` token ids before the request's first row, oldest first; 0 where the sequence has not
        begun."""
        start = self.starts[request]
        ids = list(self.tokens[request][max(start - length, 0) : start])
        return [0] * (length - len(ids)) + ids


def attach(forward_batch: Any, batch: Any) -> None:
    """Called by the hook on ``ForwardBatch.init_new`` with the new batch and the ``ScheduleBatch`` it was made
    from."""
    if not batch.reqs:
        return
    if forward_batch.forward_mode.is_decode():
        forward_batch.model_specific_states = {LONGEST: longest(batch.reqs, 3)}
    if not forward_batch.forward_mode.is_extend_without_speculative():
        return
    starts = list(batch.prefix_lens)
    # Under replay the scheduler marks new slots. Without, every request starts from nothing, so position 0 is the
    # mark.
    begins = list(batch.encoder_swa_reset) if batch.encoder_swa_reset is not None else [start == 0 for start in starts]
    replayed = [request.prefix_len - start for request, start in zip(batch.reqs, starts, strict=True)]
    forward_batch.model_specific_states = {
        KEY: RequestFacts(
            tokens=[request.full_untruncated_fill_ids for request in batch.reqs],
            starts=starts,
            begins=begins,
            replayed=replayed,
            prompt_ends=[len(request.full_untruncated_fill_ids) for request in batch.reqs],
        )
    }
    for request, begin, count in zip(batch.reqs, begins, replayed, strict=True):
        if begin:  # SGLang sends customized_info with the first output token, whichever chunk that comes from
            request.customized_info = {**(request.customized_info or {}), REPLAYED_TOKENS: [count]}


def of(forward_batch: Any) -> RequestFacts | None:
    """The facts of a batch; None for decode, verify, idle and dummy batches."""
    states = forward_batch.model_specific_states
    return None if states is None else states.get(KEY)


def longest_of(forward_batch: Any) -> int | None:
    """No request of a decode or verification batch is longer; None for other batches, and where it is not known."""
    if forward_batch.forward_mode.is_target_verify():
        return getattr(forward_batch.spec_info, "longest", None)
    states = forward_batch.model_specific_states
    return None if states is None else states.get(LONGEST)


def longest(reqs: Iterable[Any], ahead: int) -> int:
    """No request is longer. ahead: tokens that the steps in flight and the one being prepared may add to what the host
    has seen of a request."""
    return max(len(request.origin_input_ids) + len(request.output_ids) for request in reqs) + ahead
