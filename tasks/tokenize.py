"""Stage `tokenize`: records of the data files become rows of token ids and labels.

Leaves `train/` and `validation/` (token shards, rows in the order of the files), `report.json` (TokenizeReport) and
`rejected.jsonl` (one Rejected a line).

The counts add up: every record, and every line of JSON Lines that is neither blank nor a record, is read; it is either
kept, in one split, or left out by the weight of its source, or rejected with one reason; what a kept record becomes,
`masks` says. Records are held out by a hash of their content, so that the choice depends neither on their order nor on
the other records, and equal records stay together. A record that the weight of its source shows more than once in an
epoch has its rows among the training rows as often; among the held-out rows it is once. Where nothing is held out,
`validation/` is empty, the report says `validation_is_training`, and the training rows are evaluated.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from schemas.config import LlmConfig
from schemas.errors import InputError
from schemas.manifest import StageJob, StageName, StageResult
from schemas.reports import Rejected, SourceCounts, SplitStatistics, TokenizeReport
from tasks.code import code_digests
from tasks.data.encoding import Encoder
from tasks.data.making import MadeBatch, Maker, read_batches
from tasks.data.masks import place_of
from tasks.data.packing import padded_lengths, padded_tokens
from tasks.data.replacing import Replacer
from tasks.data.shards import ShardWriter
from tasks.data.sources import training_files, validation_files
from tasks.files import canonical_json
from tasks.locations import base_path, tokenizer_path
from tasks.models.spec import read_config
from tasks.stages import STAGES, StageContext
from tasks.tokenizer_files import open_tokenizer
from tasks.workers import MOST_WORKERS, in_order, in_order_on_cluster, usable_cores

log = logging.getLogger("mindtune.tokenize")

STAGE: StageName = "tokenize"
REJECTED_FILE = "rejected.jsonl"
LOGGED_REJECTS = 3  # the file has all of them
SHOWN_PLACES = 3  # of each reason, in an error
PROGRESS_SECONDS = 0.5
BYTES_PER_WORKER = 2**20  # of the files; for less a process more does not pay
FATES = ("rejected", "left_out", "held_out", "train", "seen")  # of a file's records


class _Rejects:
    """The list of rejected records, counted by reason with the first places of each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._first: dict[str, list[str]] = {}
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, rejected: Rejected) -> None:
        self._file.write(rejected.model_dump_json() + "\n")
        place = place_of(rejected)
        reason, bracket, details = rejected.reason.partition(" (")
        self.counts[reason] += 1
        if self.counts[reason] <= SHOWN_PLACES:
            self._first.setdefault(reason, []).append(place + bracket + details)
        if self.counts.total() <= LOGGED_REJECTS:
            log.warning("%s is left out: %s", place, rejected.reason)

    def __str__(self) -> str:
        return "; ".join(self._line(reason, count) for reason, count in sorted(self.counts.items())) or "none"

    def _line(self, reason: str, count: int) -> str:
        places = self._first[reason] + ["..."] * (count > SHOWN_PLACES)
        return f"{reason}: {count} ({', '.join(places)})"


def run(job: StageJob, context: StageContext) -> StageResult:
    """Tokenize the records of a run.

    Raises:
        ConfigError: the template has no place for tokenize.system.
        InputError: the tokenizer or its chat template is unusable, or does not fit the base model; a data file is
            missing or no valid JSON; a record is bad and data.on_bad is `stop`; too many are, or none is left to train
            on or to validate on.
        StageError: a row would be trained wrongly (data.mask_broken).
    """
    config, output = job.config, Path(job.output)
    encoder = open_encoder(config)
    maker = Maker(config, encoder)
    files = (*training_files(config.data), *validation_files(config.data))
    counts: list[Counter[str]] = [Counter() for _ in files]
    replacer = Replacer(config.data.replace)
    with ExitStack() as stack:
        packed_length = config.tokenize.max_length if config.tokenize.packing == "pack" else None
        train = stack.enter_context(ShardWriter(output / "train", config.tokenize.rows_per_shard, packed_length))
        validation = stack.enter_context(
            ShardWriter(output / "validation", config.tokenize.rows_per_shard, packed_length)
        )
        rejects = stack.enter_context(_Rejects(output / REJECTED_FILE))
        for made in stack.enter_context(closing(_make(config, maker, replacer, context))):
            for item in made.rejected:
                if config.data.on_bad == "stop":
                    raise InputError("data.bad_record", stage=STAGE, place=place_of(item), reason=item.reason)
                rejects.add(item)
            train.append(made.train)
            validation.append(made.validation)
            counts[made.batch.source] += made.counts
    whole = sum(counts, Counter())
    kept = whole["train"] + whole["held_out"]
    shapes = config.tokenize.buckets if config.tokenize.packing == "buckets" else 1
    lengths = padded_lengths(train.row_lengths + validation.row_lengths, shapes, config.tokenize.max_length)
    report = TokenizeReport(
        template=config.tokenize.template,
        system=config.tokenize.system,
        read=kept + whole["left_out"] + whole["rejected"],
        kept=kept,
        left_out=whole["left_out"],
        rejected=whole["rejected"],
        reasons=dict(sorted(rejects.counts.items())),
        cut=whole["cut"],
        split=whole["split"],
        replaced=dict(replacer.counts),
        numbers_as_text=whole["numbers"],
        sources=tuple(
            SourceCounts(weight=file.weight, **{fate: of_file[fate] for fate in FATES})
            for file, of_file in zip(files, counts, strict=True)
        ),
        train=_statistics(train, whole["train"]),
        validation=_statistics(validation, whole["held_out"]),
        validation_is_training=not whole["held_out"],
        packing=config.tokenize.packing,
        padded_lengths=lengths,
        real_token_share=train.tokens / max(1, padded_tokens(train.row_lengths, lengths)),
        bos_id=encoder.bos_id,
        eos_id=encoder.end_ids(maker.template)[0],
    )
    _check_enough(report, config, str(rejects), output / REJECTED_FILE)
    for text, count in replacer.counts.items():
        if not count:
            log.warning("data.replace names %r, which stands in no record", text)
    if report.rejected:
        log.warning(
            "%d of %d records are left out, listed in %s: %s", report.rejected, report.read, REJECTED_FILE, rejects
        )
    (output / "report.json").write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    metrics = {
        "rows": report.train.rows,
        "real_token_share": report.real_token_share,
        "validation_rows": report.validation.rows,
        "tokens": report.train.tokens + report.validation.tokens,
        "trained_tokens": report.train.trained_tokens + report.validation.trained_tokens,
        "rejected": report.rejected,
    }
    # a rejected record is listed with its file's name, which is no part of the key
    return StageResult(metrics=metrics, volatile=(REJECTED_FILE,))


