"""What the evaluation takes, asks and measures, with a model of a few lines of NumPy; then the stage itself."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from schemas.config import EvaluateConfig
from schemas.errors import ConfigError, InputError, StageError
from schemas.tables import IGNORE_LABEL
from tasks.data.encoding import Encoder
from tasks.data.templates import TEMPLATES
from tasks.evaluate import Prompt, Row, answer, choose_prompts, choose_rows, measure_speed, score_rows
from tasks.models.generation import Generator

VOCABULARY, CACHE, CHUNK = 512, 32, 8
TABLE = np.random.default_rng(11).normal(0, 2, (VOCABULARY, VOCABULARY)).astype(np.float32)


def bigram(ids: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.float32]:
    """A model that knows the token before only."""
    return TABLE[ids[0]]


def generator(step=bigram) -> Generator:
    return Generator(step, cache_length=CACHE, prefill_chunk=CHUNK, vocabulary=VOCABULARY)


def row(prompt: list[int], answered: list[int]) -> Row:
    ids = np.array(prompt + answered, np.int32)
    labels = np.array([IGNORE_LABEL] * len(prompt) + answered, np.int32)
    return ids, labels


def silent(_text: str) -> None:
    return


@pytest.fixture(scope="module")
def encoder(stories: Path) -> Encoder:
    return Encoder(stories)


def test_rows_that_fit_are_taken_in_order_up_to_the_number_wanted(caplog: pytest.LogCaptureFixture):
    lengths = np.array([5, 40, 32, 33, 7, 9], np.int64)
    with caplog.at_level(logging.WARNING):
        assert choose_rows(lengths, 3, CACHE) == ([0, 2, 4], 2)
    assert "2 of 6 rows are longer than the KV cache of 32 tokens and are left out (rows 1, 3)" in caplog.text


def test_nothing_is_said_where_every_row_fits(caplog: pytest.LogCaptureFixture):
    assert choose_rows(np.array([5, 32], np.int64), 200, CACHE) == ([0, 1], 0)
    assert caplog.text == ""


def test_split_without_a_row_that_fits_is_refused():
    message = "None of the 2 held-out rows fits the KV cache of 32 tokens; the shortest has 33"
    with pytest.raises(InputError, match=message) as caught:
        choose_rows(np.array([50, 33], np.int64), 10, CACHE)
    assert "export.cache_length" in caught.value.hint
    assert caught.value.exit_code == 2


def test_prompts_of_the_configuration_go_through_the_training_template(encoder: Encoder):
    settings = EvaluateConfig(prompts=("Who are you?", "Hi"), max_new_tokens=4)
    prompts = choose_prompts(settings, [row([1, 2], [3])], encoder, TEMPLATES["plain"], 64)
    assert [(prompt.text, prompt.reference) for prompt in prompts] == [("Who are you?", None), ("Hi", None)]
    assert prompts[0].ids == encoder.encode_prompt("Q: Who are you?\nA:")


def test_prompt_of_the_configuration_that_leaves_no_room_for_the_answer_is_refused(encoder: Encoder):
    settings = EvaluateConfig(prompts=("Hi", "Who are you? " * 5), max_new_tokens=8)
    with pytest.raises(ConfigError, match=r"Prompt 2 of evaluate\.prompts has \d+ tokens; .* KV cache of 32") as caught:
        choose_prompts(settings, [], encoder, TEMPLATES["plain"], CACHE)
    assert "evaluate.max_new_tokens" in caught.value.hint


def test_held_out_prompts_are_the_first_different_ones_that_leave_room(
    encoder: Encoder, caplog: pytest.LogCaptureFixture
):
    asked = [encoder.encode_prompt(text) for text in ("Q: a\nA:", "Q: b\nA:", "Q: c\nA:")]
    long_one = asked[0] + [asked[0][-1]] * 20
    end = [encoder.eos_id]
    rows = [
        row(long_one, end),
        row(asked[0], encoder.answer_ids("one") + end),
        row(asked[0], encoder.answer_ids("another") + end),
        row(asked[1], encoder.answer_ids("two") + end),
        row(asked[2], end),
    ]
    settings = EvaluateConfig(samples=2, max_new_tokens=8)
    prompts = choose_prompts(settings, rows, encoder, TEMPLATES["plain"], CACHE)
    assert [(prompt.text, prompt.ids, prompt.reference) for prompt in prompts] == [
        ("Q: a\nA:", asked[0], "one"),
        ("Q: b\nA:", asked[1], "two"),
    ]
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        assert (
            len(choose_prompts(EvaluateConfig(samples=9, max_new_tokens=8), rows, encoder, TEMPLATES["plain"], 32)) == 3
        )
    assert "only 3 of 9" in caplog.text
    assert choose_prompts(EvaluateConfig(samples=0), rows, encoder, TEMPLATES["plain"], 512) == []


def test_loss_of_rows_is_the_mean_over_all_their_label_tokens():
    random = np.random.default_rng(0)
    rows = [
        row(random.integers(0, VOCABULARY, asked).tolist(), random.integers(0, VOCABULARY, told).tolist())
        for asked, told in ((3, 9), (20, 2), (1, 30))
    ]
    losses = []
    for ids, labels in rows:
        for place in np.flatnonzero(labels != IGNORE_LABEL):
            logits = TABLE[ids[place - 1]].astype(np.float64)
            losses.append(math.log(np.exp(logits).sum()) - logits[labels[place]])
    told: list[str] = []
    score = score_rows(generator(), rows, told.append, "after")
    assert score.tokens == len(losses) == 41
    assert score.loss == pytest.approx(np.mean(losses), rel=1e-12)  # both float64
    assert len(told) == len(rows)


def test_loss_that_is_not_finite_is_an_error_that_names_the_model():
    def broken(ids, positions):
        return np.full((ids.shape[1], VOCABULARY), np.nan, np.float32)

    with pytest.raises(StageError, match="The loss of the model before fine-tuning is nan"):
        score_rows(generator(broken), [row([1], [2])], silent, "before")


def test_answers_end_at_a_stop_token_or_the_length():
    start = 7
    path = [start]
    for _ in range(6):
        path.append(int(TABLE[path[-1]].argmax()))
    assert len(set(path)) == len(path)  # else the test would stop early
    settings = EvaluateConfig(max_new_tokens=6)
    prompts = [Prompt("", [start], None)]
    assert answer(generator(), prompts, settings, [], silent) == [tuple(path[1:7])]
    assert answer(generator(), prompts, settings, [path[4]], silent) == [tuple(path[1:4])]


def test_sampled_answers_depend_on_the_seed_alone():
    prompts = [Prompt("", [7], None)]

    def sampled(seed: int) -> list[tuple[int, ...]]:
        settings = EvaluateConfig(max_new_tokens=12, temperature=1.5, seed=seed)
        return answer(generator(), prompts, settings, [], silent)

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


@pytest.mark.parametrize("new_tokens", [1, 10, CACHE - 1])
def test_speed_is_measured_without_stopping_and_within_the_cache(monkeypatch: pytest.MonkeyPatch, new_tokens: int):
    # a clock that goes on by a second with each look: start, first token, last token
    ticks: Iterator[float] = iter(range(1000))
    monkeypatch.setattr("tasks.models.generation.time.perf_counter", lambda: float(next(ticks)))
    speed = measure_speed(generator(), [[3] * 30, [4] * 5], new_tokens)
    assert speed.first_token_seconds == 1.0
    assert speed.tokens_per_second == max(2, new_tokens) - 1  # the first token is no decoding
    assert speed.peak_memory_bytes > 0
