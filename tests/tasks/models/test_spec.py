import json
import subprocess
import sys

import numpy as np
import pytest

from schemas.errors import InputError
from tasks.models.spec import (
    DecoderSpec,
    check_tensors,
    expected_shapes,
    linear_layers,
    match_targets,
    read_spec,
    tensor_shapes,
)


def test_sizes_are_read_from_the_config(stories):
    assert read_spec(stories) == DecoderSpec(
        vocabulary=512,
        hidden=64,
        intermediate=172,
        layers=5,
        heads=8,
        key_value_heads=4,
        head_size=8,
        norm_epsilon=1e-5,
        rope_theta=10000.0,
        positions=512,
        tied_head=True,
    )


def test_absent_values_are_those_of_llama_config(checkpoint):
    folder = checkpoint(num_key_value_heads=None, head_dim=None, hidden_size=24, rope_theta=None, rms_norm_eps=None)
    spec = read_spec(folder)
    assert (spec.key_value_heads, spec.head_size, spec.rope_theta, spec.norm_epsilon) == (6, 4, 10000.0, 1e-6)


def test_a_config_without_architectures_is_known_by_its_model_type(checkpoint, small_model):
    assert read_spec(checkpoint(architectures=None)) == small_model.spec


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="absent does not exist"):
        read_spec(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "the file is missing"),
        ("{", "Expecting property name"),
        ("[]", "it holds no JSON object"),
        ("\ud800".encode("utf-16-le", "surrogatepass"), "can't decode byte"),
    ],
)
def test_an_unreadable_config_is_refused(tmp_path, text, problem):
    if text is not None:
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=f"{tmp_path} has no readable config.json .*: .*{problem}"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"architectures": None, "model_type": None}, "none named"),
    ],
)
def test_another_architecture_is_refused_by_name(checkpoint, changes, found):
    with pytest.raises(InputError, match=f"The architecture '{found}' of .* Supported: LlamaForCausalLM, Mistral"):
        read_spec(checkpoint(**changes))


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("hidden_act", "gelu", '"silu"'),
        ("attention_dropout", 0.1, "0"),
        ("quantization_config", {"quant_method": "gptq"}, "null"),
        ("partial_rotary_factor", 0.5, "1.0"),
        ("use_mrope", True, "false"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "default, dynamic, linear, llama3"),
        ("rope_scaling", {"type": "longrope"}, "default, dynamic, linear, llama3"),
        ("rope_scaling", "linear", "default, dynamic, linear, llama3"),
        ("rope_parameters", {"rope_type": "yarn"}, "default, dynamic, linear, llama3"),
    ],
)
def test_an_option_that_would_change_the_result_is_refused(checkpoint, field, value, known):
    with pytest.raises(InputError) as error:
        read_spec(checkpoint(**{field: value}))
    assert error.value.code == "model.unsupported_option"
    assert f"sets {field} to {value!r}; supported: {known}." in error.value.message


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": None}, "hidden_size is None, not a positive number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not a positive number"),
        ({"vocab_size": "32000"}, "vocab_size is '32000', not a positive number"),
        ({"vocab_size": 37.0}, "vocab_size is 37.0, not a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a positive number"),
        ({"num_attention_heads": True}, "num_attention_heads is True, not a positive number"),
        ({"num_key_value_heads": 4}, r"num_attention_heads \(6\) is no multiple of num_key_value_heads \(4\)"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or false"),
        ({"head_dim": 7}, r"the head size \(7\) is odd"),
    ],
)
def test_impossible_sizes_are_refused(checkpoint, changes, problem):
    with pytest.raises(InputError, match=problem):
        read_spec(checkpoint(**changes))


def test_the_expected_tensors_are_those_of_a_real_checkpoint(stories):
    assert expected_shapes(read_spec(stories)) == tensor_shapes(stories)


def test_the_expected_tensors_are_those_of_the_chinese_checkpoint(shared_data):
    folder = shared_data / "models" / "zh-tiny-llama"
    assert expected_shapes(read_spec(folder)) == tensor_shapes(folder)
    check_tensors(folder, read_spec(folder))


