"""Loss, perplexity and accuracy against computations that share no code with them."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from schemas.tables import IGNORE_LABEL
from tasks.scoring import Score, score_row

RANDOM = np.random.default_rng(3)
LOGITS = RANDOM.normal(0, 3, (9, 13)).astype(np.float32)
IDS = RANDOM.integers(0, 13, 9).astype(np.int32)
LABELS = np.where(np.arange(9) < 4, IGNORE_LABEL, IDS).astype(np.int32)


def chunks(size: int) -> list[NDArray[np.float32]]:
    return [LOGITS[start : start + size] for start in range(0, len(LOGITS), size)]


def test_each_label_is_held_against_the_logits_of_the_token_before():
    expected, correct = 0.0, 0
    for place in range(4, 9):
        weights = [math.exp(float(logit)) for logit in LOGITS[place - 1]]
        expected -= math.log(weights[LABELS[place]] / sum(weights))
        correct += max(range(13), key=weights.__getitem__) == LABELS[place]
    score = score_row(chunks(9), LABELS)
    assert score.tokens == 5
    assert score.loss_sum == pytest.approx(expected, rel=1e-12)  # both float64
    assert score.correct == correct
    assert score.perplexity == pytest.approx(math.exp(expected / 5), rel=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_cut_into_chunks_changes_nothing(size: int):
    whole, parts = score_row(chunks(9), LABELS), score_row(chunks(size), LABELS)
    assert parts.loss_sum == pytest.approx(whole.loss_sum, rel=1e-12)  # the order of the sum differs
    assert (parts.correct, parts.tokens) == (whole.correct, whole.tokens)


def test_first_token_has_no_logits_before_it_and_is_not_counted():
    assert score_row(chunks(9), IDS).tokens == 8


def test_model_that_is_always_right_has_loss_near_zero_and_accuracy_one():
    sure = np.full((9, 13), -50, np.float32)
    sure[np.arange(8), IDS[1:]] = 50
    score = score_row([sure], LABELS)
    assert score.accuracy == 1
    assert score.loss == pytest.approx(0, abs=1e-12)


def test_label_tokens_weigh_the_same_whatever_row_they_are_in():
    total = Score(10.0, 1, 1) + Score(0.0, 9, 9)
    assert (total.loss, total.accuracy) == (1.0, 1.0)


def test_large_logits_do_not_overflow_and_perplexity_stays_finite():
    huge = np.zeros((9, 13), np.float32)
    huge[:, 0] = 3e5
    score = score_row([huge], np.full(9, 1, np.int32))
    assert score.loss == pytest.approx(3e5)
    assert math.isfinite(score.perplexity)