def open_encoder(config: LlmConfig) -> Encoder:
    """The run's tokenizer, checked against the base model where its config.json can be read.

    Raises:
        InputError: it is unusable, or has ids beyond the rows of the model's embedding (tokenizer.too_large).
    """
    path = tokenizer_path(config.model)
    with open_tokenizer(path) as folder:
        encoder = Encoder(folder)
    try:
        rows = read_config(base_path(config.model))["vocab_size"]
        too_large = encoder.size > rows
    except (InputError, KeyError, TypeError):
        return encoder  # the base model's own checks name what is wrong with its config.json
    if too_large:
        raise InputError("tokenizer.too_large", path=path, largest=encoder.size - 1, rows=rows)
    return encoder


def _make(config: LlmConfig, maker: Maker, replacer: Replacer, context: StageContext) -> Generator[MadeBatch]:
    """What becomes of all records, batch by batch; says how far it is."""
    read, total, told = 0, 0, time.monotonic()
    batches = read_batches(config.data, replacer)
    if config.tokenize.dask is None:
        results = in_order(maker, batches, config.tokenize.workers or _default_workers(config))
    else:
        results = in_order_on_cluster(maker, batches, config.tokenize.dask, _versions)
    for made in results:
        yield made
        read += made.read
        total = made.batch.bytes_total
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            context.report_progress(made.batch.bytes_done, total, f"{read} records")
    context.report_progress(total, total, f"{read} records")


def _default_workers(config: LlmConfig) -> int:
    files = (*training_files(config.data), *validation_files(config.data))
    size = sum(file.stat()[0] for file in files)
    return min(usable_cores(), MOST_WORKERS, 1 + size // BYTES_PER_WORKER)


def _versions() -> dict[str, str]:
    """What a worker on another machine has to have in common with this one: all that can change a row."""
    code = hashlib.sha256(canonical_json(code_digests(__name__)).encode()).hexdigest()
    return {"code": code[:12], **{name: version(name) for name in STAGES[STAGE].libraries}}


def _statistics(split: ShardWriter, records: int) -> SplitStatistics:
    lengths = split.segment_lengths
    longest = max(lengths, default=0)
    edges = [0, 16]
    while edges[-1] <= longest:  # the last edge lies above the longest row
        edges.append(2 * edges[-1])
    counts, _ = np.histogram(list(lengths), edges, weights=list(lengths.values()))
    return SplitStatistics(
        records=records,
        rows=split.row_lengths.total(),
        tokens=split.tokens,
        trained_tokens=split.trained_tokens,
        longest=longest,
        histogram_edges=tuple(edges),
        histogram_counts=tuple(counts.astype(int).tolist()),
    )


def _check_enough(report: TokenizeReport, config: LlmConfig, reasons: str, listed: Path) -> None:
    facts: dict[str, Any] = {"stage": STAGE, "read": report.read, "rejected": report.rejected, "reasons": reasons}
    if not report.train.rows:
        raise InputError("data.nothing_left", held_out=report.validation.records, **facts)
    if config.data.validation and not report.validation.rows:
        raise InputError("data.nothing_to_validate", **facts)
    if report.rejected > config.data.max_rejected_share * report.read:
        raise InputError("data.too_many_rejected", limit=config.data.max_rejected_share, listed=listed, **facts)
