"""The worker on the real network, pools and attention backend, with SGLang's scheduler played by hand."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from deepinfer_plugin.model import V41
from deepinfer_plugin.model.dspark import Draft
from deepinfer_plugin.model.parallel import Single
from deepinfer_plugin.model.place import Place, Share
from deepinfer_plugin.runtime import backend as backend_module
from deepinfer_plugin.runtime.backend import DeepInferBackend
from deepinfer_plugin.runtime.graphs import EagerStep
from deepinfer_plugin.runtime.pools import PagePoolForSGLang
from deepinfer_plugin.runtime.seeded_draw import draw, filtered
from deepinfer_plugin.speculative.algorithm import only_for_our_model
from deepinfer_plugin.speculative.draft_input import DraftInput
from deepinfer_plugin.speculative.profile_step import step_curve, usual_rows
from deepinfer_plugin.speculative.seeds import Seeds
from deepinfer_plugin.speculative.step_cost import Curve, StepCost
from deepinfer_plugin.speculative.verify import VerifyRows
from deepinfer_plugin.speculative.worker import DSparkWorker

PAGE, COLUMNS, BLOCK = 64, 512, 5
NUMBERS = itertools.count()


def request(**params):
    """A request as the scheduler has it."""
    defaults = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "top_k": 1,
    }
    params = SimpleNamespace(**defaults | params)
    kv = SimpleNamespace(kv_committed_len=100)
    name = f"r{next(NUMBERS)}"
    tokens = {"origin_input_ids": [0] * 100, "output_ids": []}
    return SimpleNamespace(sampling_params=params, custom_logit_processor=None, kv=kv, rid=name, **tokens)


class Target:
    """SGLang's worker for the network: one forward, no sampling."""

    def __init__(self, network, slots, vocabulary, runs=None):
        self.device, self.network, self.runs = "cpu", network, runs
        features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend_module, "get_exec", lambda: SimpleNamespace(features=features))
            pages = slots * COLUMNS // PAGE
            pool = PagePoolForSGLang(network.config, tokens=pages * PAGE, page_size=PAGE, slots=slots, device="cpu")
            table = torch.arange(slots * COLUMNS).reshape(slots, COLUMNS)
            self.req_to_token_pool = SimpleNamespace(req_to_token=table)
            self.model_runner = SimpleNamespace(
                model=SimpleNamespace(network=network),
                token_to_kv_pool=pool,
                req_to_token_pool=self.req_to_token_pool,
                spec_algorithm=None,
                device="cpu",
                kv_index_translator=SimpleNamespace(bind_own_plan=lambda batch: None),
                sampler=lambda output, *_: output.next_token_logits.argmax(-1),
            )
            self.model_runner.attn_backend = DeepInferBackend(self.model_runner)
        self.vocabulary = vocabulary

    def forward_batch_generation(self, batch, forward_batch=None, is_verify=False):
        prefill = forward_batch is None
        forward_batch = batch.forward_batch if prefill else forward_batch
        if self.runs is not None:
            self.runs.append(forward_batch)
        backend, pool = self.model_runner.attn_backend, self.model_runner.token_to_kv_pool
        backend.init_forward_metadata(forward_batch)
        rows = backend.forward_metadata
        hidden = self.network(rows, pool.pages, pool.state)
        logits = self.network.logits(hidden[rows.last] if prefill else hidden)
        result = GenerationBatchResult(logits_output=LogitsProcessorOutput(next_token_logits=logits))
        if prefill:
            result.next_token_ids = logits.argmax(-1)
        return result


