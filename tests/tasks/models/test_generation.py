"""The loop over a cached model, with a model that is a few lines of NumPy."""

from itertools import pairwise

import numpy as np
import pytest

from schemas.errors import ConfigError, InputError, StoreError
from schemas.reports import MindirSpec
from tasks.models.generation import Generator, read_mindir_spec

VOCABULARY = 11
CACHE = 16
CHUNK = 4


class Remembering:
    """A cached model whose logits after a token are a function of all tokens up to it, and that notes its calls."""

    def __init__(self):
        self.rows = np.full(CACHE, 10**6)  # stale rows are loud
        self.calls = []

    def __call__(self, ids, positions):
        assert ids.dtype == positions.dtype == np.int32
        self.calls.append(ids.shape[1])
        self.rows[positions] = ids[0]
        return np.stack([self.after(self.rows[: position + 1]) for position in positions])

    @staticmethod
    def after(tokens):
        # the position counts, so that order matters; the argmax is spread over the vocabulary
        state = int(sum((place + 3) * (int(token) + 1) for place, token in enumerate(tokens)))
        return np.cos(np.arange(VOCABULARY) * 1.7 + state).astype(np.float32)


@pytest.fixture
def model():
    return Remembering()


@pytest.fixture
def generator(model):
    return Generator(model, cache_length=CACHE, prefill_chunk=CHUNK, vocabulary=VOCABULARY)


def greedy(ids, count):
    ids = list(ids)
    for _ in range(count):
        ids.append(int(Remembering.after(ids).argmax()))
    return tuple(ids[-count:])


def test_bad_settings_are_refused_before_the_model_runs(generator, model):
    with pytest.raises(ConfigError, match=r"temperature must be a number from 0 on, but is nan"):
        generator.generate([1], 2, float("nan"))
    with pytest.raises(ConfigError, match=r"top_p must be above 0 and at most 1, but is 0"):
        generator.generate([1], 2, 0.0, 0)
    assert model.calls == []


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 16])
def test_logits_of_a_prompt_are_those_after_each_token(generator, length):
    ids = np.random.default_rng(length).integers(0, VOCABULARY, length).tolist()
    wanted = np.stack([Remembering.after(ids[: end + 1]) for end in range(length)])
    np.testing.assert_array_equal(generator.logits(ids), wanted)


@pytest.mark.parametrize("length", [1, 4, 6])
def test_greedy_answers_do_not_depend_on_how_the_prompt_is_cut(generator, length):
    ids = list(range(1, length + 1))
    answer = generator.generate(ids, CACHE - length)
    assert answer.ids == greedy(ids, CACHE - length)
    assert not answer.stopped
    assert answer.decoded == len(answer.ids) - 1


def test_an_answer_does_not_depend_on_the_one_before(generator):
    generator.generate(list(range(9)), 7)
    assert generator.generate([3, 1], 6).ids == greedy([3, 1], 6)


def test_the_model_is_called_with_two_lengths_only(generator, model):
    generator.generate([1, 2, 3, 4, 5, 6], 3)
    generator.logits([1, 2])
    assert model.calls == [CHUNK, CHUNK, 1, 1, CHUNK]


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(generator):
    whole = greedy([2, 7], 8)
    place = next(place for place in range(2, 8) if whole[place] not in whole[:place])
    answer = generator.generate([2, 7], 8, stop_ids={whole[place]})
    assert answer.ids == whole[:place]
    assert answer.stopped
    assert answer.decoded == place  # the stop token was decoded too


def test_a_stop_token_at_once_gives_an_empty_answer(generator, model):
    answer = generator.generate([2, 7], 8, stop_ids=greedy([2, 7], 1))
    assert answer.ids == ()
    assert answer.stopped
    assert answer.decoded == 0
    assert model.calls == [CHUNK]


def test_a_stop_token_as_the_last_allowed_one_counts_as_stopped(generator):
    whole = greedy([2, 7], 3)
    assert whole[2] not in whole[:2]
    answer = generator.generate([2, 7], 3, stop_ids=[whole[2]])
    assert (answer.ids, answer.stopped) == (whole[:2], True)


def test_drawn_answers_repeat_with_their_seed(generator):
    answers = [generator.generate([1, 2], 12, 2.0, 0.9, seed).ids for seed in (3, 3, 4)]
    assert answers[0] == answers[1] != answers[2]


def test_times_cover_the_prompt_and_the_rest(generator):
    answer = generator.generate([1, 2, 3, 4, 5], 5)
    assert answer.first_token_seconds > 0
    assert answer.decode_seconds > 0
    assert generator.generate([1], 1).decoded == 0


