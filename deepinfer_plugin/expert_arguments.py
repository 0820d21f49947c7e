"""SGLang's flags about where experts lie, with our meaning.

SGLang's own manager knows one set of experts, moves whole layers and lets every step wait for it. Ours takes its place
(``eplb/``), so SGLang is told that there is nothing for it to balance, and what the user gave is read from the raw
arguments, which reach every process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model.config import V41Config
    from .model.layout import Layout
    from .ranks import RankCounts
    from .settings import Settings

TRIVIAL = "trivial"
NOTHING = {"enable_eplb": False, "ep_num_redundant_experts": 0, "init_expert_location": TRIVIAL}


@dataclass(frozen=True)
class ExpertArguments:
    balanced: bool = False  # --enable-eplb
    redundant: int = 0  # replicas of a layer at least, of each set
    location: str = TRIVIAL  # where experts lie at first
    interval: int = 1000  # steps between two decisions

    @classmethod
    def of(cls, server_args: Any) -> ExpertArguments:
        return cls(
            bool(server_args.enable_eplb),
            server_args.ep_num_redundant_experts,
            server_args.init_expert_location,
            server_args.eplb_rebalance_num_iterations,
        )

    @property
    def as_usual(self) -> bool:
        """Every expert once, in order, for ever."""
        return not self.balanced and not self.redundant and self.location == TRIVIAL

    def layout(self, config: V41Config, ranks: int, settings: Settings) -> Layout:
        """Where experts lie at first: as given, else as a balancer left them, else in order.

        Raises:
            LayoutError: a file that the user named does not fit.
        """
        from .eplb import layout_file
        from .model.layout import Layout

        if self.location != TRIVIAL:
            return layout_file.read(self.location, config, ranks, self.redundant)
        if self.balanced and settings.expert_layout is not None and Path(settings.expert_layout).exists():
            return layout_file.read(settings.expert_layout, config, ranks, self.redundant)
        known = layout_file.remembered(config, ranks, self.redundant) if self.balanced else None
        return known or Layout.trivial(config, ranks, self.redundant)


def conflicts(given: ExpertArguments, ranks: RankCounts, config: V41Config, settings: Settings) -> Iterator[str]:
    """What cannot work, by name. How many replicas there may be is ``ranks.conflicts``'s business."""
    from .model.layout import LayoutError
    from .model.place import PlaceError, check_place

    if ranks.total == 1 and not given.as_usual:
        flags = {"--enable-eplb": given.balanced, "--init-expert-location": given.location != TRIVIAL}
        yield from (
            f"{flag}: one rank holds all experts, in order; legal with --tp-size 2 or more"
            for flag, is_given in flags.items()
            if is_given
        )
        return
    if given.balanced and given.interval < 1:
        yield f"--eplb-rebalance-num-iterations {given.interval}: legal: a number of steps, 1 or more"
    if given.location == TRIVIAL and not given.balanced:
        return
    try:
        check_place(config, 1, ranks.total, given.redundant)
        given.layout(config, ranks.total, settings)
    except PlaceError:
        return  # ``ranks.conflicts`` says it
    except LayoutError as error:
        flag = "--init-expert-location" if given.location != TRIVIAL else "--deepinfer-expert-layout"
        yield from (f"{flag}: {problem}" for problem in error.problems)
