"""Folders with .ckpt files, written by MindSpore itself."""

import json
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest

from schemas.errors import InputError
from tasks.models.ckpt_file import ckpt_headers, hugging_face_name
from tasks.models.forward import logits_at
from tasks.models.headers import read_headers, read_stored, read_tensor
from tasks.models.loading import load_decoder
from tasks.models.saving import stored_tensor
from tasks.models.spec import check_tensors, read_spec

MINDFORMERS = {
    "embed_tokens.weight": "tok_embeddings.embedding_weight",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.norm": "model.norm_out",
}


def of_mindformers(name):
    for ours, theirs in MINDFORMERS.items():
        name = name.replace(ours, theirs)
    return name


def save(path, tensors, **options):
    ms.save_checkpoint(
        [{"name": name, "data": ms.Tensor(value)} for name, value in tensors.items()], str(path), **options
    )
    return path


@pytest.fixture
def folder(tmp_path, small_model):
    (tmp_path / "config.json").write_text(json.dumps(small_model.config))
    return tmp_path


@pytest.mark.parametrize("naming", [str, of_mindformers])
@pytest.mark.parametrize("crc_check", [False, True])
def test_a_decoder_is_loaded_whatever_its_tensors_are_called(folder, small_model, naming, crc_check):
    tensors = {naming(name): tensor for name, tensor in small_model.tensors.items()}
    save(folder / "llama.ckpt", tensors, crc_check=crc_check)
    ids = np.arange(5, dtype=np.int32)[None]
    found, wanted = (logits_at(load_decoder(base), ids, range(5)) for base in (folder, small_model.folder))
    np.testing.assert_array_equal(found, wanted)


def test_every_tensor_of_mindformers_has_a_hugging_face_name(small_model):
    for name in small_model.tensors:
        assert hugging_face_name(of_mindformers(name)) == hugging_face_name(name) == name
    assert hugging_face_name("model.layers.3.attention.wq.bias") == "model.layers.3.self_attn.q_proj.bias"
    assert hugging_face_name("model.embed_tokens.embedding_table") == "model.embed_tokens.weight"
    assert hugging_face_name("adam_m.model.norm_out.weight") == "adam_m.model.norm_out.weight"


def test_half_precision_is_read_bit_for_bit(tmp_path):
    values = ms.Tensor(np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32))
    path = save(tmp_path / "a.ckpt", {"half": values.astype(ms.float16), "brain": values.astype(ms.bfloat16)})
    headers = ckpt_headers(path)
    assert {name: header.dtype for name, header in headers.items()} == {"half": "F16", "brain": "BF16"}
    np.testing.assert_array_equal(read_stored(headers["half"]), values.asnumpy().astype(np.float16))
    brain = values.astype(ms.bfloat16).astype(ms.float32).asnumpy()
    np.testing.assert_array_equal(read_tensor(headers["brain"]), brain)
    np.testing.assert_array_equal(stored_tensor(headers["brain"]).astype(np.float32), brain)


def test_a_tensor_in_parts_is_put_together(tmp_path, monkeypatch):
    monkeypatch.setattr("mindspore.train.serialization.SLICE_SIZE", 1)  # KiB, instead of 512 MiB
    values = np.random.default_rng(2).normal(size=(50, 20)).astype(np.float32)
    path = save(tmp_path / "a.ckpt", {"large": values, "small": values[0]})
    headers = ckpt_headers(path)
    assert len(headers["large"].parts) == 4
    np.testing.assert_array_equal(read_tensor(headers["large"]), values)
    np.testing.assert_array_equal(read_tensor(headers["small"]), values[0])


def test_several_files_are_one_model_if_each_holds_other_tensors(folder, small_model):
    half = len(small_model.tensors) // 2
    items = list(small_model.tensors.items())
    save(folder / "stage_0.ckpt", dict(items[:half]))
    save(folder / "stage_1.ckpt", dict(items[half:]))
    check_tensors(folder, read_spec(folder))
    save(folder / "stage_2.ckpt", dict(items[:1]))
    with pytest.raises(
        InputError, match=r"stage_2.ckpt .*model.embed_tokens.weight is also in stage_0.ckpt; .* slices"
    ):
        read_headers(folder)


def test_safetensors_come_first(checkpoint):
    folder = checkpoint()
    (folder / "left.ckpt").write_bytes(b"anything")
    assert {header.path.name for header in read_headers(folder).values()} == {"model.safetensors"}


def test_every_tensor_is_accounted_for(folder, small_model):
    names = list(small_model.tensors)
    tensors = {of_mindformers(name): small_model.tensors[name] for name in names[1:]}
    save(folder / "a.ckpt", tensors | {"adam_m.lm_head.weight": np.zeros(3, np.float32), "global_step": np.array(7)})
    with pytest.raises(InputError) as error:
        check_tensors(folder, small_model.spec)
    assert "Missing: model.embed_tokens.weight. Left over: adam_m.lm_head.weight, global_step." in error.value.message


def test_a_type_that_is_not_read_is_named(folder, small_model):
    tensors = small_model.tensors | {"model.norm.weight": np.ones(21, np.float64)}
    save(folder / "a.ckpt", tensors)
    with pytest.raises(InputError, match=r"model.norm.weight of type Float64, expected F32 or F16 or BF16"):
        check_tensors(folder, small_model.spec)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda whole: b"", "it holds no tensor"),
        (lambda whole: whole[:-1], "it is cut short"),
        (lambda whole: whole[: len(whole) // 2], "it is cut short"),
        (lambda whole: b"\x80\x02}q" + whole, "it is not a checkpoint of MindSpore, or it is encrypted"),
        (lambda whole: b"PK\x03\x04" + whole, "it is not a checkpoint of MindSpore, or it is encrypted"),
        (lambda whole: whole + whole, "the tensor a stands twice"),
        (lambda whole: whole.replace(b"Float32", b"Float16"), r"the tensor a \(2, 3\) of type Float16 has 24 bytes"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, problem):
    path = save(tmp_path / "a.ckpt", {"a": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)})
    path.chmod(0o600)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=f"a.ckpt can't be read: {problem}"):
        ckpt_headers(path)


def test_an_encrypted_file_is_refused(tmp_path):
    path = save(tmp_path / "a.ckpt", {"a": np.ones((2, 3), np.float32)}, enc_key=b"0123456789abcdef")
    with pytest.raises(InputError, match="encrypted"):
        ckpt_headers(path)


def test_no_cut_makes_the_reader_fail_otherwise(tmp_path):
    path = save(tmp_path / "a.ckpt", {"a": np.ones((2, 3), np.float32)})
    whole = path.read_bytes()
    path.chmod(0o600)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            ckpt_headers(path)


def test_planning_reads_it_without_mindspore(folder, small_model):
    save(folder / "a.ckpt", small_model.tensors)
    code = (
        "import sys; from pathlib import Path; from tasks.models.spec import read_spec, check_tensors\n"
        "base = Path(sys.argv[1]); check_tensors(base, read_spec(base)); sys.exit('mindspore' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
