"""What the evaluation takes, asks and measures, with a model of a few lines of NumPy; then the stage itself."""

import importlib.util
import json
import logging
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from schemas.config import (
    DataConfig,
    EvaluateConfig,
    ExportConfig,
    LlmConfig,
    ModelConfig,
    TemplateName,
    TokenizeConfig,
)
from schemas.errors import ConfigError, InputError, StageError
from schemas.manifest import StageJob, StageResult
from schemas.reports import EvalReport, Speed
from schemas.tables import IGNORE_LABEL
from tasks import evaluate, export, tokenize
from tasks.data.encoding import Encoder
from tasks.data.masks import RecordRows, make_rows
from tasks.data.records import Record, Turn, exchange
from tasks.data.shards import TokenRows
from tasks.data.templates import TEMPLATES
from tasks.evaluate import Prompt, Row, answer, choose_prompts, choose_rows, measure_speed, score_rows
from tasks.models.generation import Generator
from tasks.stages import StageContext

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
        ("a", asked[0], "one"),
        ("b", asked[1], "two"),
    ]
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        assert (
            len(choose_prompts(EvaluateConfig(samples=9, max_new_tokens=8), rows, encoder, TEMPLATES["plain"], 32)) == 3
        )
    assert "only 3 of 9" in caplog.text
    assert choose_prompts(EvaluateConfig(samples=0), rows, encoder, TEMPLATES["plain"], 512) == []


def test_a_conversation_is_asked_for_its_first_trained_answer_and_a_text_for_its_second_half(encoder: Encoder):
    turns = (*exchange("Who?", "Tom."), *exchange("Who else?", "Lily."))
    text = (Turn("assistant", "one two three four"),)
    for train_on, asked, reference in (("all", turns[:1], "Tom."), ("last", turns[:3], "Lily.")):
        settings = TokenizeConfig(template="chatml", train_on=train_on)
        made, _ = make_rows(
            [Record("a", 0, None, turns), Record("a", 1, None, text)], TEMPLATES["chatml"], encoder, settings
        )
        rows = [
            (np.array(each.input_ids, np.int32), np.array(each.labels, np.int32))
            for record in made
            if isinstance(record, RecordRows)
            for each in record.rows
        ]
        conversation, plain = choose_prompts(EvaluateConfig(samples=2), rows, encoder, TEMPLATES["chatml"], 512)
        assert conversation.ids == encoder.prompt_ids(asked, TEMPLATES["chatml"])
        assert conversation.reference == reference
        assert plain.ids == rows[1][0][: len(plain.ids)].tolist()
        assert len(rows[1][0]) // 2 <= len(plain.ids) <= len(rows[1][0]) // 2 + 1
        assert "one two three four".startswith(plain.text)
        assert plain.reference
        assert "one two three four".endswith(plain.reference)


@pytest.mark.parametrize("name", ["alpaca", "alpaca-zh", "chatml", "llama2", "qwen", "plain"])
def test_held_out_questions_are_shown_without_the_text_of_the_template(encoder: Encoder, name: TemplateName):
    question = Turn("user", "What is user?\nAnd assistant?")
    asked = encoder.prompt_ids([question], TEMPLATES[name])
    (prompt,) = choose_prompts(EvaluateConfig(samples=1), [row(asked, [3, 4])], encoder, TEMPLATES[name], 512)
    assert prompt.text == question.text
    assert prompt.ids == asked


def test_prompts_of_the_configuration_get_the_system_turn_that_was_trained(encoder: Encoder):
    settings = EvaluateConfig(prompts=("Hi",), max_new_tokens=4)
    (prompt,) = choose_prompts(settings, [], encoder, TEMPLATES["chatml"], 512, "Be kind.")
    assert prompt.ids == encoder.prompt_ids([Turn("system", "Be kind."), Turn("user", "Hi")], TEMPLATES["chatml"])


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


# the stage itself: real shards, a real MindIR, and a base model that differs from it


def llm_config(folder: Path, base: Path, **evaluate) -> LlmConfig:
    return LlmConfig(
        model=ModelConfig(base=str(base)),
        data=DataConfig(train=(str(folder / "train.json"),), validation=(str(folder / "validation.json"),)),
        tokenize=TokenizeConfig(template="plain", max_length=256),
        export=ExportConfig(cache_length=64, prefill_chunk=16, parity_lengths=(1, 20)),
        evaluate=EvaluateConfig(max_new_tokens=8, **evaluate),
    )


def run_stage(
    module: ModuleType, stage: str, folder: Path, config: LlmConfig, inputs: dict[str, Path]
) -> tuple[StageResult, list[tuple[int, int]]]:
    """What a stage returns, and the progress that it reported."""
    progress: list[tuple[int, int]] = []
    output = folder / stage / ("0" * 64)
    output.mkdir(parents=True)
    job = StageJob(
        stage=stage,
        key="0" * 64,
        run="test",
        config=config,
        inputs={name: str(path) for name, path in inputs.items()},
        sources={},
        output=str(output),
        work=str(folder),
        device="CPU",
    )
    context = StageContext(
        report_progress=lambda done, total, text: progress.append((done, total)), stop_requested=lambda: False
    )
    return module.run(job, context), progress


@dataclass(frozen=True)
class Finished:
    """Folders of a finished evaluation, and what it returned."""

    folder: Path
    merged: Path
    output: Path
    result: StageResult
    report: EvalReport
    progress: list[tuple[int, int]]


