"""Stage `evaluate`: the model before and after, on the same held-out rows and prompts.

*After* is the exported MindIR, so that what is measured is what will be served; *before* is the base model with a KV
cache of the same size. The MindIR goes first, so that the peak memory is that of serving it alone.
"""

import itertools
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.config import EvaluateConfig
from schemas.errors import ConfigError, InputError, StageError
from schemas.manifest import StageJob, StageResult
from schemas.reports import Answer, EvalReport, Speed, TokenizeReport
from schemas.tables import IGNORE_LABEL
from tasks.data.chat_template import open_template
from tasks.data.encoding import Encoder
from tasks.data.records import Turn
from tasks.data.shards import TokenRows
from tasks.data.templates import Template
from tasks.files import write_atomically
from tasks.locations import base_path, tokenizer_path
from tasks.memory import peak_memory_bytes
from tasks.models.generation import Generator, read_mindir_spec
from tasks.report import write_report
from tasks.scoring import Score, score_row
from tasks.stages import StageContext
from tasks.tokenizer_files import open_tokenizer

log = logging.getLogger("mindtune.evaluate")

Row = tuple[NDArray[np.int32], NDArray[np.int32]]

NAMED_ROWS = 10  # rows that a warning names one by one
SPEED_PROMPTS = 5  # enough for a median; more would only cost time
METRICS = (
    "loss_before",
    "loss_after",
    "perplexity_before",
    "perplexity_after",
    "token_accuracy_before",
    "token_accuracy_after",
)


@dataclass(frozen=True)
class Prompt:
    """What is asked.

    Args:
        text: as the report shows it.
        ids: what the model gets, template and start token included.
        reference: the held-out answer, where there is one.
    """

    text: str
    ids: list[int]
    reference: str | None


def run(job: StageJob, context: StageContext) -> StageResult:
    """Write `report.json` (EvalReport), `speed.json` (Speed) and `report.html`.

    Raises:
        InputError: no held-out row fits the KV cache.
        ConfigError: a prompt of the configuration and its answer do not fit it.
        StageError: a loss is not finite.
    """
    settings = job.config.evaluate
    mindir, tokens, output = Path(job.inputs["export"]), Path(job.inputs["tokenize"]), Path(job.output)
    cache = read_mindir_spec(mindir)
    tokenized = TokenizeReport.model_validate_json((tokens / "report.json").read_text(encoding="utf-8"))

    # all that can be refused, before a model is loaded
    split = TokenRows(tokens / ("train" if tokenized.validation_is_training else "validation"), by_segment=True)
    chosen, too_long = choose_rows(split.lengths(), settings.max_rows, cache.cache_length)
    rows = [split.row(index)[:2] for index in chosen]
    with open_tokenizer(tokenizer_path(job.config.model)) as folder:
        encoder = Encoder(folder)
    template = open_template(tokenized.template, encoder)
    prompts = choose_prompts(settings, rows, encoder, template, cache.cache_length, tokenized.system)
    stop_ids = encoder.end_ids(template)

    from tasks.models.device import use_device
    from tasks.models.loading import load_decoder

    use_device(job.device)
    done, total = itertools.count(1), 1 + 2 * (len(rows) + len(prompts))

    def advance(text: str) -> None:
        context.report_progress(next(done), total, text)

    after = Generator.from_mindir(mindir)
    speed = measure_speed(after, [prompt.ids for prompt in prompts] or [rows[0][0].tolist()], settings.max_new_tokens)
    advance(f"{speed.tokens_per_second:.1f} tokens/s")
    score_after = score_rows(after, rows, advance, "after")
    answers_after = answer(after, prompts, settings, stop_ids, advance)
    del after
    before = Generator.from_decoder(load_decoder(base_path(job.config.model)), cache.cache_length, cache.prefill_chunk)
    score_before = score_rows(before, rows, advance, "before")
    answers_before = answer(before, prompts, settings, stop_ids, advance)

    report = EvalReport(
        rows=len(rows),
        rows_too_long=too_long,
        tokens=score_after.tokens,
        loss_before=score_before.loss,
        loss_after=score_after.loss,
        perplexity_before=score_before.perplexity,
        perplexity_after=score_after.perplexity,
        token_accuracy_before=score_before.accuracy,
        token_accuracy_after=score_after.accuracy,
        validation_is_training=tokenized.validation_is_training,
        answers=tuple(
            Answer(
                prompt=prompt.text,
                reference=prompt.reference,
                before=encoder.decode(old).strip(),
                after=encoder.decode(new).strip(),
            )
            for prompt, old, new in zip(prompts, answers_before, answers_after, strict=True)
        ),
    )
    write_atomically(output / "report.json", report.model_dump_json(indent=1))
    write_atomically(output / "speed.json", speed.model_dump_json(indent=1))
    write_report(output / "report.html", job, report, speed)
    log.info("loss %.4f -> %.4f nats a token, %d rows", report.loss_before, report.loss_after, report.rows)
    return StageResult(
        metrics={**report.model_dump(include=set(METRICS)), **speed.model_dump()},
        volatile=("speed.json", "report.html"),
    )


