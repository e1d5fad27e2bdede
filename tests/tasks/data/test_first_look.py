import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.config import DataConfig
from schemas.errors import InputError
from tasks.data import first_look
from tasks.data.first_look import check_data
from tasks.data.sources import HEAD_BYTES, DataFile

RECORD = {"instruction": "a", "input": "", "output": "b"}
LINE = json.dumps(RECORD).encode()
ARRAY = json.dumps([RECORD, RECORD], indent=1).encode()


def write(folder: Path, content: bytes, name: str = "data.json") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def sniff(path: Path, **options: Any) -> tuple[str, str]:
    return first_look.sniff(DataFile(path, path.name, **options))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(ARRAY, id="array"),
        pytest.param(LINE, id="one line"),
        pytest.param(b"\xef\xbb\xbf" + ARRAY.replace(b"\n", b"\r\n"), id="array with BOM and CRLF"),
        pytest.param(b"\xef\xbb\xbf" + LINE + b"\r\n", id="lines with BOM and CRLF"),
        pytest.param(b"\r\n \t\n" + ARRAY, id="array after blank lines"),
        pytest.param(b"\n\n" + LINE + b"\n\n", id="lines after blank lines"),
        pytest.param(b"{broken\n" + LINE, id="a broken line first"),
        pytest.param(b"\xff\n" + LINE, id="a line that is not UTF-8 first"),
        pytest.param(LINE + b"\r" + LINE, id="lines that end with CR"),
        pytest.param(LINE + b"\n\xef\xbb\xbf" + LINE, id="joined files with BOM"),
        pytest.param(b'["text", 1, ' + LINE + b"]", id="array with other things first"),
        pytest.param(b"[" + LINE + b", {broken", id="array that breaks later"),
        pytest.param(b"[" + b"1" * 5000 + b"," + LINE + b"]", id="number of 5000 digits"),
    ],
)
def test_a_file_with_a_record_passes(tmp_path: Path, content: bytes) -> None:
    sniff(write(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param(b"", "it is empty", id="empty"),
        pytest.param(b"\xef\xbb\xbf \r\n\t\n", "it is empty", id="blank"),
        pytest.param(b" " * (HEAD_BYTES + 1), "the first megabyte is blank", id="a blank megabyte"),
        pytest.param(b"\x89PNG\r\n\x1a\n\0\0\0", "it is binary", id="binary"),
        pytest.param("[]".encode("utf-16"), "UTF-16, not UTF-8", id="UTF-16"),
        pytest.param(b"\n<!DOCTYPE html>\n<p>", "begins with '<!DOCTYPE html>'", id="HTML"),
        pytest.param(b'{"instruction": "a", "inp', "no line is a JSON object", id="first line cut"),
        pytest.param(b'[{"instruction": "a",\n "inp', "broken near line 2, column 2", id="first element cut"),
        pytest.param(b"[]", "the array is empty", id="empty array"),
        pytest.param(b'["a", ["b"], 3]', "none of the array's 3 elements is an object", id="array of other things"),
        pytest.param(b"[" * 100_000, "nested too deeply", id="deep array"),
        pytest.param(b'"a"\n1\n', "no line is a JSON object", id="lines of other things"),
        pytest.param(json.dumps(RECORD, indent=1).encode(), "spread over several lines", id="one pretty object"),
        pytest.param(b'{"a": "' + b"x" * HEAD_BYTES, "its first line is longer", id="line of a megabyte"),
        pytest.param(b'[{"a": "' + b"x" * HEAD_BYTES, "whole within it", id="element of a megabyte"),
    ],
)
def test_a_file_without_a_record_is_refused_with_the_reason(tmp_path: Path, content: bytes, problem: str) -> None:
    with pytest.raises(InputError, match=r"data\.json holds no parseable record in its first megabyte") as caught:
        sniff(write(tmp_path, content))
    assert caught.value.code == "data.no_record"
    assert problem in caught.value.message
    assert caught.value.message.endswith(".")