def test_missing_left_over_and_misshapen_tensors_are_named_in_one_message(checkpoint, small_model):
    folder = checkpoint(
        {
            "model.norm.weight": None,
            "lm_head.weight": None,
            "model.layers.0.self_attn.q_proj.bias": np.zeros(60, np.float32),
            "model.layers.1.mlp.up_proj.weight": np.zeros((30, 21), np.float32),
            "model.layers.1.mlp.down_proj.weight": np.zeros((21, 29), np.int32),
        }
    )
    with pytest.raises(InputError) as error:
        check_tensors(folder, small_model.spec)
    assert error.value.message == (
        f"The weights in {folder} don't fit the model. Missing: model.norm.weight, lm_head.weight. "
        "Left over: model.layers.0.self_attn.q_proj.bias. "
        "Other shape: model.layers.1.mlp.up_proj.weight (30, 21), expected (29, 21), "
        "model.layers.1.mlp.down_proj.weight of type I32, expected F32 or F16 or BF16."
    )


def test_another_model_is_refused_with_a_message_of_bounded_length(shared_data, small_model):
    with pytest.raises(InputError, match=r"Missing: model.embed_tokens.weight, .* and 16 more. Left over: ") as error:
        check_tensors(shared_data / "models" / "resnet20-cifar10", small_model.spec)
    assert len(error.value.message) < 1000


def test_rotary_frequencies_of_older_checkpoints_are_let_pass(checkpoint, small_model):
    frequencies = np.zeros(5, np.float32)
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
    check_tensors(checkpoint(dict.fromkeys(names, frequencies)), small_model.spec)


def test_a_saved_copy_of_a_tied_head_is_let_pass_but_only_in_its_shape(checkpoint):
    folder = checkpoint(tie_word_embeddings=True)  # the small model has a head of its own
    check_tensors(folder, read_spec(folder))
    checkpoint({"lm_head.weight": np.zeros((36, 21), np.float32)}, tie_word_embeddings=True)
    with pytest.raises(InputError, match=r"Left over: lm_head.weight\."):
        check_tensors(folder, read_spec(folder))


def test_layers_are_listed_in_model_order(small_model):
    layers = linear_layers(small_model.spec)
    assert len(layers) == 14
    assert layers[0] == "model.layers.0.self_attn.q_proj"
    assert layers[6:8] == ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj")


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (["q_proj"], 2),
        (["v_proj", "q_proj"], 4),
        (["self_attn.q_proj"], 2),
        (["layers.1.mlp.down_proj"], 1),
        (["model.layers.0.mlp.up_proj", "up_proj"], 2),
    ],
)
def test_a_target_matches_the_end_of_a_name(small_model, targets, count):
    layers = match_targets(targets, small_model.spec)
    assert len(layers) == count
    assert list(layers) == [layer for layer in linear_layers(small_model.spec) if layer in layers]
    assert all(any(layer.endswith(target) for target in targets) for layer in layers)


@pytest.mark.parametrize("target", ["proj", "_proj", "0.self_attn", "lm_head", "embed_tokens", ".q_proj", "Q_PROJ"])
def test_a_target_matches_whole_parts_of_the_names_of_layers_only(small_model, target):
    with pytest.raises(InputError, match="match no layer"):
        match_targets([target], small_model.spec)


def test_all_unmatched_targets_are_named_with_similar_names(small_model):
    with pytest.raises(InputError) as error:
        match_targets(["q_proj", "v_prj", "self_attn.gate_porj", "xyz"], small_model.spec)
    assert error.value.message == (
        "train.lora.target_modules names v_prj, self_attn.gate_porj, xyz, which match no layer. "
        "Layers: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj."
    )
    assert error.value.hint == "Did you mean v_proj instead of v_prj, gate_proj instead of self_attn.gate_porj?"


def test_without_a_similar_name_the_hint_points_to_the_list(small_model):
    with pytest.raises(InputError) as error:
        match_targets(["xyz"], small_model.spec)
    assert error.value.hint == "Take names of the layers above."


def test_a_byte_order_mark_before_the_config_does_no_harm(checkpoint, small_model):
    folder = checkpoint()
    (folder / "config.json").write_text("\ufeff" + json.dumps(small_model.config), encoding="utf-8")
    assert read_spec(folder) == small_model.spec


def test_what_planning_imports_loads_no_framework():
    code = "import sys, tasks.models.spec, tasks.models.adapter; print({'mindspore', 'mindnlp'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
