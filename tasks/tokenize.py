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
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from schemas.config import LlmConfig
from schemas.errors import InputError
from schemas.manifest import StageJob, StageResult
from schemas.reports import Rejected, SourceCounts, SplitStatistics, TokenizeReport
from schemas.tables import IGNORE_LABEL
from tasks.data.chat_template import open_template
from tasks.data.encoding import Encoder
from tasks.data.masks import RecordRows, TokenRow, make_rows, place_of
from tasks.data.mixing import copies_of
from tasks.data.packing import padded_lengths, padded_tokens
from tasks.data.readers import RecordReader
from tasks.data.records import Record
from tasks.data.replacing import Replacer
from tasks.data.shards import ShardWriter
from tasks.data.sources import training_files, validation_files
from tasks.data.templates import Template
from tasks.files import canonical_json
from tasks.locations import base_path, tokenizer_path
from tasks.models.spec import read_config
from tasks.stages import StageContext
from tasks.tokenizer_files import open_tokenizer

log = logging.getLogger("mindtune.tokenize")

STAGE = "tokenize"
REJECTED_FILE = "rejected.jsonl"
LOGGED_REJECTS = 3  # the file has all of them
SHOWN_PLACES = 3  # of each reason, in an error
PROGRESS_SECONDS = 0.5
BATCH_RECORDS = 256  # records that are encoded together


class _Split(ShardWriter):
    """A split that keeps count of what is written to it."""

    def __init__(self, folder: Path, rows_per_shard: int, packed_length: int | None = None) -> None:
        super().__init__(folder, rows_per_shard, packed_length)
        self.records = 0
        self.lengths: list[int] = []
        self.trained_tokens = 0

    def append(self, row: TokenRow, source: int, record: int) -> None:
        super().append(row, source, record)
        self.lengths.append(len(row.input_ids))
        self.trained_tokens += sum(label != IGNORE_LABEL for label in row.labels)

    def statistics(self) -> SplitStatistics:
        longest = max(self.lengths, default=0)
        edges = [0, 16]
        while edges[-1] <= longest:  # the last edge lies above the longest row
            edges.append(2 * edges[-1])
        return SplitStatistics(
            records=self.records,
            rows=self.row_lengths.total(),
            tokens=sum(self.lengths),
            trained_tokens=self.trained_tokens,
            longest=longest,
            histogram_edges=tuple(edges),
            histogram_counts=tuple(np.histogram(self.lengths, edges)[0].tolist()),
        )


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


@dataclass(frozen=True)
class Made:
    """A record that has become rows.

    Args:
        record: the record, texts replaced.
        made: its rows.
        is_held_out: they are no training rows.
        copies: how often they stand in the split.
    """

    record: Record
    made: RecordRows
    is_held_out: bool
    copies: int