class Desk:
    """What the scheduler does between two steps of requests in slots 1, 2, ..."""

    def __init__(self, network, prompts, vocabulary, requests=None, target=None, cost=None):
        self.target = target or Target(network, len(prompts) + 1, vocabulary)
        self.worker = DSparkWorker(None, 0, 0, self.target)
        self.worker.alloc_memory_pool(req_to_token_pool=self.target.req_to_token_pool)
        if cost is not None:
            self.worker.schedule_by(cost)
        self.slots = torch.arange(1, len(prompts) + 1)
        self.requests = requests or [request() for _ in prompts]
        self.vocabulary, self.published = vocabulary, []
        self.output: list[list[int]] = [[] for _ in prompts]
        for each, prompt in zip(self.requests, prompts, strict=True):
            each.full_untruncated_fill_ids = prompt
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(prompts),
            input_ids=torch.tensor([token for prompt in prompts for token in prompt]),
            req_pool_indices=self.slots,
            seq_lens=lengths,
            out_cache_loc=None,
            seq_lens_sum=None,
            positions=torch.cat([torch.arange(length) for length in lengths]),
            extend_seq_lens=lengths,
            extend_seq_lens_cpu=lengths.tolist(),
        )
        self.state = self.target.model_runner.token_to_kv_pool.state
        self.state.reset(self.slots)
        batch = self.batch(ForwardMode.EXTEND, lengths)
        batch.forward_batch = forward_batch
        self.take(self.worker.forward_batch_generation(batch, on_publish=self.published.append))

    def batch(self, mode, lengths, spec_info=None):
        count = len(self.slots)
        ones = torch.ones(count)
        info = SamplingBatchInfo(
            ones[:, None], ones, ones.int(), 0 * ones, True, True, False, False, False, self.vocabulary, device="cpu"
        )
        return SimpleNamespace(
            forward_mode=mode,
            reqs=self.requests,
            req_pool_indices=self.slots,
            req_pool_indices_cpu=self.slots,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            spec_info=spec_info,
            sampling_info=info,
            has_grammar=False,
            return_logprob=False,
            return_hidden_states=False,
            is_prefill_only=False,
        )

    def step(self):
        batch = self.batch(ForwardMode.DECODE, self.lengths, self.next)
        return self.take(self.worker.forward_batch_generation(batch, on_publish=self.published.append))

    def take(self, result):
        """As the scheduler reads a result; returns the tokens each request got."""
        self.next, self.lengths = result.next_draft_input, result.new_seq_lens
        if result.accept_lens is None:
            new = [[token] for token in result.next_token_ids.tolist()]
        else:
            rows = result.next_token_ids.view(len(self.slots), -1).tolist()
            new = [row[:count] for row, count in zip(rows, result.accept_lens.tolist(), strict=True)]
            self.lengths_verified = result.cap_lens.tolist()
            self.worker.on_verify_complete_cpu([len(tokens) - 1 for tokens in new], len(new))
        for output, tokens in zip(self.output, new, strict=True):
            output += tokens
        return new


@pytest.fixture(scope="module")
def model(tiny):
    return V41.load(tiny, page_size=PAGE)


