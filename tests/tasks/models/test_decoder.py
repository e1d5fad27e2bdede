"""The decoder against a real checkpoint's known output and against NumPy."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from tokenizers import Tokenizer

from tasks.models.decoder import Decoder
from tasks.models.loading import load_decoder, read_tensors

# What llama2.c prints for this model at temperature 0: its doc/stories260K.md, the words of the model itself.
STORY = """\
Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, \
red ball. She wanted to play with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know what to do. She said, "I want to play with \
your ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't know what to do."
Lily didn't want to help her mom, so she said, "I'm sorry, mom. I didn't know what to do." Her mom said, "Don't worry, \
Lily. We can help you."""
STORY_TOKENS = 257  # with the first one, which starts a story; llama2.c makes 256 steps


class Logits(nn.Cell):
    """Logits (B, T, V) of all tokens."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(auto_prefix=False)
        self.decoder = decoder

    def construct(self, input_ids: ms.Tensor) -> ms.Tensor:
        return self.decoder.logits(self.decoder(input_ids))


@pytest.fixture(scope="module")
def stories_logits(stories):
    """A function from token ids to logits (T, V), padded to one length and so one graph."""
    cell = Logits(load_decoder(stories)).set_train(False)

    def logits(ids, padding=0):
        row = np.full((1, STORY_TOKENS), padding, np.int32)
        row[0, : len(ids)] = ids
        return cell(ms.Tensor(row)).asnumpy()[0, : len(ids)]

    return logits


@pytest.fixture(scope="module")
def small_logits(small_model):
    return Logits(load_decoder(small_model.folder)).set_train(False)


def test_reference_logits_of_a_real_checkpoint(stories_logits):
    last = stories_logits([1, 403, 407, 261, 378])[-1]
    best = np.argsort(-last)[:5]
    assert best.tolist() == [432, 383, 322, 353, 323]
    np.testing.assert_allclose(last[best], [17.7994, 14.2813, 9.7097, 9.5873, 9.1342], atol=1e-3)


def test_greedy_text_of_a_real_checkpoint_word_for_word(stories, stories_logits):
    ids = [1]
    while len(ids) < STORY_TOKENS:
        ids.append(int(stories_logits(ids)[-1].argmax()))
    tokenizer = Tokenizer.from_file(str(stories / "tokenizer.json"))
    assert tokenizer.decode(ids) == STORY


def test_logits_agree_with_numpy_for_grouped_heads_of_odd_sizes(small_model, small_logits, numpy_llama):
    rows = np.random.default_rng(1).integers(0, small_model.spec.vocabulary, (3, 13), dtype=np.int32)
    expected = np.stack([numpy_llama.logits(small_model.tensors, row, **small_model.sizes) for row in rows])
    found = small_logits(ms.Tensor(rows)).asnumpy()
    assert np.abs(expected).max() > 3  # not all close to zero
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_real_checkpoint_agrees_with_numpy(stories, stories_logits, numpy_llama):
    ids = np.random.default_rng(2).integers(3, 512, 24)
    expected = numpy_llama.logits(read_tensors(stories), ids, heads=8, key_value_heads=4, epsilon=1e-5, theta=10000.0)
    np.testing.assert_allclose(stories_logits(ids), expected, atol=1e-4)


def test_a_chinese_checkpoint_in_float16_agrees_with_numpy(shared_data, numpy_llama):
    folder = shared_data / "models" / "zh-tiny-llama"
    ids = np.random.default_rng(5).integers(3, 6400, 12, dtype=np.int32)
    found = Logits(load_decoder(folder)).set_train(False)(ms.Tensor(ids[None])).asnumpy()[0]
    expected = numpy_llama.logits(read_tensors(folder), ids, heads=4, key_value_heads=2, epsilon=1e-5, theta=10000.0)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_later_token_changes_nothing_before_it(small_model, small_logits):
    draw = np.random.default_rng(3)
    row = draw.integers(0, 37, 13, dtype=np.int32)
    rows = np.stack([row, row, row])
    rows[1, 7] = (row[7] + 5) % 37
    rows[2, 12] = (row[12] + 5) % 37
    first, changed, last = small_logits(ms.Tensor(rows)).asnumpy()
    # Not bit for bit: which rows a product takes together, and so its rounding, is the machine's.
    np.testing.assert_allclose(changed[:7], first[:7], atol=1e-5)
    np.testing.assert_allclose(last[:12], first[:12], atol=1e-5)
    assert (np.abs(changed[7:] - first[7:]).max(axis=1) > 1e-3).all()


def test_padding_on_the_right_changes_nothing(stories_logits):
    ids = [1, 403, 407, 261, 378, 432]
    expected = stories_logits(ids, padding=0)
    np.testing.assert_array_equal(stories_logits(ids, padding=511), expected)
    np.testing.assert_array_equal(stories_logits([*ids, 17, 300], padding=2)[: len(ids)], expected)


def test_hidden_states_are_those_after_the_final_norm(small_model, numpy_llama):
    decoder = load_decoder(small_model.folder)
    row = np.random.default_rng(4).integers(0, 37, 13, dtype=np.int32)
    hidden = decoder(ms.Tensor(row[None])).asnumpy()
    expected = numpy_llama.hidden_states(small_model.tensors, row, **small_model.sizes)
    assert hidden.shape == (1, 13, 21)
    assert hidden.dtype == np.float32
    np.testing.assert_allclose(hidden[0], expected, atol=1e-4)


def test_parameters_bear_the_names_and_shapes_of_the_checkpoint_in_model_order(small_model):
    parameters = Decoder(small_model.spec).get_parameters()
    assert [(parameter.name, parameter.shape) for parameter in parameters] == [
        (name, tensor.shape) for name, tensor in small_model.tensors.items()
    ]


def test_a_tied_decoder_has_no_head_of_its_own(stories):
    names = [parameter.name for parameter in load_decoder(stories).get_parameters()]
    assert names[0] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in names
