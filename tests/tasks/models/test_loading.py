import json

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from schemas.errors import InputError
from tasks.models.loading import load_decoder, read_tensors


def weights_of(decoder):
    return {parameter.name: parameter.asnumpy() for parameter in decoder.get_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_every_weight_of_the_decoder_is_the_checkpoints(small_model):
    assert_same(weights_of(load_decoder(small_model.folder)), small_model.tensors)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_weights_are_widened(checkpoint, small_model, dtype):
    narrow = {name: tensor.astype(dtype) for name, tensor in small_model.tensors.items()}
    expected = {name: tensor.astype(np.float32) for name, tensor in narrow.items()}
    folder = checkpoint(narrow)
    assert_same(read_tensors(folder), expected)
    assert_same(weights_of(load_decoder(folder)), expected)


def test_weights_in_several_files_are_put_together(tmp_path, small_model):
    names = sorted(small_model.tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: small_model.tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(small_model.config))
    assert_same(weights_of(load_decoder(tmp_path)), small_model.tensors)


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_loaded(checkpoint):
    with pytest.raises(InputError, match=r"Missing: model.norm.weight. Left over: surplus. Other shape: none"):
        load_decoder(checkpoint({"model.norm.weight": None, "surplus": np.zeros(3, np.float32)}))


def test_rotary_frequencies_are_not_loaded(checkpoint, small_model):
    folder = checkpoint({"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(5, np.float32)})
    assert_same(weights_of(load_decoder(folder)), small_model.tensors)


def test_a_saved_copy_of_a_tied_head_is_accepted(checkpoint, small_model):
    embedding = small_model.tensors["model.embed_tokens.weight"]
    decoder = load_decoder(checkpoint({"lm_head.weight": embedding}, tie_word_embeddings=True))
    assert "lm_head.weight" not in weights_of(decoder)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(checkpoint):
    folder = checkpoint(tie_word_embeddings=True)
    with pytest.raises(InputError, match=r"Left over: lm_head.weight \(tie_word_embeddings is true, but it differs"):
        load_decoder(folder)


def test_a_loaded_decoder_is_for_inference(stories):
    decoder = load_decoder(stories)
    assert not any(cell.training for _, cell in decoder.cells_and_names())


def test_loading_does_not_touch_the_arrays_of_others(small_model):
    first, second = load_decoder(small_model.folder), load_decoder(small_model.folder)
    first.model.norm.weight.set_data(ms.Tensor(np.zeros(21, np.float32)))
    assert_same(weights_of(second), small_model.tensors)


def test_the_chinese_checkpoint_in_float16_loads_whole(shared_data):
    folder = shared_data / "models" / "zh-tiny-llama"
    decoder = load_decoder(folder)
    assert weights_of(decoder)["model.norm.weight"].dtype == np.float32
    assert sum(weight.size for weight in weights_of(decoder).values()) == 1_742_208
