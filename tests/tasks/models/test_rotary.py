import dataclasses

import mindspore as ms
import numpy as np
import pytest

from tasks.models.decoder import Trunk
from tasks.models.families import RopeScaling
from tasks.models.rotary import rotary_frequencies, rotary_tables


@pytest.fixture
def spec(small_model):
    return dataclasses.replace(small_model.spec, head_size=8, rope_theta=10000.0)


def test_rotary_tables_stay_exact_at_far_positions(spec):
    cosine, sine = rotary_tables(4001, rotary_frequencies(spec))
    position, pair = 4000, 1
    angle = position * 10000.0 ** (-2 * pair / 8)  # 400 radians
    assert cosine.shape == sine.shape == (4001, 4)
    assert cosine.dtype == sine.dtype == np.float32
    assert abs(cosine[position, pair] - np.cos(angle)) < 1e-7  # float32 angles would be off by up to 1e-5 here
    assert abs(sine[position, pair] - np.sin(angle)) < 1e-7


def test_a_graph_gets_the_frequencies_in_float64(spec, monkeypatch):
    seen = []

    def tables(tokens, frequencies):
        seen.append(frequencies)
        return rotary_tables(tokens, frequencies)

    monkeypatch.setattr("tasks.models.decoder.rotary_tables", tables)
    Trunk(spec)(ms.Tensor(np.zeros((1, 2), np.int32)))
    assert seen == [rotary_frequencies(spec)]


def test_linear_scaling_divides_every_frequency(spec):
    scaled = rotary_frequencies(dataclasses.replace(spec, rope_scaling=RopeScaling("linear", 4.0)))
    np.testing.assert_allclose(scaled, np.array(rotary_frequencies(spec)) / 4, rtol=1e-15)


def test_llama3_scaling_keeps_fast_pairs_divides_slow_ones_and_leads_over_between(spec):
    scaling = RopeScaling("llama3", 8.0, slow=1.0, fast=4.0, original_positions=128)
    plain = np.array(rotary_frequencies(spec))
    scaled = np.array(rotary_frequencies(dataclasses.replace(spec, rope_scaling=scaling)))
    turns = 128 * plain / (2 * np.pi)  # 20, 2.0, 0.20, 0.020
    between = (turns[1] - 1) / 3
    np.testing.assert_allclose(scaled / plain, [1, between + (1 - between) / 8, 1 / 8, 1 / 8], rtol=1e-12)
