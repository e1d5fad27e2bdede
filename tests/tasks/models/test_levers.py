"""Lower types and recomputation on a real model."""

import mindspore as ms
import numpy as np
import pytest

from tasks.models.levers import lower_precision, recompute_layers
from tasks.models.loading import load_decoder
from tasks.models.lora import attach_lora
from tasks.models.loss import AnswerLoss


def measure(stories, prepare, dropout=0.0):
    """Mean loss and gradients of a LoRA whose B is not zero, over two rows of a story."""
    decoder = load_decoder(stories)
    prepare(decoder)
    attach_lora(decoder, rank=4, alpha=8, dropout=dropout, target_modules=["q_proj", "v_proj", "down_proj"], seed=1)
    draw = np.random.default_rng(4)
    weights = ms.ParameterTuple(decoder.trainable_params())
    for weight in weights:
        if weight.name.endswith("lora_b"):
            weight.set_data(ms.Tensor(draw.normal(size=weight.shape, scale=0.05).astype(np.float32)))
    ids = np.array([[1, 403, 407, 261, 378, 432, 287, 269], [1, 338, 401, 396, 267, 410, 352, 2]], np.int32)
    decoder.set_train(True)
    call = ms.value_and_grad(AnswerLoss(decoder), None, weights, has_aux=True)
    places = np.array([place for place in range(ids.size) if place % 8], np.int32)  # all but the rows' first
    (loss, count), gradients = call(ms.Tensor(ids), ms.Tensor(ids), ms.Tensor(places))
    return decoder, float(loss) / float(count), [gradient.asnumpy() / float(count) for gradient in gradients]


@pytest.fixture(scope="module")
def plain(stories):
    return measure(stories, lambda decoder: None)


def test_float16_holds_the_matrices_and_trains_float32_adapters(stories, plain):
    decoder, loss, gradients = measure(stories, lambda decoder: lower_precision(decoder, "float16"))
    for parameter in decoder.get_parameters():
        frozen_matrix = parameter.ndim == 2 and "lora" not in parameter.name
        assert parameter.dtype == (ms.float16 if frozen_matrix else ms.float32), parameter.name
    assert loss == pytest.approx(plain[1], abs=5e-3)
    assert loss != plain[1]  # it really was computed in another type
    for found, wanted in zip(gradients, plain[2], strict=True):
        assert found.dtype == np.float32
        assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputed_layers_give_the_same_bits(stories, plain, dropout):
    _, loss, gradients = plain if not dropout else measure(stories, lambda decoder: None, dropout)
    _, found_loss, found = measure(stories, recompute_layers, dropout)
    assert found_loss == loss
    assert all(np.array_equal(one, other) for one, other in zip(found, gradients, strict=True))