def ids(length, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 1200, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def answers(model):
    """Greedy continuations by the library."""
    known: dict[tuple[int, ...], list[int]] = {}

    def of(prompt, count):
        key = tuple(prompt)
        if len(known.get(key, ())) < count:
            known[key] = model.generate(prompt, count, ignore_eos=True)
        return known[key][:count]

    return of


def test_tokens_are_those_of_the_model(model, answers):
    prompts = [ids(length) for length in (1, 5, 63, 64, 127, 130)]
    desk = Desk(model.network, prompts, model.config.vocab_size)
    steps = 0
    while min(map(len, desk.output)) < 24:
        desk.step()
        steps += 1
    for prompt, output in zip(prompts, desk.output, strict=True):
        assert output[:24] == answers(prompt, 24)
    assert steps < 24, "not one draft was right"
    assert len(desk.published) == steps + 1 and torch.equal(desk.published[-1], desk.lengths)


def state_bytes(model, desk, slot, length):
    """What the next step may read of a slot whose first ``length`` tokens are committed."""
    state, pages = desk.state, desk.target.model_runner.token_to_kv_pool.pages
    window = torch.arange(max(length - model.config.window, 0), length)
    ring = window % state.layout.ring_length
    lookback = torch.arange(max(length - model.config.engram.lookback, 0), length) % state.ngrams.shape[1]
    found = [state.rings[:, slot, ring], state.tags[:, slot, ring], state.ngrams[slot, lookback]]
    if length % 2:  # the first token of an unfinished pair
        found.append(state.tails[:, slot, (length - 1) % state.layout.tail_length])
    table = desk.target.req_to_token_pool.req_to_token[slot, ::PAGE] // PAGE
    for source in pages.sources:
        groups = length // source.ratio
        for section in (source.latent, source.latent_scale, source.key, source.key_scale):
            found.append(section[table].flatten(0, 1)[:groups])
    return [item.clone() for item in found]


def corrupt(truth, right, vocabulary):
    """A block of drafts of which exactly the first ``right`` are right."""
    return [token if index < right else (token + 1) % vocabulary for index, token in enumerate(truth)]


@pytest.mark.parametrize("start", [120, 123, 126, 127, 128, 129, 132, 135, 136])
def test_rejected_rows_leave_no_trace(model, answers, start):
    """A block verified at positions around page, pair and window boundaries, with every number of right drafts:
    afterwards the state is that of decoding token by token, and so are the next tokens."""
    vocabulary, prompt = model.config.vocab_size, ids(start, seed=2)
    truth = answers(prompt, 16)
    blocks = Desk(model.network, [prompt] * 6, vocabulary)
    for right, slot in enumerate(blocks.slots):
        blocks.worker.drafts[slot] = torch.tensor(corrupt(truth[1 : 1 + BLOCK], right, vocabulary))
    new = blocks.step()
    assert new == [truth[1 : right + 2] for right in range(6)]
    found = [state_bytes(model, blocks, slot, start + right + 1) for right, slot in enumerate(blocks.slots.tolist())]

    single = Desk(model.network, [prompt], vocabulary, requests=[request(presence_penalty=1.0)])
    for right in range(6):
        single.step()  # one row: the newest token
        expected = state_bytes(model, single, 1, start + right + 1)
        assert all(torch.equal(a, b) for a, b in zip(found[right], expected, strict=True)), f"{right} right"
    while min(map(len, blocks.output)) < 15:
        blocks.step()
    assert all(output[:15] == truth[:15] for output in blocks.output)


@pytest.mark.parametrize("lengths", [[6, 1, 4, 6, 2, 6, 6, 5], [1] * 8, [6] * 8, [6], [1, 6]], ids=str)
def test_rows_of_any_lengths(model, answers, lengths, monkeypatch):
    """Logits of a ragged batch are those of the whole blocks, row by row, Engram look-back included."""
    vocabulary, prompts = model.config.vocab_size, [ids(120 + index, seed=3) for index in range(len(lengths))]
    logits = {}
    for name, wanted in (("ragged", lengths), ("whole", [6] * len(lengths))):
        desk = Desk(model.network, prompts, vocabulary)
        for prompt, slot in zip(prompts, desk.slots, strict=True):
            desk.worker.drafts[slot] = torch.tensor(answers(prompt, 7)[1:6])
        rows = VerifyRows.build(wanted, 6, "cpu")
        monkeypatch.setattr(desk.worker, "_rows", lambda batch, slots, rows=rows: rows)
        sampler = desk.target.model_runner.sampler

        def keep(output, *rest, name=name, sampler=sampler):
            logits.setdefault(name, output.next_token_logits.clone())
            return sampler(output, *rest)

        desk.target.model_runner.sampler = keep
        new = desk.step()
        assert new == [answers(prompt, 7)[1 : length + 1] for prompt, length in zip(prompts, wanted, strict=True)]
        desk.step()
        for prompt, output in zip(prompts, desk.output, strict=True):
            assert output == answers(prompt, 13)[: len(output)]
    whole = VerifyRows.build([6] * len(lengths), 6, "cpu")
    kept = whole.offsets < torch.tensor(lengths)[whole.owners]
    assert torch.equal(logits["ragged"], logits["whole"][kept])


def test_requests_that_keep_counts_verify_one_row(model):
    kinds = [{}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}, {"min_new_tokens": 4}, {}]
    runs = []
    prompts = [ids(9 + index) for index in range(len(kinds))]
    target = Target(model.network, len(kinds) + 1, model.config.vocab_size, runs)
    desk = Desk(model.network, prompts, model.config.vocab_size, [request(**kind) for kind in kinds], target)
    new = desk.step()
    assert runs[-1].spec_info.ragged_verify_layout.lengths.tolist() == [6, 1, 1, 1, 6]
    assert [len(tokens) for tokens in new[1:4]] == [1, 1, 1]
    assert desk.worker.drafts[2:5].eq(0).all(), "nothing is drafted for them"


