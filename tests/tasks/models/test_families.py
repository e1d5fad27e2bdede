"""What the decoder of a config.json is like; that it computes the right thing is shown by families/test_families.py."""

import pytest

from schemas.errors import InputError
from tasks.models.families import RopeScaling
from tasks.models.spec import check_tensors, expected_shapes, read_spec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Of real models, without the sizes.
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_mrope": False,
    "use_sliding_window": False,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "rope_scaling": None}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_hidden_layers": 3}


def test_qwen2_has_biases_on_queries_keys_and_values_only(checkpoint):
    spec = read_spec(checkpoint(**QWEN25_7B))
    biases = {name for name in expected_shapes(spec) if name.endswith(".bias")}
    assert biases == {f"model.layers.{layer}.self_attn.{part}_proj.bias" for layer in (0, 1) for part in "qkv"}
    assert expected_shapes(spec)["model.layers.0.self_attn.k_proj.bias"] == (20,)
    assert (spec.window, spec.query_key_norm) == (None, False)


def test_llama_has_the_biases_that_its_config_names(checkpoint):
    spec = read_spec(checkpoint(attention_bias=True, mlp_bias=True))
    projections = {name.removesuffix(".weight") for name in expected_shapes(spec) if "_proj.w" in name}
    assert {name.removesuffix(".bias") for name in expected_shapes(spec) if name.endswith("bias")} == projections
    with pytest.raises(InputError, match=r"Missing: model.layers.0.self_attn.q_proj.bias, .* and 9 more"):
        check_tensors(checkpoint(attention_bias=True, mlp_bias=True), spec)


def test_qwen3_norms_each_heads_queries_and_keys(checkpoint):
    spec = read_spec(checkpoint(**QWEN3))
    shapes = expected_shapes(spec)
    assert shapes["model.layers.1.self_attn.q_norm.weight"] == shapes["model.layers.1.self_attn.k_norm.weight"] == (10,)
    assert read_spec(checkpoint(**QWEN3, head_dim=None)).head_size == 128  # not hidden_size / heads


@pytest.mark.parametrize(
    ("changes", "window", "layers"),
    [
        ({"sliding_window": 9}, 9, (0, 1, 2)),
        ({"sliding_window": None}, None, ()),
        ({}, 4096, (0, 1, 2)),
        (QWEN25_7B | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, 9, (1, 2)),
        (QWEN25_7B | {"use_sliding_window": True}, None, ()),  # 28 layers without a window, and there are only three
        (QWEN25_7B | {"layer_types": ["sliding_attention"] * 3}, None, ()),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            9,
            (0, 2),
        ),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 9}, None, ()),
    ],
)
def test_a_window_holds_for_the_layers_that_the_config_names(checkpoint, changes, window, layers):
    spec = read_spec(checkpoint(**MISTRAL | changes))
    assert (spec.window, spec.windowed_layers) == (window, layers)


def test_a_kind_of_layer_that_is_not_known_is_refused(checkpoint):
    with pytest.raises(InputError, match=r"layer_types to .*; supported: 3 of full_attention and sliding_attention"):
        read_spec(checkpoint(**MISTRAL, layer_types=["chunked_attention"] * 3))
    with pytest.raises(InputError, match="max_window_layers is 'all', not a number of layers"):
        read_spec(checkpoint(**QWEN25_7B | {"use_sliding_window": True, "max_window_layers": "all"}))


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, None),  # changes texts beyond max_position_embeddings only
        ({"type": "linear", "factor": 4}, RopeScaling("linear", 4.0)),
        (LLAMA3, RopeScaling("llama3", 8.0, slow=1.0, fast=4.0, original_positions=8192)),
    ],
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_is_read_under_its_old_name_and_its_new_one(checkpoint, field, rope, scaling):
    spec = read_spec(checkpoint(rope_theta=None, **{field: rope | {"rope_theta": 500000.0}}))
    assert (spec.rope_scaling, spec.rope_theta) == (scaling, 500000.0)


@pytest.mark.parametrize(
    ("rope", "problem"),
    [
        ({"type": "linear"}, "rope_scaling.factor is None, not a positive number"),
        (LLAMA3 | {"original_max_position_embeddings": None}, "rope_scaling.original_max_position_embeddings is None"),
        (LLAMA3 | {"high_freq_factor": 1}, r"rope_scaling.high_freq_factor \(1.0\) is not above low_freq_factor"),
    ],
)
def test_rope_scaling_without_its_numbers_is_refused(checkpoint, rope, problem):
    with pytest.raises(InputError, match=problem):
        read_spec(checkpoint(rope_scaling=rope))
