import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.config import DataConfig, DataSource
from schemas.errors import InputError
from tasks.data.sources import DataFile, container_of, decompress, training_files, validation_files

RECORD = {"instruction": "a", "input": "", "output": "b"}
LINE = json.dumps(RECORD).encode()
ARRAY = json.dumps([RECORD, RECORD], indent=1).encode()


def write(folder: Path, content: bytes, name: str = "data.json") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def files(*sources: Any, **data: Any) -> tuple[DataFile, ...]:
    return training_files(DataConfig(train=sources, **data))


def names(*sources: Any) -> list[str]:
    return [file.name for file in files(*sources)]


def content(file: DataFile) -> bytes:
    with file.open() as raw:
        return bytes(decompress(raw).read())


def test_a_file_is_called_by_its_own_name(tmp_path: Path) -> None:
    path = write(tmp_path, LINE)
    (file,) = files(str(path))
    assert (file.path, file.name, file.listed) == (path, "data.json", False)
    assert file.stat() == (len(LINE), path.stat().st_mtime_ns)


def test_a_folder_stands_for_its_data_files_at_any_depth_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b/1.jsonl", "c.json", "a.JSON", "b/0.csv.gz", "b/2.parquet", "README.txt", "x.py", "y.gz"):
        write(tmp_path, LINE, name)
    found = files(str(tmp_path))
    assert [file.name for file in found] == ["a.JSON", "b/0.csv.gz", "b/1.jsonl", "b/2.parquet", "c.json"]
    assert all(file.listed for file in found)


