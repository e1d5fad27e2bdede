"""Adapters on the small model: what they start with, what they change, what they train."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from schemas.errors import InputError
from tasks.models.adapter import Adapter, layers_of
from tasks.models.dropout import draw_masks
from tasks.models.loading import load_decoder
from tasks.models.lora import adapter_tensors, attach_adapter, attach_lora

RANK, ALPHA = 3, 12.0
TARGETS = ["q_proj", "v_proj", "down_proj"]
FIRST_DRAWS = [-0.0174507014, 0.1279571950, -0.1174999624, 0.0048481710]
IDS = np.random.default_rng(6).integers(0, 37, (2, 7), dtype=np.int32)


def with_lora(model, **changes):
    decoder = load_decoder(model.folder)
    settings = {"rank": RANK, "alpha": ALPHA, "dropout": 0.0, "target_modules": TARGETS, "seed": 1} | changes
    return decoder, attach_lora(decoder, **settings)


def random_layers(model, layers, seed=8):
    """Updates that are far from zero."""
    draw = np.random.default_rng(seed)
    shapes = {layer: model.tensors[f"{layer}.weight"].shape for layer in layers}
    return {
        layer: (
            draw.normal(size=(RANK, inner), scale=0.2).astype(np.float32),
            draw.normal(size=(out, RANK), scale=0.2).astype(np.float32),
        )
        for layer, (out, inner) in shapes.items()
    }


def merged(model, layers, scale):
    """The model's weights with the updates added, float64."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in model.tensors.items()}
    for layer, (a, b) in layers.items():
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"] + scale * (b.astype(np.float64) @ a.astype(np.float64))
    return tensors


def set_layers(decoder, layers):
    cells = dict(decoder.cells_and_names())
    for layer, (a, b) in layers.items():
        cells[layer].lora_a.set_data(ms.Tensor(a))
        cells[layer].lora_b.set_data(ms.Tensor(b))


def hidden(decoder, ids=IDS):
    return decoder(ms.Tensor(ids)).asnumpy()


@pytest.fixture(scope="module")
def base_hidden(small_model):
    return hidden(load_decoder(small_model.folder))


def test_a_fresh_adapter_changes_nothing(small_model, base_hidden):
    decoder, layers = with_lora(small_model)
    assert len(layers) == 6
    np.testing.assert_array_equal(hidden(decoder), base_hidden)


def test_an_update_is_scaled_by_alpha_over_rank(small_model, numpy_llama, base_hidden):
    decoder, layers = with_lora(small_model)
    updates = random_layers(small_model, layers)
    set_layers(decoder, updates)
    found = hidden(decoder)
    weights = merged(small_model, updates, ALPHA / RANK)
    expected = np.stack([numpy_llama.hidden_states(weights, row, **small_model.sizes) for row in IDS])
    assert np.abs(expected - base_hidden).max() > 1
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_only_the_adapter_is_trainable(small_model):
    decoder, layers = with_lora(small_model)
    names = [parameter.name for parameter in decoder.trainable_params()]
    assert names == [f"{layer}.{half}" for layer in layers for half in ("lora_a", "lora_b")]


def test_the_frozen_weights_keep_names_and_values(small_model):
    decoder, _ = with_lora(small_model, dropout=0.1)
    frozen = {parameter.name: parameter for parameter in decoder.get_parameters() if not parameter.requires_grad}
    assert frozen.keys() - small_model.tensors.keys() == {"dropout_key"}
    for name, tensor in small_model.tensors.items():
        np.testing.assert_array_equal(frozen[name].asnumpy(), tensor)


def test_layers_come_in_model_order_whatever_the_order_of_targets(small_model):
    _, layers = with_lora(small_model, target_modules=["down_proj", "q_proj"])
    assert layers == (
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    )


def test_an_unknown_target_is_refused_before_anything_is_changed(small_model):
    decoder = load_decoder(small_model.folder)
    with pytest.raises(InputError, match="target_modules names query, which match no layer"):
        attach_lora(decoder, rank=2, alpha=1.0, dropout=0.0, target_modules=["q_proj", "query"], seed=0)
    assert len(decoder.trainable_params()) == len(small_model.tensors)


