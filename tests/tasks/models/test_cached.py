"""The decoder with a cache, against the forward pass in NumPy and against what is known of stories260K."""

import numpy as np
import pytest
from mindspore import Tensor
from tokenizers import Tokenizer

from tasks.models.adapter import Adapter
from tasks.models.cached import CachedDecoder
from tasks.models.generation import Generator
from tasks.models.loading import load_decoder
from tasks.models.lora import attach_adapter
from tasks.models.parity import relative_difference

CACHE, CHUNK, ROWS = 10, 4, 12  # the last chunk of a full cache reaches over its end
TOLERANCE = 1e-5  # relative to the largest logit; float32 against float64 gives about 1e-6 here
ADAPTED = "model.layers.1.self_attn.q_proj"


class Small:
    """The small model with a cache, and its cell to look into; the cell is compiled once for all tests."""

    def __init__(self, small_model):
        self.decoder = load_decoder(small_model.folder)
        self.cell = CachedDecoder(self.decoder, CACHE, CHUNK)
        vocabulary = small_model.spec.vocabulary
        self.generator = Generator(self.step, cache_length=CACHE, prefill_chunk=CHUNK, vocabulary=vocabulary)

    def step(self, ids, positions):
        return self.cell(Tensor(ids), Tensor(positions)).asnumpy()

    def caches(self):
        return [parameter for parameter in self.cell.get_parameters() if parameter.name.startswith("cache.")]

    def fill(self, value):
        for parameter in self.caches():
            parameter.set_data(Tensor(np.full(parameter.shape, value, np.float32)))


@pytest.fixture(scope="module")
def small(small_model):
    return Small(small_model)


@pytest.fixture(scope="module")
def ids(small_model):
    return np.random.default_rng(3).integers(0, small_model.spec.vocabulary, CACHE).tolist()


@pytest.fixture(scope="module")
def wanted(small_model, numpy_llama, ids):
    """Logits (CACHE, V) after each of the ids."""
    return numpy_llama.logits(small_model.tensors, ids, **small_model.sizes)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, CACHE])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole_pass(small, ids, wanted, length):
    assert relative_difference(small.generator.logits(ids[:length]), wanted[:length]) < TOLERANCE


@pytest.mark.parametrize("prompt", [0, 3, 4])
def test_one_token_at_a_time_gives_the_logits_of_the_whole_pass(small, ids, wanted, prompt):
    if prompt:
        list(small.generator.prefill(ids[:prompt]))
    found = np.stack([small.generator.decode(ids[position], position) for position in range(prompt, CACHE)])
    assert relative_difference(found, wanted[prompt:]) < TOLERANCE


@pytest.mark.parametrize("garbage", [1e4, -1e4])
@pytest.mark.parametrize("length", [1, 5, CACHE])
def test_what_lies_in_the_cache_changes_no_bit(small, ids, garbage, length):
    small.fill(0.0)
    clean = small.generator.logits(ids[:length])
    clean_decoded = [small.generator.decode(ids[position], position) for position in range(length, CACHE)]
    small.fill(garbage)
    np.testing.assert_array_equal(small.generator.logits(ids[:length]), clean)
    for position, logits in zip(range(length, CACHE), clean_decoded, strict=True):
        np.testing.assert_array_equal(small.generator.decode(ids[position], position), logits)


def test_a_short_prompt_after_a_long_one_is_answered_as_if_alone(small, ids):
    small.fill(0.0)
    alone = small.generator.generate(ids[:2], CACHE - 2)
    small.generator.logits(ids[::-1])
    after = small.generator.generate(ids[:2], CACHE - 2)
    assert after.ids == alone.ids
    assert len(after.ids) == CACHE - 2


def test_the_padding_of_the_last_chunk_has_rows_of_its_own(small):
    heads, size = small.decoder.spec.key_value_heads, small.decoder.spec.head_size
    assert {parameter.shape for parameter in small.caches()} == {(heads * ROWS, size)}
    assert len(small.caches()) == 2 * small.decoder.spec.layers


def test_weights_are_those_of_the_decoder_and_not_a_copy(small, ids, wanted):
    own = {parameter.name: parameter for parameter in small.cell.get_parameters()}
    for parameter in small.decoder.get_parameters():
        assert own.pop(parameter.name) is parameter
    assert set(own) == {parameter.name for parameter in small.caches()}
    head = small.decoder.lm_head.weight
    kept = head.asnumpy().copy()
    head.set_data(Tensor(2 * kept))
    doubled = small.generator.logits(ids)
    head.set_data(Tensor(kept))
    assert relative_difference(doubled, 2 * wanted) < TOLERANCE


def test_a_decoder_with_an_adapter_can_be_cached(small_model, numpy_llama, ids):
    random = np.random.default_rng(8)
    weight = small_model.tensors[f"{ADAPTED}.weight"]
    a = random.normal(size=(2, weight.shape[1])).astype(np.float32)
    b = random.normal(size=(weight.shape[0], 2)).astype(np.float32)
    decoder = load_decoder(small_model.folder)
    attach_adapter(decoder, Adapter(2, 1.0, 0.0, ("q_proj",), {ADAPTED: (a, b)}))
    tensors = small_model.tensors | {f"{ADAPTED}.weight": weight + 0.5 * b @ a}
    wanted = numpy_llama.logits(tensors, ids, **small_model.sizes)
    found = Generator.from_decoder(decoder, CACHE, CHUNK).logits(ids)
    assert relative_difference(found, wanted) < TOLERANCE


@pytest.fixture(scope="module")
def stories_generator(stories):
    return Generator.from_decoder(load_decoder(stories), cache_length=260, prefill_chunk=64)


def test_stories260k_gives_the_reference_logits(stories_generator):
    last = stories_generator.logits([1, 403, 407, 261, 378])[-1]
    best = np.argsort(-last)[:5]
    assert best.tolist() == [432, 383, 322, 353, 323]
    np.testing.assert_allclose(last[best], [17.7994, 14.2813, 9.7097, 9.5873, 9.1342], atol=1e-3)


def test_stories260k_tells_the_known_story_word_for_word(stories_generator, stories):
    tokenizer = Tokenizer.from_file(str(stories / "tokenizer.json"))
    answer = stories_generator.generate([1], 256)
    known = (stories.parent / "stories260K-greedy.txt").read_text(encoding="utf-8")
    assert tokenizer.decode(list(answer.ids)) == known.rstrip("\n")
