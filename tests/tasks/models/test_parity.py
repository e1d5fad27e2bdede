"""Comparing a cached model with the whole pass, with models of a few lines of NumPy that are right or wrong."""

import numpy as np
import pytest

from tasks.models.generation import Generator
from tasks.models.parity import COMPARED, DECODED, compared_positions, measure_parity, relative_difference

VOCABULARY, CACHE, CHUNK = 5, 1024, 8


class Summing:
    """Logits after a token: the running sum of a vector for each token; wrong on demand."""

    def __init__(self, error=None):
        self.table = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
        self.rows = np.zeros((CACHE, VOCABULARY), np.float32)
        self.error = error
        self.decoded = []

    def __call__(self, ids, positions):
        self.rows[positions] = self.table[ids[0]]
        logits = np.stack([self.rows[: position + 1].sum(0) for position in positions])
        if len(positions) == 1:
            self.decoded.append(int(positions[0]))
        if self.error is not None:
            logits = self.error(logits, positions)
        return logits


def measure(lengths, error=None):
    model = Summing(error)
    ids = np.random.default_rng(1).integers(0, VOCABULARY, max(lengths)).tolist()
    wanted = dict(enumerate(np.cumsum(model.table[ids], axis=0)))
    chosen = {position: wanted[position] for length in lengths for position in compared_positions(length)}
    generator = Generator(model, cache_length=CACHE, prefill_chunk=CHUNK, vocabulary=VOCABULARY)
    return measure_parity(generator, ids, lengths, chosen), model


def test_a_right_model_differs_by_rounding_only():
    points, _ = measure((1, 7, 8, 9, 300))
    assert [point.length for point in points] == [1, 7, 8, 9, 300]
    for point in points:
        assert point.max_relative_difference < 1e-5
        assert point.decode_relative_difference < 1e-5


def test_an_error_in_prompts_and_one_in_single_tokens_are_told_apart():
    (point,), _ = measure((20,), lambda logits, positions: logits * (1.5 if len(positions) == 1 else 1))
    assert point.max_relative_difference < 1e-5
    assert point.decode_relative_difference == pytest.approx(0.5, abs=1e-4)
    (point,), _ = measure((20,), lambda logits, positions: logits * (1.5 if len(positions) > 1 else 1))
    assert point.max_relative_difference == pytest.approx(0.5, abs=1e-4)
    assert point.decode_relative_difference < 1e-5


@pytest.mark.parametrize("place", [0, 11, 19])
def test_an_error_at_one_position_is_found(place):
    def error(logits, positions):
        return logits + (positions == place)[:, None] * np.float32(100)

    (point,), _ = measure((20,), error)
    assert point.max_relative_difference > 1
    assert point.decode_relative_difference > 1


def test_logits_that_are_not_numbers_are_not_taken_for_equal():
    (point,), _ = measure((20,), lambda logits, positions: np.where(positions[:, None] == 3, np.nan, logits))
    assert np.isnan(point.max_relative_difference)
    assert np.isnan(point.decode_relative_difference)


def test_single_tokens_start_from_an_empty_cache_for_a_short_text_and_near_the_end_of_a_long_one():
    _, model = measure((DECODED, 200))
    assert model.decoded == [*range(DECODED), *range(200 - DECODED, 200)]


@pytest.mark.parametrize("length", [1, 2, DECODED, COMPARED])
def test_every_position_of_a_short_text_is_compared(length):
    assert compared_positions(length) == list(range(length))


def test_a_long_text_is_compared_evenly_and_at_its_end():
    positions = compared_positions(4000)
    assert positions == sorted(set(positions))
    assert positions[0] == 0
    assert positions[-DECODED:] == list(range(4000 - DECODED, 4000))
    assert len(positions) <= COMPARED + DECODED
    assert max(np.diff(positions)) <= 4000 / (COMPARED - 1) + 1


def test_differences_are_relative_to_the_largest_wanted_logit():
    wanted = np.array([[1.0, -4.0], [2.0, 0.0]], np.float32)
    assert relative_difference(wanted + np.float32([[0, 0], [0, 1]]), wanted) == pytest.approx(0.25)
