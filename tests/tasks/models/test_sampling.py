"""Drawing a token: what may be drawn, how often, and what is refused."""

import numpy as np
import pytest

from schemas.errors import ConfigError, StageError
from tasks.models.sampling import sample


def draws(logits, temperature, top_p, count=2000):
    random = np.random.default_rng(5)
    return np.array([sample(np.array(logits, np.float32), temperature, top_p, random) for _ in range(count)])


def softmax(logits):
    weights = np.exp(np.array(logits) - np.max(logits))
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("logits", "temperature", "top_p", "kept"),
    [
        ([1.5, 0.5, -0.2, -2.0], 1.0, 0.9, [0, 1, 2]),
        ([1.5, 0.5, -0.2, -2.0], 1.0, 1.0, [0, 1, 2, 3]),
        ([1.5, 0.5, -0.2, -2.0], 1.0, 1e-9, [0]),
        ([-2.0, 1.5, -0.2, 0.5], 1.0, 0.9, [1, 2, 3]),  # by likelihood, not by id
        ([1.5, 0.5, -0.2, -2.0], 3.0, 0.85, [0, 1, 2]),
        ([1.5, 0.5, -0.2, -2.0], 0.4, 0.85, [0]),  # the temperature comes first: 0.91 on token 0
        ([0.0] * 10, 1.0, 0.8, range(8)),  # ten times 0.1: rounding keeps neither 7 nor 9
        ([np.log(0.5), np.log(0.25), np.log(0.25)], 1.0, 0.5, [0]),  # reaches it exactly
    ],
)
def test_draws_follow_the_smallest_likely_set_that_reaches_top_p(logits, temperature, top_p, kept):
    found = draws(logits, temperature, top_p)
    probabilities = softmax(np.array(logits) / temperature)
    wanted = np.where(np.isin(np.arange(len(logits)), list(kept)), probabilities, 0)
    frequencies = np.bincount(found, minlength=len(logits)) / len(found)
    assert set(found.tolist()) <= set(kept)
    np.testing.assert_allclose(frequencies, wanted / wanted.sum(), atol=0.04)


@pytest.mark.parametrize(
    ("logits", "temperature", "only"),
    [
        ([3e38, 2.9e38, -3e38], 1.0, 0),
        ([1.0, 1.01, 0.0], 1e-6, 1),
        ([1.0, 1.01, 0.0], 5e-324, 1),  # the smallest number above 0
        ([-np.inf, 4.0, -np.inf], 0.7, 1),
        ([0.0, 60.0, 0.0], 1.0, 1),
    ],
)
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_extreme_logits_and_temperatures_stay_certain(logits, temperature, only, top_p):
    assert set(draws(logits, temperature, top_p, 50).tolist()) == {only}


def test_a_forbidden_token_is_never_drawn_even_at_the_edges_of_the_uniform_number():
    class Edge:
        def __init__(self, value):
            self.value = value

        def random(self):
            return self.value

    for value in (0.0, 1 - 2.0**-53):
        for top_p in (0.999, 1.0):
            assert sample(np.array([-np.inf, 0.0, 0.3, -np.inf]), 1.0, top_p, Edge(value)) in (1, 2)


def test_temperature_zero_takes_the_first_of_the_largest_and_draws_nothing():
    assert sample(np.array([1.0, 7.0, 7.0], np.float16), 0, 0.9, None) == 1


def test_the_same_seed_gives_the_same_draws():
    logits = np.linspace(0, 1, 50)
    first, again, other = (
        [sample(logits, 1.0, 0.9, random) for _ in range(20)] for random in map(np.random.default_rng, (1, 1, 2))
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("temperature", "top_p", "message"),
    [
        (-0.5, 1.0, "temperature must be a number from 0 on, but is -0.5"),
        (float("nan"), 1.0, "temperature must be a number from 0 on, but is nan"),
        (float("inf"), 1.0, "temperature must be a number from 0 on, but is inf"),
        (0.0, 0.0, "top_p must be above 0 and at most 1, but is 0.0"),
        (1.0, 1.0001, "top_p must be above 0 and at most 1, but is 1.0001"),
        (1.0, float("nan"), "top_p must be above 0 and at most 1, but is nan"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(temperature, top_p, message):
    with pytest.raises(ConfigError, match=message):
        sample(np.zeros(3), temperature, top_p, np.random.default_rng(0))


@pytest.mark.parametrize("logits", [[0.0, np.nan], [0.0, np.inf], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_distribution_are_an_error(logits, temperature):
    with pytest.raises(StageError, match="no token can be drawn"):
        sample(np.array(logits), temperature, 1.0, np.random.default_rng(0))
