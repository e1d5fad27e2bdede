"""The sum of weights and adapter, against NumPy written out and against bits."""

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from schemas.errors import InputError, StageError
from tasks.models.adapter import Adapter
from tasks.models.merging import base_tensors, check_adapter, merged_tensors

LAYER = "model.layers.0.self_attn.v_proj"
OTHER = "model.layers.1.mlp.down_proj"
FOLDER = Path("some/adapter")


def adapter_for(model, layers=(LAYER, OTHER), rank=3, **changes):
    random = np.random.default_rng(4)
    pairs = {}
    for layer in layers:
        out_channels, in_channels = model.tensors[f"{layer}.weight"].shape
        pairs[layer] = (
            random.normal(size=(rank, in_channels)).astype(np.float32),
            random.normal(size=(out_channels, rank)).astype(np.float32),
        )
    return replace(Adapter(rank, 2.0, 0.1, ("v_proj", "down_proj"), pairs), **changes)


@pytest.fixture
def adapter(small_model):
    return adapter_for(small_model)


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 2 / 3), (True, 2 / np.sqrt(3))])
def test_the_update_is_scaled_by_what_the_adapter_says(small_model, adapter, use_rslora, scale):
    adapter = replace(adapter, use_rslora=use_rslora)
    merged = dict(merged_tensors(small_model.tensors.items(), adapter, "float32"))
    for layer, (a, b) in adapter.layers.items():
        weight = small_model.tensors[f"{layer}.weight"]
        update = sum(np.outer(b[:, inner], a[inner]) for inner in range(3))
        np.testing.assert_allclose(merged[f"{layer}.weight"], weight + scale * update, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_layers_without_update_keep_their_bits(small_model, adapter, dtype):
    base = {name: tensor.astype(dtype) for name, tensor in small_model.tensors.items()}
    base["model.norm.weight"][:2] = (-0.0, np.nan)  # even values that no comparison would find equal
    merged = dict(merged_tensors(base.items(), adapter, np.dtype(dtype).name))
    assert list(merged) == list(base)
    updated = {f"{layer}.weight" for layer in adapter.layers}
    for name, tensor in base.items():
        assert merged[name].dtype == dtype
        assert (merged[name].tobytes() == tensor.tobytes()) == (name not in updated)


def test_an_updated_layer_is_rounded_once(small_model, adapter):
    base = {name: tensor.astype(np.float16) for name, tensor in small_model.tensors.items()}
    merged = dict(merged_tensors(base.items(), adapter, "float16"))
    for layer, (a, b) in adapter.layers.items():
        exact = base[f"{layer}.weight"].astype(np.float64) + 2 / 3 * b.astype(np.float64) @ a.astype(np.float64)
        np.testing.assert_array_equal(merged[f"{layer}.weight"], exact.astype(np.float16))


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even(small_model, adapter):
    half, odd = 1 + 2**-8, 1 + 3 * 2**-8  # halfway between two neighbours of bfloat16
    base = {"model.norm.weight": np.array([half, odd, half + 2**-16, 3.3895e38], np.float32)}
    (merged,) = dict(merged_tensors(base.items(), adapter, "bfloat16")).values()
    np.testing.assert_array_equal(merged.view(np.uint16), np.array([0x3F80, 0x3F82, 0x3F81, 0x7F7F], np.uint16))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_value_beyond_the_range_of_the_type_is_an_error(adapter, dtype):
    base = {"model.norm.weight": np.array([1.0, 7e4 if dtype == "float16" else 3.4e38], np.float32)}
    with pytest.raises(StageError, match=f"beyond the range of {dtype}, in model.norm.weight"):
        list(merged_tensors(base.items(), adapter, dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_base_tensors_come_as_they_are_stored_in_the_order_asked_for(tmp_path, small_model, dtype):
    stored = {name: tensor.astype(dtype) for name, tensor in small_model.tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    names = sorted(stored, reverse=True)
    found = list(base_tensors(tmp_path, names))
    assert [name for name, _ in found] == names
    for name, tensor in found:
        assert tensor.dtype == dtype
        assert tensor.shape == stored[name].shape
        assert tensor.tobytes() == stored[name].tobytes()


def test_an_adapter_that_fits_is_accepted(small_model, adapter):
    check_adapter(adapter, small_model.spec, FOLDER)


def test_layers_that_the_model_lacks_are_all_named(small_model, adapter):
    a_and_b = adapter.layers[LAYER]
    layers = {"model.layers.7.self_attn.v_proj": a_and_b, "model.norm": a_and_b, LAYER: a_and_b}
    message = r"some/adapter can't be used: the model has no linear layer model.layers.7.self_attn.v_proj, model.norm\."
    with pytest.raises(InputError, match=message):
        check_adapter(replace(adapter, layers=layers), small_model.spec, FOLDER)


def test_an_update_of_another_size_is_refused(small_model, adapter):
    a, b = adapter.layers[LAYER]
    with pytest.raises(InputError, match=rf"{LAYER} is \(20, 21\) in the model, but \(19, 3\) x \(3, 21\)"):
        check_adapter(replace(adapter, layers={LAYER: (a, b[1:])}), small_model.spec, FOLDER)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("half", [0, 1])
def test_an_adapter_with_values_that_are_not_finite_is_refused(small_model, adapter, value, half):
    adapter.layers[OTHER][half][0, 1] = value
    with pytest.raises(StageError, match=f"values that are not finite, in {OTHER}"):
        check_adapter(adapter, small_model.spec, FOLDER)