@pytest.mark.parametrize("shift", range(3))
@pytest.mark.parametrize("start", [b"[", b""])
def test_the_end_of_the_first_megabyte_may_cut_a_record_and_a_character(
    tmp_path: Path, start: bytes, shift: int
) -> None:
    filling = b" " * shift + LINE + (b",\n" if start else b"\n")
    text = '{"instruction": "' + "字" * (HEAD_BYTES // 3) + '", "output": "b"}'
    content = start + filling + text.encode() + (b"]" if start else b"")
    assert len(content) > HEAD_BYTES
    sniff(write(tmp_path, content))


def test_no_more_than_the_first_megabyte_decides(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no line is a JSON object"):
        sniff(write(tmp_path, b"x\n" * (HEAD_BYTES // 2) + LINE))


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"data\.json can't be read: Permission denied\."):
        sniff(tmp_path / "data.json")


CHINESE = "instruction,output\n问题,回答\n".encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.csv", CHINESE),
        ("data.csv", b'\xef\xbb\xbfinstruction,output\r\n\r\na,"b\r\nc"\r\n'),
        ("data.csv", b"instruction,output\na,b\n\xff,b\n"),
        ("data.csv", b"instruction,output\n" + b"a,b\n" * (HEAD_BYTES // 4) + b'c,"d'),
        ("data.tsv", b"instruction\toutput\na\tb\n"),
        ("data.txt", b"one\ntwo\n"),
        ("data.txt", b"one\n\n" + b"x" * HEAD_BYTES),
        ("data.txt", LINE),
    ],
)
def test_tables_and_texts_pass(tmp_path: Path, name: str, content: bytes) -> None:
    sniff(write(tmp_path, content, name))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("data.csv", b"", "it is empty"),
        ("data.csv", b"instruction,output\n", "it has no rows"),
        ("data.csv", CHINESE.decode().encode("gb18030"), "it is not UTF-8 but GBK"),
        ("data.jsonl", '{"instruction": "问题", "output": "答"}\n'.encode("gb18030"), "it is not UTF-8 but GBK"),
        ("data.jsonl", b'{"instruction": "\xff"}\n', "nothing in it can be used: bytes that are not UTF-8"),
        ("data.csv", b"instruction,output\na\n", r"can be used: wrong number of columns \(1, the header has 2\)"),
        ("data.csv", CHINESE.decode().encode("utf-16"), "it is UTF-16"),
        ("data.tsv", b"a\tb\n\0\t\n", "it is binary"),
        ("data.txt", b"\xef\xbb\xbf\n \n", "it is empty"),
        ("data.txt", b"line\r\n" * (HEAD_BYTES // 5), "no blank line is in it"),
    ],
)
def test_a_table_or_text_without_a_record_is_refused(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        sniff(write(tmp_path, content, name))
    assert caught.value.code == "data.no_record"


def test_a_file_in_which_only_some_lines_are_not_utf8_passes(tmp_path: Path) -> None:
    line = '{"instruction": "问", "output": "答"}\n'
    sniff(write(tmp_path, line.encode() + line.encode("gb18030")))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.json", b'[{"q": "a"}]'),
        ("data.jsonl", b'{"q": "a"}'),
        ("data.csv", b"q\na\n"),
        ("data.csv", b"instruction;output\na;b\n"),
    ],
)
def test_records_without_the_keys_of_any_format_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(InputError, match="Keys of its first 1 records: '") as caught:
        sniff(write(tmp_path, content, name))
    assert caught.value.code == "data.unknown_keys"


def test_settings_of_the_file_are_looked_at(tmp_path: Path) -> None:
    path = write(tmp_path, b'[{"q": "a", "output": "b"}]')
    assert sniff(path, columns={"instruction": "q"}) == ("array", "alpaca")
    with pytest.raises(InputError, match="names 'ask'"):
        sniff(path, columns={"instruction": "ask"})
    with pytest.raises(InputError, match="have no keys of text"):
        sniff(path, format="text")


def test_a_header_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1: it has more than one column 'a'") as caught:
        sniff(write(tmp_path, b"a,a\n1,2\n", "data.csv"))
    assert caught.value.code == "data.unreadable"


def test_parquet_and_arrow_are_judged_by_their_first_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import ipc, parquet

    def tables(table: Any) -> list[Path]:
        parquet.write_table(table, tmp_path / "a.bin")
        with ipc.new_stream(str(tmp_path / "b.bin"), table.schema) as writer:
            writer.write_table(table)
        return [tmp_path / "a.bin", tmp_path / "b.bin"]

    for path in tables(pa.table({"messages": [[{"role": "user", "content": "a"}]]})):
        sniff(path)
    for path in tables(pa.table({"text": pa.array([], pa.string())})):
        with pytest.raises(InputError, match="it has no rows"):
            sniff(path)
    for path in tables(pa.table({"embedding": [[1.0]]})):
        with pytest.raises(InputError, match="'embedding'"):
            sniff(path)
    with pytest.raises(InputError) as caught:
        sniff(write(tmp_path, b"PAR1 cut", "c.parquet"))
    assert caught.value.code == "data.unreadable"


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    import gzip

    content = gzip.compress(LINE)
    sniff(write(tmp_path, content, "data.jsonl.gz"))
    with pytest.raises(InputError, match="Compressed file ended") as caught:
        sniff(write(tmp_path, content[:-12], "data.jsonl.gz"))
    assert caught.value.code == "data.unreadable"


def test_every_file_of_a_configuration_is_looked_at(tmp_path: Path) -> None:
    good, bad = write(tmp_path, LINE, "good.json"), write(tmp_path, b"", "bad.json")
    check_data(DataConfig(train=(str(good),)))
    with pytest.raises(InputError, match=r"bad\.json"):
        check_data(DataConfig(train=(str(good),), validation=(str(bad),)))


def test_a_look_at_json_imports_nothing_heavy(tmp_path: Path) -> None:
    path = write(tmp_path, ARRAY)
    code = (
        "import sys, pathlib; from tasks.data.first_look import sniff; from tasks.data.sources import DataFile;"
        f"sniff(DataFile(pathlib.Path({str(path)!r}), 'data.json'));"
        "print(sorted({'numpy', 'pyarrow', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
