"""Token shards: Arrow IPC files of the schema TOKENS, written in one pass and read through memory maps.

A split is a folder with `part-00000.arrow`, `part-00001.arrow`, ...; a split without rows is an empty folder. The same
rows give the same bytes.
"""

import itertools
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.errors import StoreError
from schemas.tables import IGNORE_LABEL, TOKENS, check_schema
from tasks.data.packing import Row, place
from tasks.data.segments import LongArray, Segments, concatenate

WINDOW_SEGMENTS = 1000  # segments held in memory before they are written, at most, without packing
WINDOW_TOKENS = 2**20  # and their tokens
WINDOW_ROWS = 256  # with packing: full rows of tokens that are held and packed together


class ShardWriter:
    """Writes the rows of one split; a context manager.

    Segments are held until there is a window of them, which is packed and written: that bounds the memory for any
    input, and leaves one packed row or two a window that are not full. The files are a function of the segments and
    their order alone, however many are added at once.

    Args:
        folder: of the split; made here.
        rows_per_shard: rows in one file.
        packed_length: segments are packed into rows of at most so many tokens; None: each is a row.

    `segment_lengths` and `row_lengths` count what was added and what was written by tokens; `tokens` and
    `trained_tokens` are those of all segments.
    """

    def __init__(self, folder: Path, rows_per_shard: int, packed_length: int | None = None) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._rows_per_shard = rows_per_shard
        self._packed_length = packed_length
        self._window_tokens = WINDOW_TOKENS if packed_length is None else WINDOW_ROWS * packed_length
        self._window_segments = WINDOW_SEGMENTS if packed_length is None else self._window_tokens
        self._held: list[Segments] = []
        self._file: Any = None
        self._rows_in_file = 0
        self._files = 0
        self.segment_lengths: Counter[int] = Counter()
        self.row_lengths: Counter[int] = Counter()
        self.tokens = 0
        self.trained_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        self._close_file()

    def append(self, segments: Segments) -> None:
        """Add the rows of some records; with packing, none longer than a packed row."""
        self.segment_lengths.update(_counted(segments.lengths))
        self.tokens += len(segments.ids)
        self.trained_tokens += int(np.count_nonzero(segments.labels != IGNORE_LABEL))
        self._held.append(segments)
        if (
            sum(map(len, self._held)) >= self._window_segments
            or sum(len(part.ids) for part in self._held) >= self._window_tokens
        ):
            held = concatenate(self._held)
            while end := self._end_of_window(held):
                self._write(held[:end])
                held = held[end:]
            self._held = [held]

    def finish(self) -> None:
        """Write what is still held; nothing may be added after it."""
        if any(map(len, self._held)):
            self._write(concatenate(self._held))
        self._held = []

    def _end_of_window(self, held: Segments) -> int:
        """How many of the segments are a window; 0: there are fewer."""
        end = min(int(np.searchsorted(held.starts, self._window_tokens)), self._window_segments)
        return end if end <= len(held) else 0

    def _write(self, window: Segments) -> None:
        counts = np.ones(len(window), np.int64)  # segments of each row
        if self._packed_length is not None:
            placed = place(window.lengths.tolist(), self._packed_length)
            window = window.take(list(itertools.chain.from_iterable(placed)))
            counts = np.array(list(map(len, placed)))
        edges = np.append(0, np.cumsum(counts))  # of each row, among the segments
        row = 0
        while row < len(counts):
            end = min(row + self._rows_per_shard - self._rows_in_file, len(counts))
            self._write_rows(window[edges[row] : edges[end]], edges[row : end + 1] - edges[row])
            row = end

    def _write_rows(self, segments: Segments, edges: LongArray) -> None:
        if self._file is None:
            self._file = pa.ipc.new_file(str(self._folder / f"part-{self._files:05d}.arrow"), TOKENS)
            self._files += 1
        self._file.write_batch(_record_batch(segments, edges))
        self.row_lengths.update(_counted(np.diff(segments.starts[edges])))
        self._rows_in_file += len(edges) - 1
        if self._rows_in_file == self._rows_per_shard:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._rows_in_file = 0


def _counted(lengths: LongArray) -> dict[int, int]:
    values, counts = np.unique(lengths, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _record_batch(segments: Segments, edges: LongArray) -> pa.RecordBatch:
    """Rows of one segment or more.

    Args:
        segments: of all rows, in order.
        edges: (rows + 1,) first segment of each row, and the number of segments.
    """
    lengths = segments.lengths
    numbers = np.arange(len(segments)) - np.repeat(edges[:-1], np.diff(edges)) + 1  # of each segment in its row
    values = (
        segments.ids,
        segments.labels,
        np.repeat(numbers, lengths),
        np.arange(len(segments.ids)) - np.repeat(segments.starts[:-1], lengths),
        segments.origins[:, 0],
        segments.origins[:, 1],
    )
    arrays: list[pa.Array] = []
    for field, column in zip(TOKENS, values, strict=True):
        ends = segments.starts[edges] if len(arrays) < len(Row._fields) else edges
        items = pa.array(np.ascontiguousarray(column), field.type.value_type)
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
