from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from segments_from import join

from schemas.errors import StoreError
from schemas.tables import TOKENS
from tasks.data import shards
from tasks.data.segments import Segments
from tasks.data.shards import ShardWriter, TokenRows

IDS = [list(range(n)) for n in (3, 1, 7, 2, 5, 4, 6)]
LABELS = [[-100] * (len(ids) - 1) + ids[-1:] for ids in IDS]
SEGMENTS = join(IDS, LABELS, [(number % 2, number) for number in range(7)])


def write(folder: Path, segments: Segments = SEGMENTS, rows_per_shard: int = 10, at_once: int = 7) -> Path:
    with ShardWriter(folder, rows_per_shard) as writer:
        for first in range(0, len(segments), at_once):
            writer.append(segments[first : first + at_once])
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("rows_per_shard", "count"), [(1, 7), (3, 3), (7, 1), (10, 1)])
@pytest.mark.parametrize("at_once", [1, 3, 7])
@pytest.mark.parametrize("window", [1, 2, 1000])
def test_rows_come_back_in_order_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_shard: int, count: int, window: int, at_once: int
) -> None:
    monkeypatch.setattr(shards, "WINDOW_SEGMENTS", window)
    folder = write(tmp_path / "train", rows_per_shard=rows_per_shard, at_once=at_once)
    assert list(files(folder)) == [f"part-{number:05d}.arrow" for number in range(count)]
    rows = TokenRows(folder)
    assert len(rows) == 7
    assert rows.lengths().tolist() == [3, 1, 7, 2, 5, 4, 6]
    for index, (ids, labels) in enumerate(zip(IDS, LABELS, strict=True)):
        found = rows.row(index)
        assert (found.input_ids.tolist(), found.labels.tolist()) == (ids, labels)
        assert found.segment_ids.tolist() == [1] * len(ids)
        assert found.positions.tolist() == list(range(len(ids)))
        assert {column.dtype for column in found} == {np.dtype(np.int32)}


def test_a_row_is_a_view_of_the_file(tmp_path: Path) -> None:
    for array in TokenRows(write(tmp_path / "train")).row(2):
        assert not array.flags.owndata
        assert not array.flags.writeable


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    first = files(write(tmp_path / "a", rows_per_shard=3))
    assert first == files(write(tmp_path / "b", rows_per_shard=3))
    assert first != files(write(tmp_path / "c", SEGMENTS.take(range(7)[::-1]), rows_per_shard=3))


def test_source_and_record_stand_beside_each_row(tmp_path: Path) -> None:
    folder = write(tmp_path / "train")
    table = pa.ipc.open_file(str(folder / "part-00000.arrow")).read_all()
    assert table.schema.equals(TOKENS, check_metadata=True)
    assert table["sources"].to_pylist() == [[0], [1], [0], [1], [0], [1], [0]]
    assert table["records"].to_pylist() == [[number] for number in range(7)]


def packed(folder: Path, length: int = 8, rows_per_shard: int = 2, at_once: int = 3) -> Path:
    with ShardWriter(folder, rows_per_shard, length) as writer:
        for first in range(0, 7, at_once):
            writer.append(SEGMENTS[first : first + at_once])
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
            ids += IDS[record]
            labels += LABELS[record]
            segments += [segment] * len(IDS[record])
            positions += range(len(IDS[record]))
        assert (row["input_ids"], row["labels"], row["segment_ids"], row["positions"]) == (
            ids,
            labels,
            segments,
            positions,
        )
    assert TokenRows(folder).segments == len(IDS)


def test_packed_rows_can_be_read_record_by_record(tmp_path: Path) -> None:
    rows = TokenRows(packed(tmp_path / "train"), by_segment=True)
    assert rows.lengths().tolist() == [1, 7, 2, 6, 3, 5, 4]
    found = [rows.row(index) for index in range(len(rows))]
    for row, record in zip(found, (1, 2, 3, 6, 0, 4, 5), strict=True):
        assert (row.input_ids.tolist(), row.labels.tolist()) == (IDS[record], LABELS[record])


@pytest.mark.parametrize("packed_length", [None, 8])
def test_labels_are_counted_but_those_at_a_segments_start(tmp_path: Path, packed_length: int | None) -> None:
    with ShardWriter(tmp_path / "train", 2, packed_length) as writer:
        for number in range(5):
            labels = [1, -100, 3, 4][: number + 1] + [-100] * (3 - number)
            writer.append(join([[1, 2, 3, 4]], [labels], [(0, number)]))
    by_record = TokenRows(tmp_path / "train", by_segment=True).label_counts().tolist()
    assert by_record == [0, 0, 1, 2, 2]
    rows = TokenRows(tmp_path / "train").label_counts().tolist()
    assert rows == (by_record if packed_length is None else [0, 3, 2])


@pytest.mark.parametrize("window", [1, 10, 2**20])
def test_how_many_tokens_are_held_changes_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(shards, "WINDOW_TOKENS", window)
    rows = TokenRows(write(tmp_path / "train", rows_per_shard=3))
    assert rows.lengths().tolist() == [3, 1, 7, 2, 5, 4, 6]


@pytest.mark.parametrize("packed_length", [None, 30])
def test_the_files_do_not_depend_on_how_many_rows_are_added_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed_length: int | None
) -> None:
    monkeypatch.setattr(shards, "WINDOW_ROWS", 3)
    monkeypatch.setattr(shards, "WINDOW_SEGMENTS", 13)
    lengths = np.random.default_rng(1).integers(1, 31, 200).tolist()
    rows = [list(range(length)) for length in lengths]
    segments = join(rows, rows, [(0, number) for number in range(200)])
    found = []
    for at_once in (1, 7, 200):
        folder = tmp_path / str(at_once)
        with ShardWriter(folder, 20, packed_length) as writer:
            for first in range(0, 200, at_once):
                writer.append(segments[first : first + at_once])
        assert writer.segment_lengths == Counter(lengths)
        assert writer.row_lengths == Counter(TokenRows(folder).lengths().tolist())
        assert (writer.tokens, writer.trained_tokens) == (sum(lengths), sum(lengths))
        found.append(files(folder))
    assert found[0] == found[1] == found[2]
    records = [
        record
        for path in sorted((tmp_path / "1").iterdir())
        for row in pa.ipc.open_file(str(path)).read_all()["records"].to_pylist()
        for record in row
    ]
    assert sorted(records) == list(range(200))
    if packed_length is not None:
        # a window of 3 full rows is packed by itself
        assert max(abs(record - place) for place, record in enumerate(records)) < 3 * 30
        assert len(TokenRows(tmp_path / "1")) < 150  # a window leaves a row or two that are not full


def test_packed_rows_of_real_lengths_are_almost_full(tmp_path: Path) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(4.3, 0.6, 20_000), 8, 512).astype(int).tolist()
    rows = [[0] * length for length in lengths]
    with ShardWriter(tmp_path / "train", 10_000, 512) as writer:
        writer.append(join(rows, rows))
    assert writer.tokens / (writer.row_lengths.total() * 512) > 0.99


def test_a_split_without_rows_is_an_empty_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "validation", SEGMENTS[:0])
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
            writer.append(SEGMENTS[:1])
            raise RuntimeError("while writing")

    with pytest.raises(RuntimeError, match="while writing"):
        fail()
