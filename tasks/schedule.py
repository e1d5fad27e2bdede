"""How many optimizer steps a run has, and the learning rate of each. Steps are counted from 1."""

import math

from schemas.config import TrainConfig
from schemas.errors import InputError


def total_steps(train: TrainConfig, steps_per_epoch: int, rows: int) -> int:
    """Optimizer steps of a run: train.max_steps, or as many as train.epochs passes take (rounded up).

    Raises:
        InputError: the warm-up would not end before the run does.
    """
    if train.max_steps is not None:
        return train.max_steps  # the configuration has held warm-up against it
    steps = max(
        1, math.ceil(round(train.epochs * steps_per_epoch, 6))
    )  # 0.1 epochs of 30 steps are 3, not 3.0000000004
    if train.warmup_steps >= steps:
        raise InputError("train.warmup_too_long", stage="train", warmup=train.warmup_steps, steps=steps, rows=rows)
    return steps


def learning_rate(step: int, steps: int, train: TrainConfig) -> float:
    """The learning rate of one optimizer step.

    With W warm-up steps of n in all, as a share of train.learning_rate: step k of the warm-up has k / (W + 1), the
    step after it 1, and from there `linear` falls as (n - k + 1) / (n - W) and `cosine` as half a cosine wave over the
    same steps, so that both would reach 0 in the step after the last.

    Source: Transformers' get_linear_schedule_with_warmup and get_cosine_schedule_with_warmup (4.57). The decay is the
    same for each step; the warm-up is not, because theirs begins with a step at learning rate 0, which changes nothing.

    Args:
        step: from 1 to steps.
        steps: optimizer steps of the run.
        train: highest rate, schedule and warm-up.
    """
    warmup = train.warmup_steps
    if step <= warmup:
        return train.learning_rate * step / (warmup + 1)
    if train.schedule == "constant":
        return train.learning_rate
    left = (steps - step + 1) / (steps - warmup)
    if train.schedule == "linear":
        return train.learning_rate * left
    return train.learning_rate * 0.5 * (1 + math.cos(math.pi * (1 - left)))
