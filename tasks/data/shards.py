"""Token shards: Arrow IPC files of the schema TOKENS, written in one pass and read through memory maps.

A split is a folder with `part-00000.arrow`, `part-00001.arrow`, ...; a split without rows is an empty folder. The same
rows give the same bytes.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.errors import StoreError
from schemas.tables import IGNORE_LABEL, TOKENS, check_schema
from tasks.data.masks import TokenRow
from tasks.data.packing import Fragment, Packer, Row

ROWS_PER_BATCH = 1000  # rows held in memory before they are written, at most
TOKENS_PER_BATCH = 2**20  # as soon as the rows held have as many tokens, they are written


class ShardWriter:
    """Writes the rows of one split; a context manager.

    Args:
        folder: of the split; made here.
        rows_per_shard: rows in one file.
        packed_length: records are packed into rows of at most so many tokens; None: each record is a row.
    """

    def __init__(self, folder: Path, rows_per_shard: int, packed_length: int | None = None) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._rows_per_shard = rows_per_shard
        self._packer = None if packed_length is None else Packer(packed_length)
        self._waiting: list[Sequence[Fragment]] = []
        self._waiting_tokens = 0
        self._file: Any = None
        self._rows_in_file = 0
        self._files = 0
        self.row_lengths: Counter[int] = Counter()  # rows made so far, by tokens; all of them once the writer is closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        self._close_file()

    def append(self, row: TokenRow, source: int, record: int) -> None:
        """Add a record's row.

        Args:
            row: the row.
            source: index of the data file.
            record: index of the record in it.
        """
        ids, labels = np.asarray(row.input_ids, np.int32), np.asarray(row.labels, np.int32)
        fragment = Fragment(ids, labels, source, record)
        for ready in [[fragment]] if self._packer is None else self._packer.add(fragment):
            self._add(ready)

    def finish(self) -> None:
        """Write what is still held; nothing may be added after it."""
        for ready in [] if self._packer is None else self._packer.flush():
            self._add(ready)
        self._write_waiting()

    def _add(self, fragments: Sequence[Fragment]) -> None:
        self._waiting.append(fragments)
        length = sum(len(fragment) for fragment in fragments)
        self._waiting_tokens += length
        self.row_lengths[length] += 1
        rows_left = self._rows_per_shard - self._rows_in_file
        if len(self._waiting) == min(ROWS_PER_BATCH, rows_left) or self._waiting_tokens >= TOKENS_PER_BATCH:
            self._write_waiting()

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        if self._file is None:
            self._file = pa.ipc.new_file(str(self._folder / f"part-{self._files:05d}.arrow"), TOKENS)
            self._files += 1
        self._file.write_batch(_record_batch(self._waiting))
        self._rows_in_file += len(self._waiting)
        self._waiting, self._waiting_tokens = [], 0
        if self._rows_in_file == self._rows_per_shard:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._rows_in_file = 0


def _record_batch(rows: Sequence[Sequence[Fragment]]) -> pa.RecordBatch:
    fragments = [fragment for row in rows for fragment in row]
    lengths = np.array([len(fragment) for fragment in fragments])
    starts = np.cumsum(lengths) - lengths  # of each fragment, among all tokens
    numbers = np.concatenate([np.arange(1, len(row) + 1) for row in rows])  # of each fragment in its row
    ends_in_fragments = np.cumsum([0, *(len(row) for row in rows)])
    ends_in_tokens = np.append(starts, lengths.sum())[ends_in_fragments]
    values = (
        np.concatenate([fragment.input_ids for fragment in fragments]),
        np.concatenate([fragment.labels for fragment in fragments]),
        np.repeat(numbers, lengths),
        np.arange(lengths.sum()) - np.repeat(starts, lengths),
        [fragment.source for fragment in fragments],
        [fragment.record for fragment in fragments],
    )
    arrays: list[pa.Array] = []
    for field, column in zip(TOKENS, values, strict=True):
        ends = ends_in_tokens if len(arrays) < len(Row._fields) else ends_in_fragments
        items = pa.array(column, field.type.value_type)
        arrays.append(pa.ListArray.from_arrays(pa.array(ends, pa.int32()), items, type=field.type))
    return pa.record_batch(arrays, schema=TOKENS)


class TokenRows:
    """The rows of one split, read where they are needed.

    Args:
        folder: of the split.
        by_segment: a row for each segment, as if nothing had been packed.

    Raises:
        StoreError: a part is missing from the numbering or is no Arrow file (store.damaged), or has other columns
            (store.table_schema).
    """

    def __init__(self, folder: Path, by_segment: bool = False) -> None:
        self._columns: list[Row] = []  # of each record batch, its rows after each other
        self._offsets: list[npt.NDArray[np.int64]] = []  # of each record batch: where its rows begin, and the end
        self._segments = 0
        for number, path in enumerate(sorted(folder.glob("part-*.arrow"))):
            if path.name != f"part-{number:05d}.arrow":
                raise StoreError("store.damaged", path=folder, problem=f"part {number} is missing.")
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(path)))
                check_schema(reader.schema, TOKENS, str(path))
                for index in range(reader.num_record_batches):
                    self._open(reader.get_batch(index), by_segment)
            except pa.ArrowInvalid as error:
                raise StoreError("store.damaged", path=path, problem=f"{error}.") from error
        # row i lies in batch b where ends[b - 1] <= i < ends[b]
        self._ends = np.cumsum([len(offsets) - 1 for offsets in self._offsets], dtype=np.int64)

    def _open(self, batch: pa.RecordBatch, by_segment: bool) -> None:
        columns = Row(*(batch.column(name).values.to_numpy(zero_copy_only=True) for name in Row._fields))
        self._columns.append(columns)
        self._segments += len(batch.column("records").values)
        if by_segment:
            starts = np.flatnonzero(columns.positions == 0)
            self._offsets.append(np.append(starts, len(columns.positions)))
        else:
            self._offsets.append(batch.column("input_ids").offsets.to_numpy())

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._offsets else 0

    @property
    def segments(self) -> int:
        """Records in all rows together."""
        return self._segments

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens in each row: (rows,)."""
        return np.concatenate([np.zeros(0, np.int64), *(np.diff(offsets) for offsets in self._offsets)])

    def label_counts(self) -> npt.NDArray[np.int64]:
        """Labels of each row that a loss counts, those after a segment's first token: (rows,)."""
        parts = [np.zeros(0, np.int64)]
        for columns, offsets in zip(self._columns, self._offsets, strict=True):
            counted = (columns.labels != IGNORE_LABEL) & (columns.positions > 0)
            parts.append(np.diff(np.append(0, np.cumsum(counted))[offsets]))
        return np.concatenate(parts)

    def row(self, index: int) -> Row:
        """One row, as views of the file that can't be written to.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        offsets = self._offsets[number]
        place = index - (int(self._ends[number]) - len(offsets) + 1)
        start, end = offsets[place], offsets[place + 1]
        return Row(*(column[start:end] for column in self._columns[number]))
