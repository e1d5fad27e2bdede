"""The one training loop, around one named step function; model, loss, optimizer and schedule are handed in.

Everything that a step does is a function of its number, the state before it and the settings. A training that was
stopped or killed and goes on from a checkpoint therefore ends with the same bytes as one that was not (on CPU, where
MindSpore's operators are deterministic).
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from schemas.errors import StageError
from schemas.reports import CurvePoint, TrainTimings, ValidationPoint
from tasks.batches import MicroBatch
from tasks.checkpoints import Checkpoint, Checkpoints, Progress, Tensors
from tasks.memory import peak_memory_bytes
from tasks.models.train_step import TrainStep
from tasks.stages import StageContext
from tasks.step_clock import StepClock

logger = logging.getLogger("mindtune.training")

MOST_SKIPPED = 30  # steps left out in a row; a scale of 2**24 has come down to 1 by then


@dataclass(frozen=True)
class Course:
    """What a training does at which step.

    Args:
        steps: optimizer steps in all.
        micro_batches: of a step, counted from 1; at least one.
        shapes: a micro-batch of each shape that there is.
        validation: the micro-batches to validate on, afresh for each call.
        learning_rate: of a step.
        epoch_after: passes over the rows that are done after a step.
        validate_every: steps between validations; there is always one before the first step and after the last.
        log_every: steps between log lines.
        checkpoint_every: steps between checkpoints; there is always one after the last step.
        may_skip: a gradient norm that is not finite says that the step was left out (see TrainStep.loss_scale).
    """

    steps: int
    micro_batches: Callable[[int], Iterable[MicroBatch]]
    shapes: Sequence[MicroBatch]
    validation: Callable[[], Iterable[MicroBatch]]
    learning_rate: Callable[[int], float]
    epoch_after: Callable[[int], float]
    validate_every: int
    log_every: int
    checkpoint_every: int
    may_skip: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a training leaves.

    Args:
        progress: curves, and the step of the best validation after step 0; the earlier one where two are equal.
        last: weights and moments after the last step, by name.
        best: the same after the best step.
        timings: of this attempt.
    """

    progress: Progress
    last: Tensors
    best: Tensors
    timings: TrainTimings