def test_middle_chunks_are_not_drafted_for(model):
    class Never:
        def draft(self, *_):
            raise AssertionError("drafted after a chunk that others will follow")

    prompt = ids(40)
    desk = Desk(model.network, [prompt], model.config.vocab_size)
    desk.worker.dspark = Never()
    desk.requests[0].full_untruncated_fill_ids = prompt + prompt
    batch = desk.batch(ForwardMode.EXTEND, torch.tensor([len(prompt)]))
    desk.worker._target_worker = SimpleNamespace(
        forward_batch_generation=lambda batch: GenerationBatchResult(next_token_ids=torch.tensor([1]))
    )
    desk.worker.forward_batch_generation(batch)
    batch.is_prefill_only = True
    desk.requests[0].full_untruncated_fill_ids = prompt
    desk.worker.forward_batch_generation(batch)


def test_idle_batch(model):
    desk = Desk(model.network, [ids(4)], model.config.vocab_size)
    desk.worker._target_worker = SimpleNamespace(forward_batch_generation=lambda batch: GenerationBatchResult())
    result = desk.worker.forward_batch_generation(SimpleNamespace(forward_mode=ForwardMode.IDLE))
    assert len(result.next_draft_input.bonus_tokens) == 0


def test_without_overlap_nothing_is_published(model, answers):
    desk = Desk(model.network, [ids(6)], model.config.vocab_size)
    batch = desk.batch(ForwardMode.DECODE, desk.lengths, desk.next)
    desk.take(desk.worker.forward_batch_generation(batch, pp_proxy_tensors=None))
    assert desk.output[0] == answers(ids(6), 7)[: len(desk.output[0])] and len(desk.published) == 1


def test_the_algorithm_is_for_our_model():
    only_for_our_model(SimpleNamespace(model_impl="deepinfer"))
    with pytest.raises(ValueError, match="needs --model-impl deepinfer"):
        only_for_our_model(SimpleNamespace(model_impl="auto"))


def test_accept_lengths_are_counted_right(model):
    """Drafts that survive with known probabilities: 1 + the sum of their running products is what a step emits."""
    vocabulary, survival = model.config.vocab_size, torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5])
    generator = torch.Generator().manual_seed(0)

    def token(position):
        return (7 * position + 3) % vocabulary

    class Network:
        config = model.config
        norm = model.network.norm
        parallel = model.network.parallel

        class dspark:
            dspark = model.network.dspark.dspark

            @staticmethod
            def draft(anchors, positions, slots, state, pages, choose, exchange):
                truth = token(positions[:, None] + torch.arange(1, BLOCK + 1))
                wrong = torch.rand(truth.shape, generator=generator) >= survival
                return Draft((truth + wrong.long()) % vocabulary, torch.empty(0), None)

        def __call__(self, rows, pages, state):
            return rows.positions

        def logits(self, positions):
            return torch.nn.functional.one_hot(token(positions + 1), vocabulary).float()

    desk = Desk(Network(), [[5]] * 50, vocabulary)
    tokens = [desk.step() for _ in range(100)]
    emitted = [len(new) for step in tokens for new in step]
    assert sum(emitted) / len(emitted) == pytest.approx(3.578, rel=0.02)
    for rank in range(BLOCK):
        share = sum(count > rank + 1 for count in emitted) / len(emitted)
        assert share == pytest.approx(float(survival.cumprod(0)[rank]), abs=0.03)
    assert all(output == [token(1 + index) for index in range(len(output))] for output in desk.output)


