"""What becomes of records: read in batches, and made into rows a batch at a time, here or in another process.

A batch is a function of the files alone, and what becomes of it depends on nothing else; so the rows do not depend on
who makes them.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from schemas.config import DataConfig, LlmConfig
from schemas.reports import Rejected
from tasks.data.chat_template import open_template
from tasks.data.encoding import Encoder
from tasks.data.masks import RecordRows, make_rows
from tasks.data.mixing import copies_of
from tasks.data.readers import RecordReader
from tasks.data.records import Record
from tasks.data.replacing import Replacer
from tasks.data.segments import Segments
from tasks.data.sources import training_files, validation_files
from tasks.files import canonical_json

BATCH_RECORDS = 256  # records that are encoded together


@dataclass(frozen=True)
class Batch:
    """Some neighbouring records of one file.

    Args:
        source: number of the file: the training files, then the validation files, folders spelled out.
        weight: of the file.
        is_validation: whether it is a validation file.
        items: what was read, texts replaced.
        bytes_done, bytes_total: of all files, read up to here.
    """

    source: int
    weight: float
    is_validation: bool
    items: Sequence[Record | Rejected]
    bytes_done: int
    bytes_total: int


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


@dataclass(frozen=True)
class MadeBatch:
    """What has become of a batch.

    Args:
        batch: where it stood; without its items.
        read: how many they were.
        train: rows of the training split, copies included.
        validation: rows of the records that are held out.
        rejected: what can't be used.
        counts: records by fate (train, held_out, left_out, rejected), copies of training records (seen), and of the
            records used those with numbers for texts (numbers), shortened (cut) or in several rows (split).
    """

    batch: Batch
    read: int
    train: Segments
    validation: Segments
    rejected: tuple[Rejected, ...]
    counts: Counter[str]


def read_batches(data: DataConfig, replacer: Replacer) -> Iterator[Batch]:
    """All records in the order of the files."""
    training = training_files(data)
    files = (*training, *validation_files(data))
    readers = [RecordReader(file) for file in files]
    total = sum(reader.bytes_total for reader in readers)
    for source, (file, reader) in enumerate(zip(files, readers, strict=True)):
        items = (replacer(item) if isinstance(item, Record) else item for item in reader)
        while batch := list(itertools.islice(items, BATCH_RECORDS)):
            done = sum(other.bytes_done for other in readers)
            yield Batch(source, file.weight, source >= len(training), batch, done, total)


class Maker:
    """Makes rows of batches; pickled with its tokenizer.

    Args:
        config: template, lengths, share held out.
        encoder: the tokenizer.

    Raises:
        ConfigError: the template has no place for tokenize.system.
        InputError: the tokenizer has no chat template, or one that can't be used.
    """

    def __init__(self, config: LlmConfig, encoder: Encoder) -> None:
        self._config, self._encoder = config, encoder
        self.template = open_template(config.tokenize.template, encoder, config.tokenize.system)

    def __reduce__(self) -> tuple[type["Maker"], tuple[LlmConfig, Encoder]]:
        return Maker, (self._config, self._encoder)  # a compiled chat template can't be pickled

    def each(self, batch: Batch) -> tuple[list[Made | LeftOut | Rejected], Segments]:
        """What becomes of every record, in order; and the rows of those made, each once.

        Raises:
            StageError: a row would be trained wrongly (data.mask_broken).
        """
        copies = [copies_of(item, batch.weight) if isinstance(item, Record) else 0 for item in batch.items]
        records = [item for item, count in zip(batch.items, copies, strict=True) if isinstance(item, Record) and count]
        rows_or_not, segments = make_rows(records, self.template, self._encoder, self._config.tokenize)
        made = iter(rows_or_not)
        share = self._config.data.held_out_share
        found: list[Made | LeftOut | Rejected] = []
        for item, count in zip(batch.items, copies, strict=True):
            if isinstance(item, Rejected):
                found.append(item)
            elif not count:
                found.append(LeftOut(item))
            elif isinstance(rows := next(made), Rejected):
                found.append(rows)
            elif batch.is_validation or is_held_out(item, share):
                found.append(Made(item, rows, True, 1))
            else:
                found.append(Made(item, rows, False, count))
        return found, segments

    def __call__(self, batch: Batch) -> MadeBatch:
        """What becomes of a batch, its rows in flat arrays.

        Raises:
            StageError: a row would be trained wrongly (data.mask_broken).
        """
        found, segments = self.each(batch)
        kept = [item for item in found if isinstance(item, Made)]
        rejected = tuple(item for item in found if isinstance(item, Rejected))
        train = [item for item in kept if not item.is_held_out]
        counts = Counter(
            rejected=len(rejected),
            left_out=len(found) - len(kept) - len(rejected),
            held_out=len(kept) - len(train),
            train=len(train),
            seen=sum(item.copies for item in train),
            numbers=sum(item.record.has_number for item in kept),
            cut=sum(item.made.is_cut for item in kept),
            split=sum(item.made.is_split for item in kept),
        )
        origins = [(batch.source, item.record.index) for item in kept for _ in item.made.rows]
        segments = replace(segments, origins=np.array(origins, np.int64).reshape(-1, 2))
        order: dict[bool, list[int]] = {True: [], False: []}  # of the rows held out, and of the others
        first = 0
        for item in kept:
            order[item.is_held_out] += [*range(first, first + len(item.made.rows))] * item.copies
            first += len(item.made.rows)
        return MadeBatch(
            replace(batch, items=()),
            len(found),
            segments.take(order[False]),
            segments.take(order[True]),
            rejected,
            counts,
        )


def is_held_out(record: Record, share: float) -> bool:
    """Whether a record is kept for validation: its SHA-256, read as a fraction from 0 to 1, lies below the share."""
    if not share:
        return False
    content = canonical_json(record.texts())
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") / 2**64 < share
