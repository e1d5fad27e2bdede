import json
import subprocess
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from schemas.errors import InputError
from tasks.models.adapter import Adapter, layers_of, read_adapter, save_adapter, tensor_names

QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.fixture
def adapter():
    draw = np.random.default_rng(5)
    shapes = {QUERY: (60, 21), DOWN: (21, 29)}
    layers = {
        layer: (draw.normal(size=(4, inner)).astype(np.float32), draw.normal(size=(out, 4)).astype(np.float32))
        for layer, (out, inner) in shapes.items()
    }
    return Adapter(4, 10.0, 0.05, ("q_proj", "layers.1.mlp.down_proj"), layers, "0123abcd")


def assert_same(found, expected):
    for field in ("rank", "alpha", "dropout", "base_digest", "use_rslora"):
        assert getattr(found, field) == getattr(expected, field), field
    assert sorted(found.target_modules) == sorted(expected.target_modules)
    assert found.layers.keys() == expected.layers.keys()
    for layer, pair in expected.layers.items():
        for half, expected_half in zip(found.layers[layer], pair, strict=True):
            np.testing.assert_array_equal(half, expected_half)


def change_config(folder, **changes):
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "ABSENT"}))


def test_an_adapter_is_read_as_it_was_saved(tmp_path, adapter):
    save_adapter(tmp_path, adapter)
    assert_same(read_adapter(tmp_path), adapter)


def test_the_tensors_have_pefts_names_and_shapes(tmp_path, adapter):
    save_adapter(tmp_path, adapter)
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items()}
    assert shapes == {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (4, 21),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (60, 4),
        "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight": (4, 29),
        "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight": (21, 4),
    }


def test_the_same_adapter_gives_the_same_bytes(tmp_path, adapter):
    turned = Adapter(
        4, 10.0, 0.05, adapter.target_modules[::-1], dict(reversed(adapter.layers.items())), adapter.base_digest
    )
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, value in zip(folders, (adapter, turned), strict=True):
        folder.mkdir()
        save_adapter(folder, value)
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == second
    assert sorted(first) == ["adapter_config.json", "adapter_model.safetensors", "mindtune.json"]


def test_weights_that_are_no_contiguous_arrays_are_saved_right(tmp_path, adapter):
    pair = tuple(np.asfortranarray(half) for half in adapter.layers[QUERY])
    save_adapter(tmp_path, Adapter(4, 10.0, 0.0, ("q_proj",), {QUERY: pair}))
    np.testing.assert_array_equal(read_adapter(tmp_path).layers[QUERY][0], pair[0])


def test_an_adapter_without_origin_has_no_base_digest(tmp_path, adapter):
    save_adapter(tmp_path, Adapter(4, 10.0, 0.0, ("q_proj",), {QUERY: adapter.layers[QUERY]}))
    assert not (tmp_path / "mindtune.json").exists()
    assert read_adapter(tmp_path).base_digest is None


def test_the_scale_is_alpha_over_rank_or_with_rslora_over_its_root(tmp_path, adapter):
    save_adapter(tmp_path, adapter)
    assert read_adapter(tmp_path).scale == 2.5
    change_config(tmp_path, use_rslora=True)
    assert read_adapter(tmp_path).scale == 5.0


def test_an_adapter_as_peft_saves_it_is_read(tmp_path, adapter):
    """The fields that PEFT 0.17.1 writes for plain LoRA, and half-precision weights."""
    config = {
        "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "x", "bias": "none", "corda_config": None,
        "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
        "loftq_config": {}, "lora_alpha": 10, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
        "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "qalora_group_size": 16, "r": 4,
        "rank_pattern": {}, "revision": None, "target_modules": ["q_proj"], "target_parameters": None,
        "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False, "use_qalora": False,
        "use_rslora": False,
    }  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    pair = tuple(half.astype(ml_dtypes.bfloat16) for half in adapter.layers[QUERY])
    save_file(dict(zip(tensor_names(QUERY), pair, strict=True)), tmp_path / "adapter_model.safetensors")
    widened = tuple(half.astype(np.float32) for half in pair)
    assert_same(read_adapter(tmp_path), Adapter(4, 10.0, 0.05, ("q_proj",), {QUERY: widened}))