def test_requests_that_sample_draft_with_the_noise_of_their_draws(model):
    """Tokens are those of the seeds, and more drafts are right than of greedy ones, beside a greedy request."""
    vocabulary, temperature = model.config.vocab_size, 0.5

    def drawn(output, info, logprobs, tops, tokens, positions):
        probs = torch.softmax(output.next_token_logits / info.temperatures, -1)
        ranked, order = filtered(probs, info.top_ks, info.top_ps, info.min_ps)
        return draw(torch.zeros_like(ranked).scatter(1, order, ranked), info.sampling_seed, positions)

    def served(shared):
        prompts = [ids(9 + 2 * index) for index in range(8)]
        desk = Desk(model.network, prompts, vocabulary)
        desk.target.model_runner.sampler, worker = drawn, desk.worker
        if not shared:
            worker.drafter = lambda *given, draft=worker.drafter: draft(*given[:3])
        worker.seeds = Seeds(len(prompts) + 1, "cpu", Single())
        info = desk.batch(ForwardMode.DECODE, desk.lengths).sampling_info
        info.temperatures = torch.full_like(info.temperatures, temperature)
        info.top_ks, info.is_all_greedy = torch.tensor([1] + [1 << 30] * 7), False
        worker.seeds.by_slot[1:] = torch.arange(8) + 3
        batch = desk.batch
        desk.batch = lambda *given: SimpleNamespace(**{**vars(batch(*given)), "sampling_info": info})
        for _ in range(8):
            desk.step()
        for index, (prompt, output) in enumerate(zip(prompts, desk.output, strict=True)):
            logits = model.logits([*prompt, *output[:-1]])[len(prompt) :]
            probs, positions = torch.softmax(logits / temperature, -1), len(prompt) + torch.arange(len(logits))
            expected = draw(probs, torch.full_like(positions, 3 + index), positions) if index else logits.argmax(-1)
            assert output[1:] == expected.tolist()
        return sum(map(len, desk.output[1:]))

    assert served(shared=True) > served(shared=False)


def test_new_requests_get_new_seeds():
    info = SimpleNamespace(is_all_greedy=False, sampling_seed=None)
    seeds, again = Seeds(9, "cpu", Single()), Seeds(9, "cpu", Single())
    for each in (seeds, again):
        each.renew(info, torch.tensor([1, 2, 5]))
    assert len(set(seeds.by_slot[[1, 2, 5]].tolist())) == 3 and torch.equal(seeds.by_slot, again.by_slot)
    before = seeds.by_slot.clone()
    seeds.renew(info, torch.tensor([2]))
    assert (seeds.by_slot != before).nonzero().tolist() == [[2]]
    other = Seeds(9, "cpu", SimpleNamespace(place=Place(Share(2, 4), Share(2, 4)), agree=lambda value: value))
    other.renew(info, torch.tensor([1, 2, 5]))
    assert not set(other.by_slot.tolist()) & set(before[[1, 2, 5]].tolist()), "attention groups draw apart"
    for unmoved in (SimpleNamespace(is_all_greedy=True), SimpleNamespace(is_all_greedy=False, sampling_seed=1)):
        seeds.renew(unmoved, torch.tensor([1]))
    assert seeds.by_slot[1] == before[1]


# ---- scheduled -----------------------------------------------------------------------------------------------------

FREE = Curve((1, 8, 48), (1.0, 1.02, 1.04), padded=False)  # a step hardly costs more with more rows
DEAR = Curve((1, 2, 48), (1.0, 2.0, 48.0), padded=False)  # a row costs what a step costs


@pytest.mark.parametrize("curve", [FREE, DEAR, None], ids=["free rows", "dear rows", "no curve"])
def test_scheduled_tokens_are_those_of_the_model(model, answers, curve):
    prompts = [ids(length) for length in (1, 5, 63, 64, 127, 130)]
    desk = Desk(model.network, prompts, model.config.vocab_size, cost=StepCost(curve))
    verified = []
    while min(map(len, desk.output)) < 24:
        desk.step()
        verified.append(desk.lengths_verified)
    for prompt, output in zip(prompts, desk.output, strict=True):
        assert output[:24] == answers(prompt, 24)
    rows = [sum(lengths) for lengths in verified]
    if curve is FREE:
        assert max(rows) > 18
    elif curve is DEAR:
        assert rows[3:] == [len(prompts)] * len(rows[3:]), "only a draft that is certain is worth a step"
    else:
        assert rows == [6 * len(prompts)] * len(rows), "verify all while the cost is not known"
    metrics = desk.worker.schedule.metrics
    assert metrics.steps == len(rows) and metrics.emitted == sum(map(len, desk.output)) - len(prompts)
    assert int(metrics.verified_at.sum()) == sum(rows) - len(prompts) * len(rows)
    assert (metrics.drafted_at == metrics.trimmed_at + metrics.verified_at).all()
    assert not desk.worker.schedule.running


