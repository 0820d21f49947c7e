"""A grammar that begins at the end of reasoning, walked over drafts that cross the boundary at every place."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
pytest.importorskip("xgrammar")

from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from transformers import AutoTokenizer

from deepinfer_plugin.speculative.acceptance import accept
from deepinfer_plugin.speculative.sampling import sample
from deepinfer_plugin.speculative.verify import VerifyRows

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["answer", "count"],
    "additionalProperties": False,
}
TEXT = '{"answer": "Paris", "count": 2}'
BLOCK = 5


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def backend(tokenizer):
    return XGrammarGrammarBackend(tokenizer, vocab_size=len(tokenizer), model_eos_token_ids=[tokenizer.eos_token_id])


@pytest.fixture
def grammar(tokenizer, backend):
    end = tokenizer.convert_tokens_to_ids("</think>")
    found = ReasonerGrammarObject(backend.dispatch_json(json.dumps(SCHEMA)), [end])
    found.maybe_init_reasoning(True)
    return found


def verify(grammar, wanted, drafts, newest, vocabulary, length):
    """One verification of one request: the network wants ``wanted`` tokens, in that order, above all others, and would
    rather have id 11, 12, ... than any other legal one. Returns the emitted tokens."""
    rows = VerifyRows.build([length], BLOCK + 1, "cpu")
    logits = -torch.arange(vocabulary).float().repeat(length, 1)
    logits[torch.arange(length), torch.tensor(wanted[:length])] = 100.0
    one = torch.ones(1)
    info = SamplingBatchInfo(
        one[:, None], one, one.int(), one * 0, True, True, False, False, False, vocabulary, device="cpu"
    )
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(grammar=grammar)], sampling_info=info, has_grammar=True, return_logprob=False
    )
    runner = SimpleNamespace(sampler=lambda output, *_: output.next_token_logits.argmax(-1))
    output = LogitsProcessorOutput(next_token_logits=logits)
    candidates = torch.tensor([[newest, *drafts]])
    samples = sample(runner, output, batch, rows, candidates, torch.arange(length))
    verdict = accept(samples, rows.cu_rows, candidates[:, 1:])
    return verdict.tokens[0, : int(verdict.emitted[0])].tolist()


@pytest.mark.parametrize("length", range(1, BLOCK + 2))
@pytest.mark.parametrize("cut", range(1, 6))
def test_the_boundary_may_lie_anywhere_in_a_block(tokenizer, grammar, cut, length):
    """The first block ends after ``cut`` right drafts, so every later one begins elsewhere."""
    vocabulary, encode = len(tokenizer), lambda text: tokenizer.encode(text, add_special_tokens=False)
    script = [*encode("so I think"), tokenizer.convert_tokens_to_ids("</think>"), *encode(TEXT), tokenizer.eos_token_id]
    reasoning = script.index(tokenizer.convert_tokens_to_ids("</think>")) + 1
    output, first = script[:1], True
    grammar.accept_token(script[0])  # the prefill's token
    while len(output) < len(script):
        coming = [*script[len(output) :], *[5] * (BLOCK + 1)][: BLOCK + 1]
        drafts = coming[:BLOCK]
        if first:
            drafts = [token if index < cut else 7 for index, token in enumerate(drafts)]
        emitted = verify(grammar, coming, drafts, output[-1], vocabulary, length)
        assert emitted == coming[: len(emitted)]
        assert len(emitted) == min(length, cut + 1 if first else BLOCK + 1)
        for token in emitted:  # as the scheduler does once it has the result
            if grammar.is_terminated():
                break
            grammar.accept_token(token)
            output.append(token)
        assert grammar.grammar.accepted_tokens == output[reasoning:], "only what was emitted, and nothing of reasoning"
        first = False
    assert grammar.is_terminated()
    assert json.loads(tokenizer.decode(output[reasoning:-1])) == {"answer": "Paris", "count": 2}


def test_drafts_that_break_the_grammar_are_rejected(tokenizer, grammar):
    """What the network wants is illegal after the boundary; so are its drafts. The emitted token is legal, and the
    grammar is where it was."""
    vocabulary, end = len(tokenizer), tokenizer.convert_tokens_to_ids("</think>")
    grammar.accept_token(end)
    before = list(grammar.grammar.accepted_tokens)
    illegal = tokenizer.encode("plan", add_special_tokens=False)[0]
    (emitted,) = verify(grammar, [illegal] * 6, [illegal] * 5, end, vocabulary, 6)
    assert emitted != illegal and tokenizer.decode([emitted]).strip().startswith("{")
    assert grammar.grammar.accepted_tokens == before and not grammar.is_terminated()