def test_the_draw_depends_on_seed_and_layer_only(small_model):
    all_of_them = adapter_tensors(with_lora(small_model)[0])
    some = adapter_tensors(with_lora(small_model, target_modules=["v_proj"])[0])
    other_seed = adapter_tensors(with_lora(small_model, seed=2)[0])
    assert 0 < len(some) < len(all_of_them)
    for name, tensor in some.items():
        np.testing.assert_array_equal(tensor, all_of_them[name])
    starts = [tensor for name, tensor in all_of_them.items() if "lora_A" in name]
    starts += [tensor for name, tensor in other_seed.items() if "lora_A" in name]
    assert len({tensor.tobytes() for tensor in starts}) == 12


def test_the_draw_is_the_same_in_every_version(small_model):
    """A change of these numbers changes what a seed means, and every trained adapter."""
    a = adapter_tensors(with_lora(small_model)[0])["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    np.testing.assert_allclose(a[0, :4], FIRST_DRAWS, rtol=1e-6)


def test_a_starts_uniform_as_in_peft_and_b_at_zero(small_model):
    tensors = adapter_tensors(with_lora(small_model, rank=400)[0])
    a = tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"]
    bound = 29**-0.5
    assert a.shape == (400, 29)
    assert np.abs(a).max() < bound
    assert np.abs(a).max() > 0.999 * bound
    assert abs(a.mean()) < 0.02 * bound
    assert abs(a.std() - bound / 3**0.5) < 0.02 * bound
    assert all((tensor == 0).all() for name, tensor in tensors.items() if "lora_B" in name)


def test_adapter_tensors_bear_pefts_names_and_are_copies(small_model):
    decoder, layers = with_lora(small_model)
    tensors = adapter_tensors(decoder)
    assert list(layers_of(tensors)) == list(layers)
    assert tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"].shape == (RANK, 21)
    assert tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"].shape == (20, RANK)
    for tensor in tensors.values():
        tensor += 1
    assert all((tensor == 0).all() for name, tensor in adapter_tensors(decoder).items() if "lora_B" in name)


class WeightedSum(nn.Cell):
    """A loss that weighs every hidden value differently."""

    def __init__(self, decoder, weights):
        super().__init__(auto_prefix=False)
        self.decoder, self.weights = decoder, ms.Tensor(weights.astype(np.float32))

    def construct(self, ids):
        return (self.decoder(ids) * self.weights).sum()


def test_gradients_agree_with_finite_differences_in_numpy(small_model, numpy_llama):
    decoder, layers = with_lora(small_model)
    updates = random_layers(small_model, layers)
    set_layers(decoder, updates)
    row, step = IDS[0], 1e-5
    weights = np.random.default_rng(9).normal(size=(1, len(row), 21))

    def loss():
        tensors = merged(small_model, updates, ALPHA / RANK)
        return (numpy_llama.hidden_states(tensors, row, **small_model.sizes) * weights[0]).sum()

    updates = {layer: tuple(half.astype(np.float64) for half in pair) for layer, pair in updates.items()}
    gradient = ms.grad(WeightedSum(decoder, weights), None, ms.ParameterTuple(decoder.trainable_params()))
    found = [part.asnumpy() for part in gradient(ms.Tensor(row[None]))]
    halves = [half for layer in layers for half in updates[layer]]
    assert len(found) == len(halves) == 12
    draw = np.random.default_rng(10)
    for part, half in zip(found, halves, strict=True):
        assert part.shape == half.shape
        scale = np.abs(part).max()
        for index in draw.choice(half.size, 12, replace=False):
            position = np.unravel_index(index, half.shape)
            before = half[position]
            half[position] = before + step
            above = loss()
            half[position] = before - step
            below = loss()
            half[position] = before
            assert abs(part[position] - (above - below) / (2 * step)) < 1e-4 * scale


def test_dropout_acts_on_the_update_in_training_only(small_model):
    decoder, layers = with_lora(small_model, dropout=0.3)
    plain, _ = with_lora(small_model)
    updates = random_layers(small_model, layers)
    set_layers(decoder, updates)
    set_layers(plain, updates)
    decoder.set_train(True)
    draw_masks(decoder, 0, 1)
    first = hidden(decoder)
    draw_masks(decoder, 0, 2)
    second = hidden(decoder)
    draw_masks(decoder, 0, 1)
    np.testing.assert_array_equal(hidden(decoder), first)
    decoder.set_train(False)
    np.testing.assert_array_equal(hidden(decoder), hidden(plain))
    assert np.abs(first - second).max() > 0.1
    assert np.abs(first - hidden(plain)).max() > 0.1


def test_an_attached_adapter_acts_like_merged_weights(small_model, numpy_llama):
    layers = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.gate_proj")
    adapter = Adapter(RANK, 6.0, 0.5, ("k_proj",), random_layers(small_model, layers), use_rslora=True)
    decoder = load_decoder(small_model.folder)
    attach_adapter(decoder, adapter)
    weights = merged(small_model, adapter.layers, 6.0 / RANK**0.5)
    expected = np.stack([numpy_llama.hidden_states(weights, row, **small_model.sizes) for row in IDS])
    np.testing.assert_allclose(hidden(decoder), expected, atol=1e-4)
    assert decoder.trainable_params() == []
    assert list(layers_of(adapter_tensors(decoder))) == list(layers)


@pytest.mark.parametrize(
    ("layer", "shape", "problem"),
    [
        ("model.layers.9.self_attn.q_proj", (60, 21), r"its layer model.layers.9.self_attn.q_proj is .* model's None"),
        ("model.layers.0.self_attn.q_proj", (60, 20), r"is \(60, 20\), the model's \(60, 21\)"),
        ("model.layers.0.self_attn.q_proj", (61, 21), r"is \(61, 21\), the model's \(60, 21\)"),
    ],
)
def test_an_adapter_of_another_model_is_refused(small_model, layer, shape, problem):
    pair = (np.zeros((RANK, shape[1]), np.float32), np.zeros((shape[0], RANK), np.float32))
    decoder = load_decoder(small_model.folder)
    with pytest.raises(InputError, match=f"The adapter for this model can't be used: .*{problem}"):
        attach_adapter(decoder, Adapter(RANK, 1.0, 0.0, ("q_proj",), {layer: pair}))
    assert adapter_tensors(decoder) == {}


def test_a_second_adapter_is_refused(small_model):
    decoder, layers = with_lora(small_model)
    with pytest.raises(RuntimeError, match="has an adapter already"):
        attach_adapter(decoder, Adapter(RANK, 1.0, 0.0, ("q_proj",), random_layers(small_model, layers)))


def test_attaching_to_a_compiled_decoder_is_refused(small_model):
    """MindSpore would go on with the graph without the adapter, and say nothing."""
    decoder = load_decoder(small_model.folder)
    hidden(decoder)
    with pytest.raises(RuntimeError, match="has been compiled already"):
        attach_lora(decoder, rank=2, alpha=1.0, dropout=0.0, target_modules=["q_proj"], seed=0)


def test_a_step_moves_the_adapter_and_nothing_else(small_model):
    decoder, _ = with_lora(small_model)
    before = {parameter.name: parameter.asnumpy().copy() for parameter in decoder.get_parameters()}
    weights = ms.ParameterTuple(decoder.trainable_params())
    loss = WeightedSum(decoder, np.random.default_rng(9).normal(size=(2, 7, 21)))
    gradients = ms.grad(loss, None, weights)(ms.Tensor(IDS))
    for parameter, gradient in zip(weights, gradients, strict=True):
        ops.assign_sub(parameter, 0.01 * gradient)
    moved = {p.name for p in decoder.get_parameters() if not np.array_equal(p.asnumpy(), before[p.name])}
    # While B is zero, A has no gradient: the first step moves B alone.
    assert moved == {name for name in before if name.endswith("lora_b")}