def test_a_prompt_that_does_not_fit_is_refused_before_the_model_runs(generator, model):
    with pytest.raises(InputError, match="prompt has 10 tokens; with 7 new ones it does not fit the KV cache of 16"):
        generator.generate(list(range(10)), 7)
    with pytest.raises(InputError, match="prompt has 17 tokens; with 0 new ones"):
        generator.logits([1] * 17)
    assert model.calls == []
    assert len(generator.generate(list(range(10)), 6).ids) == 6


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "The prompt must be at least one token long, but is empty"),
        ([1, VOCABULARY, 2], "A token of the prompt must be 0 to 10, but is 11"),
        ([-1], "A token of the prompt must be 0 to 10, but is -1"),
    ],
)
def test_unusable_prompts_are_refused(generator, ids, message):
    with pytest.raises(InputError, match=message):
        generator.generate(ids, 1)
    with pytest.raises(InputError, match=message):
        generator.logits(ids)


def test_an_answer_of_no_tokens_is_refused(generator):
    with pytest.raises(ConfigError, match="max_new_tokens must be at least 1, but is 0"):
        generator.generate([1], 0)


def test_tokens_are_told_as_they_come(generator, model):
    calls = []
    answer = generator.generate([1, 2, 3, 4, 5], 4, on_token=lambda token: calls.append((token, len(model.calls))))
    assert [token for token, _ in calls] == list(answer.ids)
    assert [count for _, count in calls] == [2, 3, 4, 5]  # the first after the prompt's two chunks


def test_a_stop_token_is_not_told(generator):
    whole = greedy([2, 7], 8)
    place = next(place for place in range(2, 8) if whole[place] not in whole[:place])
    told = []
    generator.generate([2, 7], 8, stop_ids={whole[place]}, on_token=told.append)
    assert tuple(told) == whole[:place]


def test_a_listener_can_end_the_answer_and_the_next_one_is_right(generator):
    told = []

    def listen(token):
        told.append(token)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate([4, 2], 9, on_token=listen)
    assert tuple(told) == greedy([4, 2], 3)
    ids = [4, 2, *told, 5]
    assert generator.generate(ids, 4, reuse=True).ids == greedy(ids, 4)


@pytest.mark.parametrize("same", range(13))
def test_what_the_cache_holds_is_reused_in_whole_chunks(generator, model, same):
    """A prompt that begins like the one before with its answer: the answer is the same as from an empty cache."""
    first = [3, 1, 4, 1, 5, 9, 2, 6]
    held = [*first, *generator.generate(first, 6).ids]
    ids = [*held[:same], (held[same] + 1) % VOCABULARY, 8]
    model.calls.clear()
    assert generator.generate(ids, 2, reuse=True).ids == greedy(ids, 2)
    assert model.calls == [CHUNK] * (-(-len(ids) // CHUNK) - same // CHUNK) + [1]


def test_the_last_token_of_a_prompt_is_always_computed(generator, model):
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    list(generator.prefill(ids))
    model.calls.clear()
    assert generator.generate(ids, 3, reuse=True).ids == greedy(ids, 3)
    assert model.calls == [CHUNK, 1, 1]


def test_a_prefill_that_was_given_up_is_not_taken_for_whole(generator):
    ids = [5, 3, 8, 1, 9, 9, 2, 1, 7]
    next(generator.prefill(ids))
    assert generator.generate(ids, 4, reuse=True).ids == greedy(ids, 4)


def test_nothing_is_reused_unless_asked_for(generator, model):
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    generator.generate(ids, 1)
    model.calls.clear()
    generator.generate(ids, 1)
    assert model.calls == [CHUNK, CHUNK]


def test_an_exported_folder_of_another_version_is_refused(tmp_path):
    about = MindirSpec(graph_file="model.mindir", cache_length=CACHE, prefill_chunk=CHUNK, vocabulary=VOCABULARY)
    (tmp_path / "mindtune.json").write_text(about.model_dump_json())
    assert read_mindir_spec(tmp_path) == about
    (tmp_path / "mindtune.json").write_text(about.model_copy(update={"format_version": 2}).model_dump_json())
    with pytest.raises(StoreError, match=r"mindtune.json is written in format version 2; this mindtune reads 1"):
        Generator.from_mindir(tmp_path)


def test_the_model_of_these_tests_answers_variedly():
    """Without this the tests above would pass for a model that always says the same."""
    answer = greedy([2, 7], 12)
    assert len(set(answer)) > 5
    assert any(one != other for one, other in pairwise(answer))