@pytest.fixture(scope="module")
def finished_stage(tmp_path_factory: pytest.TempPathFactory, stories: Path) -> Finished:
    folder = tmp_path_factory.mktemp("evaluate")
    told = [
        {"instruction": "What is a dog?", "input": "", "output": "A dog is a small animal."},
        {"instruction": "Where is Tom?", "input": "", "output": "Tom is in the park. " * 12},  # beyond the cache
        {"instruction": "Who are you?", "input": "", "output": "I am Lily."},
    ]
    for name in ("train", "validation"):
        (folder / f"{name}.json").write_text(json.dumps(told), encoding="utf-8")
    merged = folder / "merged"
    shutil.copytree(stories, merged)
    random = np.random.default_rng(1)
    weights = {
        name: tensor + random.normal(0, 0.02, tensor.shape).astype(np.float32)
        for name, tensor in load_file(stories / "model.safetensors").items()
    }
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    config = llm_config(folder, stories, samples=3)
    run_stage(tokenize, "tokenize", folder, config, {})
    run_stage(export, "export", folder, config, {"merge": merged})
    inputs = {name: folder / name / ("0" * 64) for name in ("tokenize", "export")}
    result, progress = run_stage(evaluate, "evaluate", folder, config, inputs)
    output = folder / "evaluate" / ("0" * 64)
    report = EvalReport.model_validate_json((output / "report.json").read_text(encoding="utf-8"))
    return Finished(folder, merged, output, result, report, progress)


def expected_score(model: Path, rows: list[Row]) -> tuple[float, float]:
    """Loss and accuracy of a checkpoint by the forward pass in NumPy float64."""
    spec = importlib.util.spec_from_file_location("numpy_llama", Path(__file__).parent / "models" / "numpy_llama.py")
    numpy_llama = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(numpy_llama)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    losses, right = [], []
    for ids, labels in rows:
        logits = numpy_llama.logits(
            load_file(model / "model.safetensors"),
            ids,
            heads=config["num_attention_heads"],
            key_value_heads=config["num_key_value_heads"],
            epsilon=config["rms_norm_eps"],
            theta=config.get("rope_theta", 10000.0),
        )
        for place in np.flatnonzero(labels != IGNORE_LABEL):
            before = logits[place - 1]
            losses.append(np.log(np.exp(before - before.max()).sum()) + before.max() - before[labels[place]])
            right.append(before.argmax() == labels[place])
    return float(np.mean(losses)), float(np.mean(right))


def test_losses_are_those_of_an_independent_forward_pass(finished_stage: Finished, stories: Path):
    split = TokenRows(finished_stage.folder / "tokenize" / ("0" * 64) / "validation")
    rows = [split.row(index)[:2] for index in (0, 2)]
    report = finished_stage.report
    assert (report.rows, report.rows_too_long) == (2, 1)
    assert report.tokens == sum(int((labels != IGNORE_LABEL).sum()) for _, labels in rows)
    before, after = expected_score(stories, rows), expected_score(finished_stage.merged, rows)
    assert abs(before[0] - after[0]) > 0.01  # else before and after could be swapped unseen
    # float32 with logits up to 20: about 1e-5
    assert (report.loss_before, report.loss_after) == pytest.approx((before[0], after[0]), abs=1e-4)
    assert (report.token_accuracy_before, report.token_accuracy_after) == (before[1], after[1])
    assert report.perplexity_after == pytest.approx(math.exp(report.loss_after))


def test_answers_are_of_the_base_model_and_of_the_mindir(finished_stage: Finished, encoder: Encoder):
    answers = finished_stage.report.answers
    assert [answer.reference for answer in answers] == ["A dog is a small animal.", "I am Lily."]
    assert [answer.prompt for answer in answers] == ["What is a dog?", "Who are you?"]
    served = Generator.from_mindir(finished_stage.folder / "export" / ("0" * 64))
    for told in answers:
        made = served.generate(encoder.encode_prompt(f"Q: {told.prompt}\nA:"), 8, stop_ids=[encoder.eos_id])
        assert told.after == encoder.decode(made.ids).strip()
        assert told.after != told.before


def test_metrics_and_volatile_files_are_named(finished_stage: Finished):
    result, report = finished_stage.result, finished_stage.report
    speed = Speed.model_validate_json((finished_stage.output / "speed.json").read_text(encoding="utf-8"))
    assert result.metrics == {
        "loss_before": report.loss_before,
        "loss_after": report.loss_after,
        "perplexity_before": report.perplexity_before,
        "perplexity_after": report.perplexity_after,
        "token_accuracy_before": report.token_accuracy_before,
        "token_accuracy_after": report.token_accuracy_after,
        "tokens_per_second": speed.tokens_per_second,
        "first_token_seconds": speed.first_token_seconds,
        "peak_memory_bytes": speed.peak_memory_bytes,
    }
    assert all(math.isfinite(value) and value > 0 for value in result.metrics.values())
    assert result.payload is None
    assert sorted({path.name for path in finished_stage.output.iterdir()} - set(result.volatile)) == ["report.json"]
    assert f"{report.loss_after:.3f}" in (finished_stage.output / "report.html").read_text(encoding="utf-8")


def test_progress_reaches_its_total(finished_stage: Finished):
    total = 1 + 2 * (2 + 2)  # speed; rows and prompts, before and after
    assert finished_stage.progress == [(done, total) for done in range(1, total + 1)]


def test_prompt_that_does_not_fit_is_refused_before_a_model_is_loaded(
    finished_stage: Finished, stories: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Generator, "from_mindir", lambda folder: pytest.fail("a model was loaded"))
    config = llm_config(finished_stage.folder, stories, prompts=("Who are you? " * 10,))
    inputs = {name: finished_stage.folder / name / ("0" * 64) for name in ("tokenize", "export")}
    with pytest.raises(ConfigError, match="Prompt 1 of evaluate"):
        run_stage(evaluate, "evaluate", finished_stage.folder / "refused", config, inputs)