def test_the_installed_peft_reads_the_configuration_and_the_tensors(tmp_path, adapter):
    save_adapter(tmp_path, adapter)
    code = """if True:
        import json, sys
        import mindnlp  # stands in for torch, which PEFT imports
        from peft import LoraConfig
        config = LoraConfig.from_pretrained(sys.argv[1])
        fields = ("r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "inference_mode")
        print(json.dumps({name: getattr(config, name) for name in fields} | {
            "targets": sorted(config.target_modules), "peft_type": config.peft_type.value}))
    """
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Unexpected keyword" not in done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "r": 4,
        "lora_alpha": 10.0,
        "lora_dropout": 0.05,
        "use_rslora": False,
        "bias": "none",
        "inference_mode": True,
        "targets": ["layers.1.mlp.down_proj", "q_proj"],
        "peft_type": "LORA",
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("use_dora", True),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("trainable_token_indices", [1, 2]),
    ],
)
def test_what_goes_beyond_plain_lora_is_refused_by_name(tmp_path, adapter, field, value):
    save_adapter(tmp_path, adapter)
    change_config(tmp_path, **{field: value})
    with pytest.raises(InputError) as error:
        read_adapter(tmp_path)
    assert error.value.code == "lora.unusable"
    assert f"The adapter {tmp_path} can't be used: adapter_config.json sets {field} to {value!r}" in error.value.message


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"r": "ABSENT"}, "adapter_config.json lacks 'r'"),
        ({"target_modules": "ABSENT"}, "adapter_config.json lacks 'target_modules'"),
        ({"lora_alpha": "big"}, "could not convert string to float: 'big'"),
        ({"target_modules": None}, "'NoneType' object is not iterable"),
        ({"r": 3}, rf"lora_A \(4, 21\) and lora_B \(60, 4\) of {QUERY} are not of rank 3"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path, adapter, changes, problem):
    save_adapter(tmp_path, adapter)
    change_config(tmp_path, **changes)
    with pytest.raises(InputError, match=problem):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("adapter_config.json", None, "adapter_config.json is missing"),
        ("adapter_config.json", b"{", "adapter_config.json is not valid JSON"),
        ("adapter_config.json", b"[]", "adapter_config.json holds no JSON object"),
        ("adapter_model.safetensors", None, "adapter_model.safetensors is missing"),
        ("adapter_model.safetensors", b"short", "adapter_model.safetensors can't be read: it is cut short"),
        ("mindtune.json", b'{"format_version": 2}', "mindtune.json is of format version 2"),
        ("mindtune.json", b'{"format_version": 1}', "mindtune.json lacks 'base_digest'"),
    ],
)
def test_a_missing_or_damaged_file_is_named(tmp_path, adapter, name, content, problem):
    save_adapter(tmp_path, adapter)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=problem):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({}, "adapter_model.safetensors holds no weights"),
        ({tensor_names(QUERY)[0]: (4, 21)}, f"{QUERY} has only lora_A"),
        ({f"{QUERY}.lora_A.weight": (4, 21)}, f"{QUERY}.lora_A.weight is not the name of a LoRA weight"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 21)}, "is not the name of a LoRA weight"),
        ({tensor_names(QUERY)[0]: (84,), tensor_names(QUERY)[1]: (60, 4)}, "are not of rank 4"),
    ],
)
def test_weights_that_are_no_pairs_of_matrices_are_refused(tmp_path, adapter, tensors, problem):
    save_adapter(tmp_path, adapter)
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    save_file(arrays, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match=problem):
        read_adapter(tmp_path)


def test_pairs_are_found_again_by_their_names(adapter):
    tensors = {
        name: half
        for layer, pair in adapter.layers.items()
        for name, half in zip(tensor_names(layer), pair, strict=True)
    }
    found = layers_of(tensors)
    assert list(found) == [QUERY, DOWN]
    assert found[DOWN][1] is adapter.layers[DOWN][1]


def test_the_weights_file_is_read_by_the_safetensors_library(tmp_path, adapter):
    save_adapter(tmp_path, adapter)
    with safe_open(tmp_path / "adapter_model.safetensors", "np") as file:
        np.testing.assert_array_equal(file.get_tensor(tensor_names(QUERY)[1]), adapter.layers[QUERY][1])


@pytest.mark.parametrize("end_token", [None, 7])
def test_the_end_token_travels_with_the_adapter(tmp_path, adapter, end_token):
    save_adapter(tmp_path, replace(adapter, end_token=end_token))
    assert read_adapter(tmp_path).end_token == end_token