def test_a_schedule_never_gives_rows_to_requests_that_keep_counts(model):
    kinds = [request(), request(frequency_penalty=0.5), request()]
    desk = Desk(model.network, [ids(9 + i) for i in range(3)], model.config.vocab_size, kinds, cost=StepCost(FREE))
    for _ in range(4):
        desk.step()
        assert desk.lengths_verified[1] == 1


def test_time_between_steps_is_part_of_a_step(model):
    """What the host does between two steps is paid once a step, however many rows it has."""
    desk = Desk(model.network, [ids(9 + i) for i in range(2)], model.config.vocab_size, cost=StepCost(FREE))
    for _ in range(8):
        desk.step()
        time.sleep(0.05)
    cost = desk.worker.schedule.planner.cost
    assert cost.between(2) >= 0.05 and cost.sampling(2) > 0 and cost.drafting(2) > 0
    assert cost.steps(2, 12).min() >= 0.05


def test_requests_that_have_just_ended_are_still_in_the_batch(model):
    desk = Desk(model.network, [ids(9 + i) for i in range(2)], model.config.vocab_size, cost=StepCost(FREE))
    desk.requests[0].kv = None
    desk.step()


def test_prefills_alone_do_not_pile_up(model):
    desk = Desk(model.network, [ids(3)], model.config.vocab_size, cost=StepCost(FREE))
    for _ in range(200):
        desk.worker.schedule.drafted(desk.slots, [1], [7], None)
    assert len(desk.worker.schedule.arriving) <= 64


def test_the_step_is_measured_once(model, tmp_path, monkeypatch):
    pool = Target(model.network, 3, model.config.vocab_size).model_runner.token_to_kv_pool
    step = EagerStep(model.network, pool.pages, pool.state)
    with torch.no_grad():
        curve = step_curve(step, 7, tmp_path)
        assert curve.rows == (1, 2, 4, 7) and min(curve.seconds) > 0
        assert curve.row_context is not None and curve.request_context is not None
        assert pool.state.tags[:, 1:].eq(-1).all() and pool.pages.pages[1:].eq(0).all(), "only junk was written"
        monkeypatch.setattr(type(model.network), "forward", None)
        assert step_curve(step, 7, tmp_path) == curve
        assert step_curve(step, 3, tmp_path) == curve, "it covers smaller servers"


@pytest.mark.parametrize(("most", "rows"), [(1, (1,)), (64, (1, 2, 4, 8, 16, 32, 64)), (65, None), (10**9, None)])
def test_rows_worth_measuring_on_a_cpu(most, rows):
    assert usual_rows(torch.device("cpu"), most) == (rows or usual_rows(torch.device("cpu"), 64))


# ---- what the scheduler carries ------------------------------------------------------------------------------------


def test_draft_input_follows_its_batch():
    here = DraftInput(torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30]))
    here.filter_batch(torch.tensor([0, 2]), [0, 2])
    here.merge_batch(DraftInput(torch.tensor([9]), torch.tensor([90])))
    assert here.bonus_tokens.tolist() == [1, 3, 9] and here.new_seq_lens.tolist() == [10, 30, 90]
    relayed = DraftInput(torch.tensor([1, 2]), torch.tensor([10, 20]), future_indices=torch.tensor([4, 5]))
    relayed.filter_batch(torch.tensor([1]))
    relayed.merge_batch(DraftInput(torch.empty(0), torch.empty(0), future_indices=torch.tensor([7])))
    assert relayed.future_indices.tolist() == [5, 7]


def test_verify_rows():
    rows = VerifyRows.build([3, 1, 2], 4, "cpu")
    assert rows.owners.tolist() == [0, 0, 0, 1, 2, 2] and rows.offsets.tolist() == [0, 1, 2, 0, 0, 1]
    assert rows.cu_rows.tolist() == [0, 3, 4, 6]
    assert rows.padded.tolist() == [[0, 1, 2, 2], [3, 3, 3, 3], [4, 5, 5, 5]]