def choose_rows(lengths: NDArray[np.int64], most: int, cache_length: int) -> tuple[list[int], int]:
    """The first rows that fit the KV cache, and how many rows do not; those are named in the log.

    Args:
        lengths: tokens of each row.
        most: rows wanted, at most.
        cache_length: tokens that the cache holds.

    Raises:
        InputError: no row fits.
    """
    too_long = np.flatnonzero(lengths > cache_length)
    if len(too_long) == len(lengths):
        shortest = int(lengths.min()) if len(lengths) else 0
        raise InputError("evaluate.no_row", rows=len(lengths), cache=cache_length, shortest=shortest)
    if len(too_long):
        named = ", ".join(str(index) for index in too_long[:NAMED_ROWS])
        log.warning(
            "%d of %d rows are longer than the KV cache of %d tokens and are left out (rows %s%s)",
            len(too_long),
            len(lengths),
            cache_length,
            named,
            ", ..." if len(too_long) > NAMED_ROWS else "",
        )
    return np.flatnonzero(lengths <= cache_length)[:most].tolist(), len(too_long)


def choose_prompts(
    settings: EvaluateConfig,
    rows: Sequence[Row],
    encoder: Encoder,
    template: Template,
    cache_length: int,
    system: str | None = None,
) -> list[Prompt]:
    """The prompts of the configuration, else the first different ones of the rows.

    A row's prompt is what stands before its first trained answer, and that answer is the reference; of a plain text it
    is the first half. A prompt of a row that leaves no room for an answer is passed over; one of the configuration is
    an error.

    Args:
        settings: prompts, samples, length of answers.
        rows: held-out rows.
        encoder: the tokenizer.
        template: how questions are written.
        cache_length: tokens that the cache holds.
        system: the system turn of the prompts of the configuration.

    Raises:
        ConfigError: a prompt of the configuration does not fit the cache together with its answer.
    """
    room = cache_length - settings.max_new_tokens
    asked_for = [(text, encoder.prompt_ids([Turn("user", text)], template, system)) for text in settings.prompts]
    prompts = [Prompt(text, ids, None) for text, ids in asked_for]
    for number, prompt in enumerate(prompts, 1):
        if len(prompt.ids) > room:
            raise ConfigError(
                "evaluate.prompt_too_long",
                number=number,
                prompt=len(prompt.ids),
                new=settings.max_new_tokens,
                cache=cache_length,
            )
    if prompts:
        return prompts
    for ids, labels in rows:
        if len(prompts) == settings.samples:
            break
        start, end = _first_answer(labels)
        if start <= len(encoder.prefix):
            start = (start + end) // 2
        asked, answered = ids[:start].tolist(), ids[start:end].tolist()
        if 0 < len(asked) <= room and all(asked != prompt.ids for prompt in prompts):
            shown = _without_frame(encoder.decode(asked), encoder, template, system)
            prompts.append(Prompt(shown, asked, encoder.decode(answered).strip()))
    if len(prompts) < settings.samples:
        log.warning(
            "only %d of %d different prompts fit the KV cache with their answers", len(prompts), settings.samples
        )
    return prompts


def _without_frame(prompt: str, encoder: Encoder, template: Template, system: str | None) -> str:
    """A decoded prompt without the template's own text around a lone question; any other prompt as it is."""
    word = "QUESTION"  # what stands around it stands around every question
    before, _, after = encoder.decode(encoder.prompt_ids([Turn("user", word)], template, system)).partition(word)
    if len(prompt) > len(before + after) and prompt.startswith(before) and prompt.endswith(after):
        prompt = prompt[len(before) : len(prompt) - len(after)]
    return prompt.strip()


def _first_answer(labels: NDArray[np.int32]) -> tuple[int, int]:
    """Where the first trained stretch of a row begins, and where it has ended."""
    trained = labels != IGNORE_LABEL
    start = int(np.argmax(trained))
    return start, start + int(np.argmin(np.append(trained[start:], False)))


def score_rows(generator: Generator, rows: Sequence[Row], advance: Callable[[str], None], name: str) -> Score:
    """The model's score on all rows together.

    Raises:
        StageError: the loss is not finite.
    """
    total = Score()
    for number, (ids, labels) in enumerate(rows, 1):
        total += score_row(generator.prefill(ids.tolist()), labels)
        advance(f"{name}: row {number} of {len(rows)}, loss {total.loss:.3f}")
    if not math.isfinite(total.loss):
        raise StageError("evaluate.not_finite", name=name, value=total.loss)
    return total


def answer(
    generator: Generator,
    prompts: Sequence[Prompt],
    settings: EvaluateConfig,
    stop_ids: Sequence[int],
    advance: Callable[[str], None],
) -> list[tuple[int, ...]]:
    """The ids of the model's answer to each prompt, up to a stop token or the length."""
    answers = []
    for prompt in prompts:
        made = generator.generate(
            prompt.ids,
            settings.max_new_tokens,
            settings.temperature,
            settings.top_p,
            settings.seed,
            stop_ids,
        )
        answers.append(made.ids)
        advance("answered a prompt")
    return answers


def measure_speed(generator: Generator, prompts: Sequence[Sequence[int]], new_tokens: int) -> Speed:
    """Speed and memory of one request at a time, without end tokens: a short answer would measure nothing.

    Args:
        generator: the model, compiled.
        prompts: the first few are taken, each cut to leave room for the answer.
        new_tokens: tokens to make; at least two are, since the first is no decoding.
    """
    new = max(2, new_tokens)
    runs = [generator.generate(ids[: generator.cache_length - new], new) for ids in prompts[:SPEED_PROMPTS]]
    return Speed(
        first_token_seconds=statistics.median(made.first_token_seconds for made in runs),
        tokens_per_second=sum(made.decoded for made in runs) / sum(made.decode_seconds for made in runs),
        peak_memory_bytes=peak_memory_bytes(),
    )
