"""SGLang's own sampler over verification rows.

A row is sampled exactly as the decode step that would have run it: same transforms in the same order, same position,
same seed. What a request asks for is therefore never re-implemented here, only repeated for each of its rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from .verify import VerifyRows


def only_its_newest_token(request: Any) -> bool:
    """Whether a later row of ``request`` depends on the tokens chosen at earlier ones in a way that is kept once a
    step: such a request verifies no drafts."""
    params = request.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
        or request.custom_logit_processor
    )


def sample(
    runner: Any,
    logits_output: Any,
    batch: Any,
    rows: VerifyRows,
    candidates: Tensor,
    positions: Tensor,
    seeds: Tensor | None = None,
) -> Tensor:
    """Sample every row; int64 [total].

    logits_output: of the rows; its logits are changed in place, its log-probabilities filled and, like its hidden
    states, laid out as [B * width], as SGLang reads them. batch: the scheduler's. candidates: int64 [B, width] newest
    token and drafts. positions: int64 [total]. seeds: int64 [B] to draw from; None: SGLang draws as it does.
    """
    info = repeated(batch.sampling_info, rows)
    if seeds is not None:
        info.sampling_seed = seeds[rows.owners]
    if batch.has_grammar:
        info.grammar_mask = grammar_mask(batch, rows, candidates)
    info.apply_logits_bias(logits_output.next_token_logits)
    tops = tokens = None
    if batch.return_logprob:
        owners = rows.owners.tolist()
        tops = [batch.top_logprobs_nums[owner] for owner in owners]
        tokens = [batch.token_ids_logprobs[owner] for owner in owners]
    chosen = runner.sampler(logits_output, info, batch.return_logprob, tops, tokens, positions)
    if batch.return_logprob:
        pad_logprobs(logits_output, rows)
    if logits_output.hidden_states is not None:
        logits_output.hidden_states = logits_output.hidden_states[rows.padded.flatten()]
    return chosen.to(torch.int64)


def repeated(info: Any, rows: VerifyRows) -> Any:
    """SGLang's ``SamplingBatchInfo`` of a batch, for its rows."""
    per_request = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")
    penalties = ("acc_additive_penalties", "acc_scaling_penalties")
    fields = {name: getattr(info, name) for name in per_request + penalties}
    changed: dict[str, Any] = {name: value[rows.owners] for name, value in fields.items() if value is not None}
    if info.has_custom_logit_processor:
        first, owners = rows.first.tolist(), rows.owners.tolist()
        changed["custom_params"] = [info.custom_params[owner] for owner in owners]
        # Requests with a processor have one row.
        changed["custom_logit_processor"] = {
            key: ProcessorEntry(entry.processor, [first[row] for row in entry.rows], rows.first[entry.indices])
            for key, entry in info.custom_logit_processor.items()
        }
    return dataclasses.replace(info, grammars=None, grammar_mask=None, **changed)


def grammar_mask(batch: Any, rows: VerifyRows, candidates: Tensor) -> Any:
    """The tokens that each row's grammar allows after the drafts before it; None if all are. The grammars are walked
    over the drafts and rolled back; rows after a draft that its grammar refuses are not constrained, and never
    reached."""
    mask = build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=GrammarTree.from_linear_chain(candidates),
        sampling_info=batch.sampling_info,
        device=candidates.device,
        barrier=None,
    )
    return mask and mask._replace(vocab_mask=mask.vocab_mask[rows.owners * rows.width + rows.offsets])


def pad_logprobs(output: Any, rows: VerifyRows) -> None:
    order = rows.padded.flatten().tolist()
    output.next_token_logprobs = output.next_token_logprobs[rows.padded]
    for name in (
        "next_token_top_logprobs_val",
        "next_token_top_logprobs_idx",
        "next_token_token_ids_logprobs_val",
        "next_token_token_ids_logprobs_idx",
    ):
        values = getattr(output, name)
        if values:
            setattr(output, name, [values[row] for row in order])
