"""SGLang's speculative worker for DSpark: one model that verifies and drafts.

A decode step runs, for each request, its newest token and some of its drafts through the network; the drafts that the
network itself would have chosen are accepted, one more token follows from the last of them, and the network drafts the
next block. Nothing is undone: a rejected row wrote only to positions that the next step writes again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_observability
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from torch import Tensor

from deepinfer_plugin.cache import cache_directory
from deepinfer_plugin.runtime import graphs, requests
from deepinfer_plugin.runtime.shared_noise import Draws
from deepinfer_plugin.runtime.transfer import to_device
from deepinfer_plugin.settings import Settings

from .acceptance import accept
from .calibration import Calibration, calibration_of
from .draft_input import DraftInput
from .export import Exporter
from .profile_step import step_curve
from .sampling import only_its_newest_token, sample
from .schedule import Schedule
from .seeds import Seeds, sampler_takes_seeds
from .step_cost import StepCost
from .verify import VerifyInput, VerifyRows

Publish = Callable[[Tensor], None]


class DSparkWorker(BaseSpecWorker):
    """``drafts`` int64 [slots, block]: the drafts that follow each request's newest token, by request slot. A slot's
    drafts are only ever read after its owner's prefill or last step wrote them; were they another's, they would be
    rejected."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        super().__init__()
        self._target_worker = target_worker
        self._draft_worker = None
        self.model_runner, self.device = target_worker.model_runner, target_worker.device
        self.dspark = self.model_runner.model.network.dspark
        self.parallel = self.model_runner.model.network.parallel
        self.block = self.dspark.dspark.block_size
        self.speculative_num_draft_tokens = self.width = self.block + 1
        self.speculative_num_steps, self.topk = self.block, 1
        self.schedule: Schedule | None = None  # None: every draft is verified
        self.exporter: Exporter | None = None
        self.seeds: Seeds | None = None  # None: drafts are greedy, whatever a request asks for

    def __getattr__(self, name: str) -> Any:
        """Everything else the scheduler asks a worker for is the target worker's business."""
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    @property
    def draft_worker(self) -> None:
        return None

    @property
    def last_shared_read_runner(self) -> Any:
        return self.model_runner

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (self.model_runner.attn_backend,)

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        slots = req_to_token_pool.req_to_token.shape[0]
        self.drafts = torch.zeros(slots, self.block, dtype=torch.int64, device=self.device)
        pool = self.model_runner.token_to_kv_pool
        self.drafter = graphs.EagerDraft(self.dspark, pool.pages, pool.state)

    def init_cuda_graphs(self) -> None:
        """The network can run from here on: capture drafting, and measure what the schedule needs to know, unless all
        drafts are verified anyway."""
        super().init_cuda_graphs()
        if sampler_takes_seeds():
            self.seeds = Seeds(self.drafts.shape[0], self.device, self.parallel)
        self._capture()
        settings = Settings.current()
        if settings.speculation != "fixed":
            calibration = calibration_of(self.model_runner.server_args.model_path, settings.calibration, self.block)
            schedule = self.schedule_by(self._step_cost(), calibration)
            if get_observability().enable_metrics and self.parallel.leads:
                self.exporter = Exporter(schedule.metrics)

    def _capture(self) -> None:
        backend = self.model_runner.attn_backend
        if backend.graphs is None:
            return
        pool, counts = backend.token_to_kv_pool, graphs.row_counts(self.drafts.shape[0] - 1)
        self.drafter = graphs.logged(
            "drafting",
            counts,
            lambda: graphs.DraftGraphs(
                backend.graphs, self.dspark, pool.pages, pool.state, counts, draws=self.seeds is not None
            ),
        )

    def _step_cost(self) -> StepCost:
        backend, most = self.model_runner.attn_backend, (self.drafts.shape[0] - 1) * self.width
        with torch.no_grad():
            return StepCost(step_curve(backend.step, most, cache_directory()))

    def schedule_by(self, cost: StepCost, calibration: Calibration | None = None) -> Schedule:
        self.schedule = Schedule(cost, self.drafts.shape[0], self.block, self.device, calibration, self.parallel)
        return self.schedule

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """SGLang has the result of the oldest running step on the host."""
        if self.schedule is None:
            return
        self.schedule.learn(num_correct_drafts_per_req)
        if self.exporter is not None:
            self.exporter.update(self.schedule.planner.cost.profiled)

    # ---- steps -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward_batch_generation(
        self, batch: Any, on_publish: Publish | None = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Run a prefill or a decode step. ``on_publish(committed lengths)`` is called as soon as they are known: the
        scheduler prepares the next step from them while this one drafts. Without overlap it is None. The last two
        arguments are for grammars that advance within a step and for pipelines; neither is ours."""
        publish = on_publish or (lambda lengths: None)
        if batch.forward_mode.is_idle():
            result = self._target_worker.forward_batch_generation(batch)
            result.next_draft_input = DraftInput.empty(self.device)
            self._draft_beside_others()
            return result
        if batch.forward_mode.is_extend():
            return self._prefill(batch, publish)
        return self._decode(batch, publish)

    def _prefill(self, batch: Any, publish: Publish) -> GenerationBatchResult:
        result = self._target_worker.forward_batch_generation(batch)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = DraftInput(result.next_token_ids, batch.seq_lens)
        publish(batch.seq_lens)
        if not batch.is_prefill_only:
            if self.seeds is not None:
                self.seeds.renew(batch.sampling_info, batch.req_pool_indices.to(torch.int64))
            ends = batch.seq_lens_cpu.tolist()
            whole = [
                end >= len(request.full_untruncated_fill_ids) for request, end in zip(batch.reqs, ends, strict=True)
            ]
            self._draft(batch, result.next_token_ids, batch.seq_lens, whole)
        else:
            self._draft_beside_others()
        return result

    def _decode(self, batch: Any, publish: Publish) -> GenerationBatchResult:
        slots, starts = batch.req_pool_indices.to(torch.int64), batch.seq_lens.to(torch.int64)
        drafts = self.drafts[slots]
        candidates = torch.cat([batch.spec_info.bonus_tokens.to(torch.int64)[:, None], drafts], 1)
        rows = self._rows(batch, slots)
        verification = self._verification(batch, rows, candidates, slots, starts)
        result = self._target_worker.forward_batch_generation(batch=None, forward_batch=verification, is_verify=True)

        if self.schedule is not None:
            self.schedule.verified()
        # Every emitted token is a sample of the network's own, so the drafts cannot change what is emitted: one is
        # right if it is the sample.
        draws = self._draws(batch, slots)
        seeds = None if draws is None else draws.seeds
        samples = sample(
            self.model_runner, result.logits_output, batch, rows, candidates, verification.positions, seeds
        )
        verdict = accept(samples, rows.cu_rows, drafts)
        newest = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        result.next_token_ids = verdict.tokens.flatten()
        result.accept_lens = verdict.emitted.to(torch.int32)
        result.cap_lens = rows.lengths.to(torch.int32)
        result.new_seq_lens = starts + verdict.emitted
        result.speculative_num_draft_tokens = self.width
        result.next_draft_input = DraftInput(newest, result.new_seq_lens)
        result.extra_keep_alive_refs = [verification]
        publish(result.new_seq_lens)
        if self.schedule is not None:
            self.schedule.sampled()
        self._draft(batch, newest, result.new_seq_lens, [True] * len(batch.reqs))
        if self.schedule is not None:
            self.schedule.ended()
        return result

    def _rows(self, batch: Any, slots: Tensor) -> VerifyRows:
        limits = [0 if only_its_newest_token(request) else self.block for request in batch.reqs]
        if self.schedule is None:
            return VerifyRows.build([limit + 1 for limit in limits], self.width, self.device)
        # What SGLang has seen committed: with overlap a step behind, which is near enough for a price. A request whose
        # end was noticed after its batch was formed holds nothing any more.
        contexts = [request.kv.kv_committed_len if request.kv is not None else 0 for request in batch.reqs]
        owners = [id_of(request) for request in batch.reqs]
        drawn = [request.sampling_params.top_k != 1 for request in batch.reqs]  # SGLang's way to say greedy
        return self.schedule.rows(slots, batch.req_pool_indices_cpu.tolist(), owners, limits, contexts, drawn)

    def _verification(
        self, batch: Any, rows: VerifyRows, candidates: Tensor, slots: Tensor, starts: Tensor
    ) -> ForwardBatch:
        """The forward over ``rows`` of requests whose newest tokens run at ``starts`` int64 [B]."""
        positions = starts[rows.owners] + rows.offsets
        hidden = CaptureHiddenMode.FULL if batch.return_hidden_states else CaptureHiddenMode.NULL
        longest = requests.longest(batch.reqs, 3 * self.width)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(batch.reqs),
            input_ids=candidates[rows.owners, rows.offsets],
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=self.req_to_token_pool.req_to_token[slots[rows.owners], positions].to(torch.int64),
            seq_lens_sum=None,
            seq_lens_cpu=None,
            positions=positions,
            spec_algorithm=self.model_runner.spec_algorithm,
            spec_info=VerifyInput(positions, longest, rows, hidden),
            capture_hidden_mode=hidden,
            return_hidden_states_before_norm=False,
        )
        self.model_runner.kv_index_translator.bind_own_plan(forward_batch)
        return forward_batch

    def _draft(self, batch: Any, newest: Tensor, positions: Tensor, wanted: list[bool]) -> None:
        """Draft after the newest tokens int64 [B] at ``positions`` int64 [B], for requests that will verify drafts."""
        if self.schedule is not None and not self.schedule.drafts:
            self.schedule.skipped(batch.req_pool_indices_cpu.tolist())
            self._draft_beside_others()
            return
        drafting = [
            index
            for index, (request, wants) in enumerate(zip(batch.reqs, wanted, strict=True))
            if wants and not only_its_newest_token(request)
        ]
        if not drafting:
            self._draft_beside_others()
            return
        slots = batch.req_pool_indices.to(torch.int64)
        draws = self._draws(batch, slots)
        if len(drafting) < len(wanted):
            index = to_device(drafting, self.device)
            newest, positions, slots = newest[index], positions[index], slots[index]
            draws = None if draws is None else draws.at(index)
        draft = self.drafter(newest.to(torch.int64), positions.to(torch.int64), slots, draws)
        self.drafts[slots] = draft.tokens
        if self.schedule is not None:
            host_slots = batch.req_pool_indices_cpu.tolist()
            owners = [id_of(batch.reqs[index]) for index in drafting]
            self.schedule.drafted(slots, [host_slots[index] for index in drafting], owners, draft.confidence)

    def _draws(self, batch: Any, slots: Tensor) -> Draws | None:
        return None if self.seeds is None else self.seeds.draws(batch.sampling_info, slots)

    def _draft_beside_others(self) -> None:
        """Draft nothing, with the ranks of other attention groups that may have something to draft: experts of theirs
        are here."""
        if self.parallel.groups > 1:
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            self.drafter(nothing, nothing, nothing)


def id_of(request: Any) -> int:
    """A number that tells a request from others that had its slot before."""
    return hash(request.rid)
