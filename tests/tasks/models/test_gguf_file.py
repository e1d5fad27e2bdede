import json
import random
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
from gguf_files import gguf_name, rounded, write_llama
from safetensors.numpy import save_file

from schemas.errors import InputError
from tasks.models.forward import logits_at
from tasks.models.gguf_file import READABLE, gguf_config, gguf_headers, open_gguf, read_gguf_tensor
from tasks.models.headers import TensorHeader
from tasks.models.loading import load_decoder, read_tensors
from tasks.models.saving import stored_tensor
from tasks.models.spec import check_tensors, expected_shapes, read_spec

CONFIG = {  # two query heads on each key head, heads wider than hidden / heads, rows of whole blocks of 32
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    draw = np.random.default_rng(7)
    return {
        name: draw.normal(size=shape, scale=shape[-1] ** -0.5 * 1.5 if len(shape) == 2 else 1.0).astype(np.float32)
        for name, shape in expected_shapes(read_spec(folder)).items()
    }


@pytest.fixture
def write(tmp_path, tensors):
    """A function that writes the small model; tensors that are None are left out."""

    def written(changes=None, **options):
        changed = {name: tensor for name, tensor in (tensors | (changes or {})).items() if tensor is not None}
        return write_llama(tmp_path / "model.gguf", CONFIG, changed, **options)

    return written


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_gguf_file_computes_what_a_folder_of_the_same_weights_does(tmp_path, tensors, write, dtype):
    path, same = write(dtype=dtype), rounded(tensors, dtype)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(same, tmp_path / "model.safetensors")

    assert read_spec(path) == read_spec(tmp_path)
    check_tensors(path, read_spec(path))
    found = read_tensors(path)
    assert found.keys() == same.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, same[name], err_msg=name)
        assert tensor.dtype == np.float32
    ids = np.array([[1, 5, 39, 7, 7, 0]], np.int32)
    np.testing.assert_array_equal(
        logits_at(load_decoder(path), ids, range(6)), logits_at(load_decoder(tmp_path), ids, range(6))
    )


