"""``--speculative-algorithm DEEPINFER_DSPARK``: what SGLang asks of an algorithm it does not know."""

from __future__ import annotations

from typing import Any

from ..model_impl import MODEL_IMPL, selected

NAME = "DEEPINFER_DSPARK"


def register() -> None:
    """Register the algorithm; ``arguments`` selects it for checkpoints with a draft head."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Algorithm(CustomSpecAlgo):
        """Every ``is_*`` stays False: True would bring in a draft model, its runner and its pool, and there are none.
        The methods below are called by the scheduler but missing in SGLang's base for registered algorithms."""

        def has_draft_kv(self) -> bool:
            return False  # draft keys live in the state of a request, not in pages

        def carries_draft_hidden_states(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return False

        def create_future_map(
            self,
            device: Any,
            req_to_token_pool: Any,
            needs_cpu_seq_lens: bool = True,
            needs_confidence_relay: bool = False,
        ) -> Any:
            from sglang.srt.managers.overlap_utils import FutureMap

            return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    @SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=only_for_our_model, spec_class=Algorithm
    )
    def factory(server_args: Any) -> type:
        from .worker import DSparkWorker

        return DSparkWorker


def only_for_our_model(server_args: Any) -> None:
    """
    Raises:
        ValueError: another model is to be served with our algorithm.
    """
    if not selected(server_args.model_impl):
        raise ValueError(f"--speculative-algorithm {NAME} needs --model-impl {MODEL_IMPL}")
