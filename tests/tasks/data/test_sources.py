import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import InputError
from tasks.data.sources import HEAD_BYTES, file_kind, list_files, sniff

RECORD = {"instruction": "a", "input": "", "output": "b"}
LINE = json.dumps(RECORD).encode()
ARRAY = json.dumps([RECORD, RECORD], indent=1).encode()


def write(folder: Path, content: bytes, name: str = "data.json") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_a_file_is_called_by_its_own_name(tmp_path: Path) -> None:
    path = write(tmp_path, LINE)
    (file,) = list_files([str(path)])
    assert (file.path, file.name) == (path, "data.json")


def test_a_folder_stands_for_its_json_files_at_any_depth_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/1.jsonl", "c.json", "a.JSON", "b/0.json", "notes.txt"):
        write(tmp_path, LINE, name)
    names = [file.name for file in list_files([str(tmp_path)])]
    assert names == ["a.JSON", "b/0.json", "b/1.jsonl", "c.json"]


def test_paths_keep_their_order_and_may_repeat(tmp_path: Path) -> None:
    one, two = write(tmp_path, LINE, "1.json"), write(tmp_path, LINE, "2.json")
    names = [file.name for file in list_files([str(two), str(one), str(two)])]
    assert names == ["2.json", "1.json", "2.json"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.json does not exist"):
        list_files([str(tmp_path / "no.json")])


def test_a_folder_without_data_is_named(tmp_path: Path) -> None:
    write(tmp_path, LINE, "notes.txt")
    with pytest.raises(InputError, match=r"holds no \.json or \.jsonl file"):
        list_files([str(tmp_path)])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such a name")
def test_a_file_name_that_is_not_utf8_can_still_be_reported(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json")).write_bytes(LINE)
    assert list_files([str(tmp_path)])[0].name == "\ufffd.json"


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
    with pytest.raises(InputError, match=r"it can't be read \(Permission denied\)"):
        sniff(tmp_path / "data.json")


@pytest.mark.parametrize(
    ("content", "kind"),
    [(ARRAY, "array"), (b"\xef\xbb\xbf" + b"\n" * 9000 + b"[]", "array"), (LINE, "lines"), (b"\xff[", "lines")],
)
def test_the_kind_is_told_by_content_whatever_the_name(tmp_path: Path, content: bytes, kind: str) -> None:
    assert file_kind(write(tmp_path, content, "x.jsonl")) == kind
    assert file_kind(write(tmp_path, content, "x.json")) == kind


def test_planning_imports_nothing_heavy() -> None:
    code = "import sys, tasks.data.sources; print(sorted({'numpy', 'pyarrow', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
