"""Time spent training."""

import time


class Clock:
    """Seconds of training: evaluations and checkpoints, which pause it, are left out."""

    def __init__(self) -> None:
        self._begin = self._paused = 0.0

    def start(self, seconds: float = 0.0) -> None:
        """Go on from `seconds`."""
        self._begin, self._paused = time.perf_counter() - seconds, 0.0

    def seconds(self) -> float:
        """Since `start`, without the pauses."""
        return time.perf_counter() - self._begin - self._paused

    def paused(self, since: float) -> None:
        """Leave out the time since `since` (of `time.perf_counter`)."""
        self._paused += time.perf_counter() - since