def test_a_glob_stands_for_what_it_fits_whatever_the_names_end_with(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.txt", "b/d/e.txt", "b/f.json"):
        write(tmp_path, LINE, name)
    assert names(f"{tmp_path}/*.txt") == ["a.txt"]
    assert names(f"{tmp_path}/**/*.txt") == ["a.txt", "b/c.txt", "b/d/e.txt"]
    assert names(f"{tmp_path}/b/[cf].*") == ["c.txt", "f.json"]
    with pytest.raises(InputError) as caught:
        files(f"{tmp_path}/*.csv")
    assert caught.value.code == "data.folder_empty"


def test_a_name_with_brackets_that_is_there_is_no_glob(tmp_path: Path) -> None:
    assert names(str(write(tmp_path, LINE, "data[1].json"))) == ["data[1].json"]


def test_paths_keep_their_order_and_may_repeat(tmp_path: Path) -> None:
    one, two = str(write(tmp_path, LINE, "1.json")), str(write(tmp_path, LINE, "2.json"))
    assert names(two, one, two) == ["2.json", "1.json", "2.json"]


def test_an_entry_may_have_settings_of_its_own(tmp_path: Path) -> None:
    path = str(write(tmp_path, LINE))
    own = DataSource(path=path, weight=2.5, format="text", columns={"text": "output"})
    plain, special = files(path, own, format="alpaca", columns={"output": "b"})
    assert (plain.weight, plain.format, plain.columns) == (1.0, "alpaca", {"output": "b"})
    assert (special.weight, special.format, special.columns) == (2.5, "text", {"text": "output"})
    assert [
        file.format
        for file in validation_files(DataConfig(train=(path,), validation=(own.model_copy(update={"weight": 1}),)))
    ] == ["text"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.json does not exist"):
        files(str(tmp_path / "no.json"))


def test_a_folder_without_data_is_named(tmp_path: Path) -> None:
    write(tmp_path, LINE, "notes.txt")
    with pytest.raises(InputError, match=r"names no data file: nothing there ends with one of \.json") as caught:
        files(str(tmp_path))
    assert caught.value.code == "data.folder_empty"


def test_hidden_files_and_folders_are_passed_over_unless_a_glob_asks_for_them(tmp_path: Path) -> None:
    for name in ("a.json", "._a.json", ".ipynb_checkpoints/a-checkpoint.json", "b/.c/d.json"):
        write(tmp_path, LINE, name)
    for place in (str(tmp_path), tmp_path.as_uri()):
        assert names(place) == names(f"{place}/*.json") == names(f"{place}/**/*.json") == ["a.json"]
        assert names(f"{place}/.*.json") == ["._a.json"]
        assert names(f"{place}/b/.c/*.json") == ["d.json"]
    assert names(str(tmp_path / "._a.json")) == ["._a.json"]


@pytest.mark.parametrize(("path", "problem"), [("a" * 300, "File name too long"), ("a/**b", "Invalid pattern: ")])
def test_a_path_that_no_file_can_have_is_named(tmp_path: Path, path: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        files(str(tmp_path / path))
    assert caught.value.code == "data.unreadable"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such a name")
def test_a_file_name_that_is_not_utf8_can_still_be_reported(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.json")).write_bytes(LINE)
    assert names(str(folder)) == ["\ufffd.json"]
    with pytest.raises(InputError, match="can't decode byte 0xff") as caught:  # pyarrow.fs has no name for it
        files(folder.as_uri())
    assert caught.value.code == "data.uri"


def test_uris_stand_for_files_folders_and_globs(tmp_path: Path) -> None:
    for name in ("a b.jsonl", "c/字.jsonl", "c/d.csv", "e.txt"):
        write(tmp_path, name.encode(), name)
    folder = tmp_path.as_uri()
    (file,) = files(f"{folder}/a%20b.jsonl")
    assert (file.path, file.name, file.listed) == (f"{folder}/a%20b.jsonl", "a b.jsonl", False)
    assert (content(file), file.stat()) == (b"a b.jsonl", (9, (tmp_path / "a b.jsonl").stat().st_mtime_ns))
    found = files(folder)
    assert [file.name for file in found] == ["a b.jsonl", "c/d.csv", "c/字.jsonl"]
    assert [content(file) for file in found] == [file.name.encode() for file in found]
    assert names(f"{folder}/*.txt") == ["e.txt"]
    assert names(f"{folder}/**/*.jsonl") == ["a b.jsonl", "c/字.jsonl"]


@pytest.mark.parametrize(
    ("end", "code"),
    [("/no.json", "data.file_missing"), ("/no/*.json", "data.file_missing"), ("/*.tsv", "data.folder_empty")],
)
def test_a_uri_of_nothing_is_named(tmp_path: Path, end: str, code: str) -> None:
    with pytest.raises(InputError) as caught:
        files(tmp_path.as_uri() + end)
    assert caught.value.code == code


def test_a_uri_that_no_file_system_opens_is_named() -> None:
    with pytest.raises(InputError, match=r"The URI abc://x/y can't be opened: Unrecog") as caught:
        files("abc://x/y")
    assert caught.value.code == "data.uri"


@pytest.mark.parametrize("compression", ["plain", "gzip", "two gzip members", "zstd"])
def test_compressed_bytes_come_back(tmp_path: Path, compression: str) -> None:
    import pyarrow as pa

    text = LINE * 1000
    packed = {
        "plain": text,
        "gzip": gzip.compress(text),
        "two gzip members": gzip.compress(text[:100]) + gzip.compress(text[100:]),
        "zstd": pa.compress(text, codec="zstd", asbytes=True),
    }[compression]
    path = write(tmp_path, packed)
    assert content(DataFile(path, path.name)) == text
    assert content(DataFile(path.as_uri(), path.name)) == text


@pytest.mark.parametrize(
    ("name", "start", "container"),
    [
        ("x.jsonl", ARRAY, "array"),
        ("x.json", LINE, "lines"),
        ("x.json", b"\xef\xbb\xbf" + b"\n" * 9000 + b"[]", "array"),
        ("x", b"\xff[", "lines"),
        ("x.csv", b"[a],b", "csv"),
        ("x.TSV", b"a", "tsv"),
        ("x.txt", b"a", "text"),
        ("x.txt", b"[Verse 1]\n{", "text"),
        ("x.txt", b"{a}\n", "text"),
        ("x.txt", LINE + b"\n" + LINE, "lines"),
        ("x.txt", ARRAY, "array"),
        ("x.csv", b"PAR1....", "parquet"),
        ("x.json", b"ARROW1\0\0", "arrow"),
        ("x.json", b"\xff\xff\xff\xff....", "arrow"),
        ("x.json", b"", "lines"),
    ],
)
@pytest.mark.parametrize("is_compressed", [False, True])
def test_the_container_is_told_by_content_and_else_by_name(
    tmp_path: Path, name: str, start: bytes, container: str, is_compressed: bool
) -> None:
    path = write(tmp_path, gzip.compress(start) if is_compressed else start, name + ".gz" * is_compressed)
    assert container_of(DataFile(path, path.name)) == container
