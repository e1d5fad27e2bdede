"""How long optimizer steps take."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Time spent in steps, without validations and checkpoints.

    It is taken by lap: a device may still be at work when a step's call returns, and has ended when its loss is read.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self.tokens = 0
        self._laps: list[float] = []  # seconds a step
        self._lap_seconds = 0.0
        self._lap_steps = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside."""
        began = time.perf_counter()
        yield
        self._lap_seconds += time.perf_counter() - began

    def count(self, tokens: int) -> None:
        """One more step, with this many trained tokens."""
        self._lap_steps += 1
        self.tokens += tokens

    def lap(self) -> None:
        """All steps counted so far have ended."""
        if self._lap_steps:
            self._laps.append(self._lap_seconds / self._lap_steps)
        self.seconds += self._lap_seconds
        self.steps += self._lap_steps
        self._lap_seconds, self._lap_steps = 0.0, 0

    @property
    def seconds_per_step(self) -> float:
        """Mean over the steps that have ended; 0 before the first."""
        return self.seconds / self.steps if self.steps else 0.0

    @property
    def median_step_seconds(self) -> float:
        """Median over the laps of their mean step; 0 before the first."""
        return statistics.median(self._laps) if self._laps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens over the time of the steps that have ended; 0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0
