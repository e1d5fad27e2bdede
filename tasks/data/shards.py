"""Token shards: Arrow IPC files of the schema TOKENS, written in one pass and read through memory maps.

A split is a folder with `part-00000.arrow`, `part-00001.arrow`, ...; a split without rows is an empty folder. The same
rows give the same bytes.
"""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.errors import StoreError
from schemas.tables import TOKENS, check_schema
from tasks.data.masks import TokenRow

IntArray = npt.NDArray[np.int32]

ROWS_PER_BATCH = 1000  # rows held in memory before they are written


class ShardWriter:
    """Writes the rows of one split; a context manager.

    Args:
        folder: of the split; made here.
        rows_per_shard: rows in one file.
    """

    def __init__(self, folder: Path, rows_per_shard: int) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._rows_per_shard = rows_per_shard
        self._waiting: list[tuple[TokenRow, int, int]] = []
        self._file: Any = None
        self._rows_in_file = 0
        self._files = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._write_waiting()
        self._close_file()

    def append(self, row: TokenRow, source: int, record: int) -> None:
        """Add a row.

        Args:
            row: the row.
            source: index of the data file.
            record: index of the record in it.
        """
        self._waiting.append((row, source, record))
        if len(self._waiting) == min(ROWS_PER_BATCH, self._rows_per_shard - self._rows_in_file):
            self._write_waiting()

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        if self._file is None:
            self._file = pa.ipc.new_file(str(self._folder / f"part-{self._files:05d}.arrow"), TOKENS)
            self._files += 1
        rows, sources, records = zip(*self._waiting, strict=True)
        columns = ([row.input_ids for row in rows], [row.labels for row in rows], sources, records)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, TOKENS, strict=True)]
        self._file.write_batch(pa.record_batch(arrays, schema=TOKENS))
        self._rows_in_file += len(rows)
        self._waiting = []
        if self._rows_in_file == self._rows_per_shard:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._rows_in_file = 0


class TokenRows:
    """The rows of one split, read where they are needed.

    Args:
        folder: of the split.

    Raises:
        StoreError: a part is missing from the numbering or is no Arrow file (store.damaged), or has other columns
            (store.table_schema).
    """

    def __init__(self, folder: Path) -> None:
        self._batches: list[pa.RecordBatch] = []
        for number, path in enumerate(sorted(folder.glob("part-*.arrow"))):
            if path.name != f"part-{number:05d}.arrow":
                raise StoreError("store.damaged", path=folder, problem=f"part {number} is missing.")
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(path)))
                check_schema(reader.schema, TOKENS, str(path))
                self._batches += [reader.get_batch(i) for i in range(reader.num_record_batches)]
            except pa.ArrowInvalid as error:
                raise StoreError("store.damaged", path=path, problem=f"{error}.") from error
        # row i lies in batch b where ends[b - 1] <= i < ends[b]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._batches else 0

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens in each row: (rows,)."""
        parts = [np.diff(batch.column(0).offsets.to_numpy()) for batch in self._batches]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def row(self, index: int) -> tuple[IntArray, IntArray]:
        """Token ids and labels of one row: (T,) and (T,), int32, views of the file that can't be written to.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        batch = self._batches[number]
        place = index - (int(self._ends[number]) - batch.num_rows)
        return _item(batch.column(0), place), _item(batch.column(1), place)


def _item(column: Any, place: int) -> IntArray:
    start, end = column.offsets[place].as_py(), column.offsets[place + 1].as_py()
    values: IntArray = column.values.slice(start, end - start).to_numpy(zero_copy_only=True)
    return values
