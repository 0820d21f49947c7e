"""Whether to draft at all. A block of drafts costs time even if none of it is verified, and some texts, some loads and
some draft heads are not worth it."""

from __future__ import annotations

FIRST, LAST = 8, 64  # rounds of the first pause, and of the longest
MEMORY = 8.0  # rounds over which an advantage is averaged
DOUBT = 2.0  # what the average starts from: a few bad rounds are not yet a reason


class Pause:
    """Stops drafting when it does not pay and tries again after 8, 16, 32 and then every 64 rounds, because requests
    change and nothing else would tell. What was found out with another number of requests counts for little: once
    that has doubled or halved, the next trial is at most 8 rounds away again. A trial lasts until a plan knows the
    confidences of what was drafted in it: ``lag`` rounds later, or at once."""

    def __init__(self, lag: int):
        self.lag = lag
        self.advantage = DOUBT  # of drafting over not drafting in tokens a second, averaged
        self.paused = False
        self._length, self._left = FIRST, 0  # of this or the next pause; rounds until something is decided
        self._running = 0  # requests when drafting was stopped

    def after(self, advantage: float | None, sees_newest: bool = False, running: int = 1) -> bool:
        """Whether to draft for the next round. advantage: what this round's plan promises, in tokens a second over
        those of a round without drafts; None: it had none. sees_newest: the plan knew the drafts at hand. running:
        requests of this round."""
        if not self.paused:
            if advantage is not None:
                self.advantage += (advantage - self.advantage) / MEMORY
            if self.advantage < 1:
                self._stop(running)
            return not self.paused
        if not self._running < 2 * running < 4 * self._running:
            self._left, self._length, self._running = min(self._left, FIRST), FIRST, running
        self._left -= 1
        if self._left < (0 if sees_newest else -self.lag):
            if advantage is not None and advantage >= 1:
                self.paused, self.advantage, self._length = False, DOUBT, FIRST
            else:
                self._stop(running)
        return not self.paused or self._left <= 0

    def _stop(self, running: int) -> None:
        self.paused, self._left, self._running = True, self._length, running
        self._length = min(2 * self._length, LAST)