@dataclass(frozen=True)
class LeftOut:
    """A record that the weight of its source leaves out."""

    record: Record


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
    template = open_template(config.tokenize.template, encoder, config.tokenize.system)
    counts: Counter[str] = Counter()
    files = (*training_files(config.data), *validation_files(config.data))
    sources: list[Counter[str]] = [Counter() for _ in files]
    replacer = Replacer(config.data.replace)
    with ExitStack() as stack:
        packed_length = config.tokenize.max_length if config.tokenize.packing == "pack" else None
        train = stack.enter_context(_Split(output / "train", config.tokenize.rows_per_shard, packed_length))
        validation = stack.enter_context(_Split(output / "validation", config.tokenize.rows_per_shard))
        rejects = stack.enter_context(_Rejects(output / REJECTED_FILE))
        for source, item in make_all(config, template, encoder, replacer, context.report_progress):
            if isinstance(item, Rejected):
                if config.data.on_bad == "stop":
                    raise InputError("data.bad_record", stage=STAGE, place=place_of(item), reason=item.reason)
                rejects.add(item)
                sources[source].update(rejected=1)
            elif isinstance(item, LeftOut):
                sources[source].update(left_out=1)
            else:
                split = validation if item.is_held_out else train
                for row in item.made.rows * item.copies:
                    split.append(row, source, item.record.index)
                split.records += 1
                counts.update(numbers=item.record.has_number, cut=item.made.is_cut, split=item.made.is_split)
                sources[source].update({"held_out": 1} if item.is_held_out else {"train": 1, "seen": item.copies})
    kept, rejected = train.records + validation.records, rejects.counts.total()
    left_out = sum(source["left_out"] for source in sources)
    shapes = config.tokenize.buckets if config.tokenize.packing == "buckets" else 1
    lengths = padded_lengths(train.row_lengths + validation.row_lengths, shapes, config.tokenize.max_length)
    report = TokenizeReport(
        template=config.tokenize.template,
        system=config.tokenize.system,
        read=kept + left_out + rejected,
        kept=kept,
        left_out=left_out,
        rejected=rejected,
        reasons=dict(sorted(rejects.counts.items())),
        cut=counts["cut"],
        split=counts["split"],
        replaced=dict(replacer.counts),
        numbers_as_text=counts["numbers"],
        sources=tuple(SourceCounts(weight=file.weight, **tally) for file, tally in zip(files, sources, strict=True)),
        train=train.statistics(),
        validation=validation.statistics(),
        validation_is_training=not validation.lengths,
        packing=config.tokenize.packing,
        padded_lengths=lengths,
        real_token_share=sum(train.lengths) / max(1, padded_tokens(train.row_lengths, lengths)),
        bos_id=encoder.bos_id,
        eos_id=encoder.end_ids(template)[0],
    )
    _check_enough(report, config, str(rejects), output / REJECTED_FILE)
    for text, count in replacer.counts.items():
        if not count:
            log.warning("data.replace names %r, which stands in no record", text)
    if rejected:
        log.warning("%d of %d records are left out, listed in %s: %s", rejected, report.read, REJECTED_FILE, rejects)
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


def is_held_out(record: Record, share: float) -> bool:
    """Whether a record is kept for validation: its SHA-256, read as a fraction from 0 to 1, lies below the share."""
    content = canonical_json(record.texts())
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") / 2**64 < share


def make_all(
    config: LlmConfig,
    template: Template,
    encoder: Encoder,
    replacer: Replacer,
    report_progress: Callable[[int, int, str], None],
) -> Iterator[tuple[int, Made | LeftOut | Rejected]]:
    """What becomes of every record, in order, each with the number of its file: of the training files, then of the
    validation files, folders spelled out.
    """
    training = training_files(config.data)
    files = (*training, *validation_files(config.data))
    readers = [RecordReader(file) for file in files]
    total = sum(reader.bytes_total for reader in readers)
    read, told = 0, time.monotonic()
    for source, (file, reader) in enumerate(zip(files, readers, strict=True)):
        for items in _batches(reader, replacer):
            copies = [copies_of(item, file.weight) if isinstance(item, Record) else 0 for item in items]
            records = [item for item, count in zip(items, copies, strict=True) if isinstance(item, Record) and count]
            made = iter(make_rows(records, template, encoder, config.tokenize))
            for item, count in zip(items, copies, strict=True):
                if isinstance(item, Rejected):
                    yield source, item
                elif not count:
                    yield source, LeftOut(item)
                elif isinstance(rows := next(made), Rejected):
                    yield source, rows
                elif source >= len(training) or is_held_out(item, config.data.held_out_share):
                    yield source, Made(item, rows, True, 1)
                else:
                    yield source, Made(item, rows, False, count)
            read += len(items)
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                report_progress(sum(other.bytes_done for other in readers), total, f"{read} records")
    report_progress(total, total, f"{read} records")


def _batches(reader: RecordReader, replacer: Replacer) -> Iterator[list[Record | Rejected]]:
    items = (replacer(item) if isinstance(item, Record) else item for item in reader)
    while batch := list(itertools.islice(items, BATCH_RECORDS)):
        yield batch


def _check_enough(report: TokenizeReport, config: LlmConfig, reasons: str, listed: Path) -> None:
    facts: dict[str, Any] = {"stage": STAGE, "read": report.read, "rejected": report.rejected, "reasons": reasons}
    if not report.train.rows:
        raise InputError("data.nothing_left", held_out=report.validation.rows, **facts)
    if config.data.validation and not report.validation.rows:
        raise InputError("data.nothing_to_validate", **facts)
    if report.rejected > config.data.max_rejected_share * report.read:
        raise InputError("data.too_many_rejected", limit=config.data.max_rejected_share, listed=listed, **facts)
