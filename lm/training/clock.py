"""Time spent training."""

import time


class Clock:
    """Seconds of training, without evaluations and checkpoints."""

    def __init__(self) -> None:
        self._begin = self._paused = 0.0

    def start(self, seconds: float = 0.0) -> None:
        """Start at `seconds`."""
        self._begin, self._paused = time.perf_counter() - seconds, 0.0

    def seconds(self) -> float:
        """Seconds since `start`, pauses excluded."""
        return time.perf_counter() - self._begin - self._paused

    def paused(self, since: float) -> None:
        """Exclude the time since `since` (`time.perf_counter`)."""
        self._paused += time.perf_counter() - since