@pytest.mark.parametrize(("dtype", "stored"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")])
def test_merging_gets_16_bit_weights_as_they_are_stored(tensors, write, dtype, stored):
    header = gguf_headers(write(dtype=dtype))["model.layers.0.self_attn.k_proj.weight"]
    tensor = stored_tensor(header)
    assert str(tensor.dtype) == stored
    wanted = rounded(tensors, dtype)["model.layers.0.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(tensor.astype(np.float32), wanted)


@pytest.mark.parametrize("dtype", [name for name in READABLE if name not in ("F32", "F16", "BF16")])
def test_every_quantized_type_is_read_at_its_place(tmp_path, dtype):
    kind = gguf.GGMLQuantizationType[dtype]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(0, 60, (6, 2 * size), np.uint8)  # small: no NaN among the scales
    path = tmp_path / "x.gguf"
    path.write_bytes(b"before" + raw.tobytes() + b"after")
    tensor = read_gguf_tensor(TensorHeader(path, dtype, (6, 2 * block), 6))
    assert tensor.shape == (6, 2 * block)
    assert tensor.dtype == np.float32
    np.testing.assert_array_equal(tensor[4], gguf.dequantize(raw[4:5], kind)[0])
    assert np.isfinite(tensor).all()
    assert tensor.any()


def test_the_head_is_tied_where_the_file_has_none(write):
    assert read_spec(write({"lm_head.weight": None})).tied_head
    assert not read_spec(write()).tied_head


def test_numbers_are_those_of_the_configuration_and_not_their_float32(write):
    config = gguf_config(write(metadata={"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}))
    assert config["rms_norm_eps"] == 1e-5
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    absent = gguf_config(write(metadata={"llama.rope.freq_base": None, "llama.attention.head_count_kv": None}))
    assert absent["rope_theta"] == 10000.0
    assert absent["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"general.architecture": "qwen2"}, "the architecture 'qwen2'; supported: llama"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.type = 'linear'"),
        ({"llama.attention.sliding_window": 128}, "llama.attention.sliding_window = 128"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.rope.dimension_count": 16}, "rotary positions in 16 of 32 dimensions"),
        ({"split.count": 3}, "split into several files"),
        ({"llama.block_count": None}, "llama.block_count is absent"),
        ({"llama.block_count": 2**31}, "llama.block_count is 2147483648, but there are"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two', not of the type int"),
        ({"llama.attention.head_count": [4, 4]}, "not of the type int"),
        ({"llama.attention.head_count": 6}, "attn_q.weight has 128 rows, which are not 6 heads"),
        ({"general.alignment": 48}, "general.alignment is 48"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(write, metadata, problem):
    with pytest.raises(InputError, match=problem.replace("(", r"\(")):
        check_tensors(path := write(metadata=metadata), read_spec(path))


def test_unknown_and_missing_tensors_are_named(write):
    bias = np.zeros(128, np.float32)
    with pytest.raises(InputError, match=r"holds the tensors blk\.0\.attn_q\.bias; supported"):
        gguf_headers(write(extra={"blk.0.attn_q.bias": bias}))
    with pytest.raises(InputError, match=r"model\.norm\.weight"):  # a Hugging Face name is none of a GGUF file
        gguf_headers(write({"model.norm.weight": None}, extra={"model.norm.weight": np.ones(64, np.float32)}))
    with pytest.raises(InputError, match="scaled rotary frequencies"):
        gguf_headers(write(extra={"rope_freqs.weight": np.ones(16, np.float32)}))
    path = write({"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(InputError, match=r"Missing: model\.layers\.1\.mlp\.up_proj\.weight\. Left over: none"):
        check_tensors(path, read_spec(path))
    path = write({"model.layers.1.input_layernorm.weight": np.ones(32, np.float32)})
    with pytest.raises(InputError, match=r"input_layernorm\.weight \(32,\), expected \(64,\)"):
        check_tensors(path, read_spec(path))


def test_a_type_that_is_not_read_is_refused_before_anything_is_computed(write):
    whole = np.zeros((40, 64), np.int8)
    path = write({"model.embed_tokens.weight": None}, extra={"token_embd.weight": whole})
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight of type I8, expected F32 or F16"):
        check_tensors(path, read_spec(path))


def test_what_is_no_file_or_no_gguf_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"absent\.gguf does not exist"):
        read_spec(tmp_path / "absent.gguf")
    for content in (b"", b"GG", b"PK\3\4 a zip file"):
        (tmp_path / "other.gguf").write_bytes(content)
        with pytest.raises(InputError, match="it is not a GGUF file"):
            read_spec(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("at", "value", "problem"),
    [
        (4, struct.pack("<I", 1), "of version 1, not 2 or 3"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**62), "no room for 4611686018427387904 tensors"),
        (16, struct.pack("<Q", 2**62), "and 4611686018427387904 values"),
        (24, struct.pack("<Q", 2**63), "no room for a text of 9223372036854775808 bytes"),
    ],
)
def test_absurd_counts_are_refused_at_once(write, at, value, problem):
    path = write()
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(InputError, match=problem):
        open_gguf(path)


@pytest.mark.parametrize(("kind", "count"), [(0, 2**60), (8, 2**60), (4, 2**20), (8, 2**20), (9, 1)])
def test_an_absurd_list_is_refused_at_once(tmp_path, kind, count):
    path = tmp_path / "list.gguf"
    value = struct.pack("<Q", 1) + b"x" + struct.pack("<I", 9) + struct.pack("<IQ", kind, count)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + value + bytes(100))
    with pytest.raises(InputError, match=r"holds a list|no room for"):
        open_gguf(path)


def _use(path):
    """All that a run reads of a file."""
    check_tensors(path, read_spec(path))
    for header in gguf_headers(path).values():
        read_gguf_tensor(header)


def test_a_file_cut_anywhere_is_refused_as_such(write):
    path = write(dtype="Q8_0")
    content = path.read_bytes()
    end_of_header = content.index(b"output_norm.weight")
    places = {*range(0, end_of_header, 13), *range(end_of_header, len(content), 997), len(content) - 1}
    assert len(places) > 100
    for place in sorted(places):
        path.write_bytes(content[:place])
        with pytest.raises(InputError, match=r"it is cut short|it is not a GGUF file"):
            _use(path)


def test_a_file_with_a_changed_byte_is_read_or_refused_but_never_a_traceback(write):
    path = write(dtype="Q8_0")
    content = path.read_bytes()
    length = max(content.rindex(gguf_name(name).encode()) for name in ("lm_head.weight", "model.norm.weight")) + 60
    draw, refused = random.Random(5), 0
    for _ in range(600):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 1, 4))):
            changed[draw.randrange(length)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        path.write_bytes(changed)
        try:
            _use(path)
        except InputError:
            refused += 1
    assert refused > 200


def test_a_changed_file_is_read_again(write):
    first = read_spec(write())
    second = read_spec(write(metadata={"llama.context_length": 1000}))
    assert (first.positions, second.positions) == (64, 1000)


def test_a_folder_needs_no_gguf_package(stories):
    program = (
        "import sys; from pathlib import Path; from tasks.models.spec import read_spec, check_tensors\n"
        "base = Path(sys.argv[1]); check_tensors(base, read_spec(base)); sys.exit('gguf' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(stories)], check=False).returncode == 0
