from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from schemas.errors import StoreError
from schemas.tables import TOKENS
from tasks.data import shards
from tasks.data.masks import TokenRow
from tasks.data.shards import ShardWriter, TokenRows

ROWS = [TokenRow(list(range(n)), [-100] * (n - 1) + [n - 1]) for n in (3, 1, 7, 2, 5, 4, 6)]


def write(folder: Path, rows: list[TokenRow] = ROWS, rows_per_shard: int = 10) -> Path:
    with ShardWriter(folder, rows_per_shard) as writer:
        for number, row in enumerate(rows):
            writer.append(row, source=number % 2, record=number)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("rows_per_shard", "count"), [(1, 7), (3, 3), (7, 1), (10, 1)])
@pytest.mark.parametrize("rows_per_batch", [1, 2, 1000])
def test_rows_come_back_in_order_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_shard: int, count: int, rows_per_batch: int
) -> None:
    monkeypatch.setattr(shards, "ROWS_PER_BATCH", rows_per_batch)
    folder = write(tmp_path / "train", rows_per_shard=rows_per_shard)
    assert list(files(folder)) == [f"part-{number:05d}.arrow" for number in range(count)]
    rows = TokenRows(folder)
    assert len(rows) == 7
    assert rows.lengths().tolist() == [3, 1, 7, 2, 5, 4, 6]
    for index, row in enumerate(ROWS):
        found = rows.row(index)
        assert (found.input_ids.tolist(), found.labels.tolist()) == (row.input_ids, row.labels)
        assert found.segment_ids.tolist() == [1] * len(row.input_ids)
        assert found.positions.tolist() == list(range(len(row.input_ids)))
        assert {column.dtype for column in found} == {np.dtype(np.int32)}


def test_a_row_is_a_view_of_the_file(tmp_path: Path) -> None:
    for array in TokenRows(write(tmp_path / "train")).row(2):
        assert not array.flags.owndata
        assert not array.flags.writeable


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    first = files(write(tmp_path / "a", rows_per_shard=3))
    assert first == files(write(tmp_path / "b", rows_per_shard=3))
    assert first != files(write(tmp_path / "c", ROWS[::-1], rows_per_shard=3))


def test_source_and_record_stand_beside_each_row(tmp_path: Path) -> None:
    folder = write(tmp_path / "train")
    table = pa.ipc.open_file(str(folder / "part-00000.arrow")).read_all()
    assert table.schema.equals(TOKENS, check_metadata=True)
    assert table["sources"].to_pylist() == [[0], [1], [0], [1], [0], [1], [0]]
    assert table["records"].to_pylist() == [[number] for number in range(7)]


def packed(folder: Path, length: int = 8, rows_per_shard: int = 2) -> Path:
    with ShardWriter(folder, rows_per_shard, length) as writer:
        for number, row in enumerate(ROWS):
            writer.append(row, source=number % 2, record=number)
    return folder


def test_packed_rows_hold_whole_records_with_segments_positions_and_where_they_came_from(tmp_path: Path) -> None:
    folder = packed(tmp_path / "train")
    table = pa.concat_tables([pa.ipc.open_file(str(path)).read_all() for path in sorted(folder.iterdir())])
    assert [len(ids) for ids in table["input_ids"].to_pylist()] == [8, 8, 8, 4]
    # tokens: 7 and 1, 6 and 2, 5 and 3, 4; in a row the records keep their order
    assert table["records"].to_pylist() == [[1, 2], [3, 6], [0, 4], [5]]
    assert table["sources"].to_pylist() == [[1, 0], [1, 0], [0, 0], [1]]
    for row in table.to_pylist():
        ids, labels, segments, positions = [], [], [], []
        for segment, record in enumerate(row["records"], 1):
            ids += ROWS[record].input_ids
            labels += ROWS[record].labels
            segments += [segment] * len(ROWS[record].input_ids)
            positions += range(len(ROWS[record].input_ids))
        assert (row["input_ids"], row["labels"], row["segment_ids"], row["positions"]) == (
            ids,
            labels,
            segments,
            positions,
        )
    assert TokenRows(folder).segments == len(ROWS)


def test_packed_rows_can_be_read_record_by_record(tmp_path: Path) -> None:
    rows = TokenRows(packed(tmp_path / "train"), by_segment=True)
    assert rows.lengths().tolist() == [1, 7, 2, 6, 3, 5, 4]
    found = [rows.row(index) for index in range(len(rows))]
    for row, record in zip(found, (1, 2, 3, 6, 0, 4, 5), strict=True):
        assert (row.input_ids.tolist(), row.labels.tolist()) == (ROWS[record].input_ids, ROWS[record].labels)


@pytest.mark.parametrize("packed_length", [None, 8])
def test_labels_are_counted_but_those_at_a_segments_start(tmp_path: Path, packed_length: int | None) -> None:
    with ShardWriter(tmp_path / "train", 2, packed_length) as writer:
        for number in range(5):
            writer.append(TokenRow([1, 2, 3, 4], [1, -100, 3, 4][: number + 1] + [-100] * (3 - number)), 0, number)
    by_record = TokenRows(tmp_path / "train", by_segment=True).label_counts().tolist()
    assert by_record == [0, 0, 1, 2, 2]
    rows = TokenRows(tmp_path / "train").label_counts().tolist()
    assert rows == (by_record if packed_length is None else [0, 3, 2])


@pytest.mark.parametrize("tokens_per_batch", [1, 10, 2**20])
def test_how_many_tokens_are_held_changes_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens_per_batch: int
) -> None:
    monkeypatch.setattr(shards, "TOKENS_PER_BATCH", tokens_per_batch)
    rows = TokenRows(packed(tmp_path / "train", rows_per_shard=3))
    assert rows.lengths().tolist() == [8, 8, 8, 4]


def test_a_split_without_rows_is_an_empty_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "validation", [])
    assert files(folder) == {}
    rows = TokenRows(folder)
    assert len(rows) == 0
    assert rows.lengths().shape == (0,)


@pytest.mark.parametrize("index", [-1, 7])
def test_a_row_that_is_not_there_is_an_index_error(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"row {index} of 7"):
        TokenRows(write(tmp_path / "train")).row(index)


def test_a_missing_part_is_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path / "train", rows_per_shard=3)
    (folder / "part-00001.arrow").unlink()
    with pytest.raises(StoreError, match="part 1 is missing"):
        TokenRows(folder)


def test_a_cut_part_is_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path / "train")
    path = folder / "part-00000.arrow"
    for size in (0, 100, path.stat().st_size - 1):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(StoreError, match=r"part-00000\.arrow is damaged"):
            TokenRows(folder)


def test_a_part_with_other_columns_is_refused(tmp_path: Path) -> None:
    table = pa.table({"input_ids": [[1]], "labels": [[1]]})
    with pa.ipc.new_file(str(tmp_path / "part-00000.arrow"), table.schema) as file:
        file.write_table(table)
    with pytest.raises(StoreError, match=r"has the columns \(input_ids: list<item: int64>.*sources: list"):
        TokenRows(tmp_path)


def test_an_error_while_rows_are_written_is_not_hidden(tmp_path: Path) -> None:
    def fail() -> None:
        with ShardWriter(tmp_path / "train", 1) as writer:
            writer.append(ROWS[0], 0, 0)
            raise RuntimeError("while writing")

    with pytest.raises(RuntimeError, match="while writing"):
        fail()