class Training:
    """A training from its newest checkpoint, or from the start, to the end.

    Args:
        step: does a step.
        course: what is done when.
        checkpoints: where to go on from, and where to save.
        context: told of progress, asked whether to stop.
    """

    def __init__(self, step: TrainStep, course: Course, checkpoints: Checkpoints, context: StageContext) -> None:
        self.step = step
        self.course = course
        self.checkpoints = checkpoints
        self.context = context
        self.progress = Progress()
        self.best: Tensors = {}
        self._unread: list[tuple[int, float, Any, Any]] = []  # step, learning rate, loss, norm
        self._clock = StepClock()

    def run(self) -> Outcome:
        """Train.

        Raises:
            StageError: `train.not_finite` loss or gradient norm, with the first such step; `train.overflow` in too many
                steps in a row; `train.no_change` of any weight by the first step; `stage.interrupted` when the process
                was asked to end, after a checkpoint.
        """
        began = time.perf_counter()
        resumed_from = self._resume()
        for number, batch in enumerate(self.course.shapes, 1):
            self.context.report_progress(
                resumed_from, self.course.steps, f"compiling graph {number} of {len(self.course.shapes)}"
            )
            self.step.compile(batch)
        compile_seconds = time.perf_counter() - began
        logger.info("compiled %d graphs in %.1f s", len(self.course.shapes), compile_seconds)
        while True:
            if self._validation_is_due():
                self._validate()
            if self._checkpoint_is_due(resumed_from):
                self._save()
            if self.progress.step == self.course.steps:
                break
            self._stop_if_asked()
            self._advance()
        if not self.progress.curve:
            self._stop_for_overflow()
        timings = TrainTimings(
            seconds=time.perf_counter() - began,
            compile_seconds=compile_seconds,
            median_step_seconds=self._clock.median_step_seconds,
            trained_tokens_per_second=self._clock.tokens_per_second,
            peak_memory_bytes=peak_memory_bytes(),
            resumed_from_step=resumed_from,
        )
        return Outcome(self.progress, self.step.state(), self.best, timings)

    def _resume(self) -> int:
        shapes = {name: array.shape for name, array in self.step.state().items()}
        checkpoint = self.checkpoints.newest(shapes)
        if checkpoint is None:
            return 0
        self.progress = checkpoint.progress
        self.best = checkpoint.best
        self.step.restore(checkpoint.now)
        logger.info("going on from the checkpoint of step %d", self.progress.step)
        return self.progress.step

    def _advance(self) -> None:
        number = self.progress.step + 1
        before = None if self.progress.curve else self.step.state()
        rate = self.course.learning_rate(number)
        with self._clock.running():
            batches = list(self.course.micro_batches(number))
            loss, norm = self.step(batches, number, rate)
        self._clock.count(sum(batch.trained_tokens for batch in batches))
        self._unread.append((number, rate, loss, norm))
        self.progress = self.progress.model_copy(update={"step": number})
        if before is not None:
            self._read()
            if self.progress.curve:
                self._check_change(before)
        if number % self.course.log_every == 0 or number == self.course.steps:
            self._read()
            self._log()
        text = f"loss {self.progress.curve[-1].loss:.3f}" if self.progress.curve else "gradients are not finite yet"
        self.context.report_progress(number, self.course.steps, text)

    def _read(self) -> None:
        """Wait for the steps done so far and put them on the curve; the first bad one is an error."""
        points = []
        skipped = list(self.progress.skipped)
        with self._clock.running():
            for number, rate, loss, norm in self._unread:
                if self.course.may_skip and not math.isfinite(float(norm)):
                    logger.info("step %d is left out: its gradients are not finite; the loss scale is halved", number)
                    skipped.append(number)
                    continue
                points.append(
                    CurvePoint(
                        step=number,
                        epoch=self.course.epoch_after(number),
                        loss=_finite("loss", number, float(loss)),
                        learning_rate=rate,
                        gradient_norm=_finite("gradient norm", number, float(norm)),
                    )
                )
        self._clock.lap()
        self._unread.clear()
        curve = (*self.progress.curve, *points)
        self.progress = self.progress.model_copy(update={"curve": curve, "skipped": tuple(skipped)})
        ends = zip(skipped, skipped[MOST_SKIPPED - 1 :], strict=False)
        if any(last - first == MOST_SKIPPED - 1 for first, last in ends):
            self._stop_for_overflow()

    def _stop_for_overflow(self) -> None:
        skipped = self.progress.skipped
        raise StageError("train.overflow", stage="train", count=len(skipped), first=skipped[0], last=skipped[-1])

    def _check_change(self, before: Tensors) -> None:
        after = self.step.state()
        names = [weight.name for weight in self.step.weights]
        if all(np.array_equal(before[name], after[name]) for name in names):
            raise StageError("train.no_change", stage="train", step=self.progress.step)

    def _validation_is_due(self) -> bool:
        step, done = self.progress.step, self.progress.validation
        if done and done[-1].step == step:
            return False
        return step % self.course.validate_every == 0 or step == self.course.steps

    def _validate(self) -> None:
        self._read()
        step = self.progress.step
        loss = _finite("validation loss", step, self.step.mean_loss(self._watched(self.course.validation())))
        losses = {point.step: point.loss for point in self.progress.validation}
        best = self.progress.best_step
        # Step 0 is the base model, not a result of training.
        if step > 0 and (best is None or loss < losses[best]):
            best = step
            self.best = self.step.state()
        points = (*self.progress.validation, ValidationPoint(step=step, loss=loss))
        self.progress = self.progress.model_copy(update={"validation": points, "best_step": best})
        logger.info("step %d/%d: validation loss %.4f", step, self.course.steps, loss)

    def _watched(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            self._stop_if_asked()
            yield batch

    def _checkpoint_is_due(self, resumed_from: int) -> bool:
        step = self.progress.step
        if step in (0, resumed_from):
            return False
        return step % self.course.checkpoint_every == 0 or step == self.course.steps

    def _save(self) -> None:
        self._read()
        self.checkpoints.save(Checkpoint(self.progress, self.step.state(), self.best))

    def _stop_if_asked(self) -> None:
        if self.context.stop_requested():
            self._save()
            raise StageError("stage.interrupted", stage="train", step=self.progress.step)

    def _log(self) -> None:
        if not self.progress.curve:
            return
        point = self.progress.curve[-1]
        left = (self.course.steps - point.step) * self._clock.seconds_per_step
        logger.info(
            "step %d/%d: loss %.4f, learning rate %.2e, gradient norm %.3f, %.0f trained tokens/s, %s left",
            point.step,
            self.course.steps,
            point.loss,
            point.learning_rate,
            point.gradient_norm,
            self._clock.tokens_per_second,
            timedelta(seconds=round(left)),
        )


def _finite(what: str, step: int, value: float) -> float:
    if not math.isfinite(value):
        raise StageError("train.not_finite", stage="train", what=what, step=step, value=value)
    return value
