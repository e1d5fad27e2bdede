import json
from pathlib import Path

import pytest

from schemas.errors import InputError
from schemas.reports import Rejected
from tasks.data.readers import Record, RecordReader
from tasks.data.sources import DataFile

GOOD = '{"instruction": "a", "input": "", "output": "b"}'


def read(path: Path) -> list[Record | Rejected]:
    return list(RecordReader(DataFile(path, path.name)))


def read_text(folder: Path, content: str | bytes) -> list[Record | Rejected]:
    path = folder / "data.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read(path)


def reasons(items: list[Record | Rejected]) -> list[str | None]:
    return [item.reason if isinstance(item, Rejected) else None for item in items]


def test_blank_lines_are_passed_over_and_a_stray_comma_costs_its_own_line_only(tmp_path: Path) -> None:
    lines = [GOOD, "", GOOD, GOOD + ",", "   \t ", GOOD + "   ", GOOD]  # no newline after the last
    items = read_text(tmp_path, "\n".join(lines))
    assert [item.line for item in items] == [1, 3, 4, 6, 7]
    assert reasons(items) == [None, None, f"not valid JSON (Extra data, column {len(GOOD) + 1})", None, None]
    assert [item.index for item in items if isinstance(item, Record)] == [0, 1, 2, 3]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_are_no_part_of_a_value_and_escapes_are(tmp_path: Path, end: str) -> None:
    line = json.dumps({"instruction": "a\r\nb", "output": "c\r"})
    (first, second) = read_text(tmp_path, line + end + line)
    assert isinstance(second, Record)
    assert (second.instruction, second.output, second.line) == ("a\r\nb", "c\r", 2)
    assert isinstance(first, Record)


def test_characters_that_look_like_line_ends_do_not_end_a_line(tmp_path: Path) -> None:
    (item,) = read_text(tmp_path, '{"instruction": "a\u2028b\x85c\x0bd", "output": "e"}'.replace("\x0b", "\\u000b"))
    assert isinstance(item, Record)
    assert item.instruction == "a\u2028b\x85c\x0bd"


def test_bytes_that_are_not_utf8_cost_their_own_line_only(tmp_path: Path) -> None:
    items = read_text(
        tmp_path,
        GOOD.encode() + b'\n{"instruction": "\xff", "output": "b"}\n{"instruction": "\xe5\xad\n' + GOOD.encode(),
    )
    assert reasons(items) == [None, "bytes that are not UTF-8", "bytes that are not UTF-8", None]
    assert [item.line for item in items] == [1, 2, 3, 4]
    assert [item.record for item in items if isinstance(item, Rejected)] == [None, None]


def test_bytes_that_are_not_utf8_in_an_array_are_named_by_place(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf[\n {"instruction": "\xe5\xad\x97\xff", "output": "b"}]'
    with pytest.raises(InputError, match=r"data\.json is not valid JSON near line 2, column 20: bytes that are not"):
        read_text(tmp_path, content)


def test_a_comma_before_the_closing_bracket_is_named_by_place(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"near line [34], column \d+: .*\.$") as caught:
        read_text(tmp_path, f"[\n  {GOOD},\n  {GOOD},\n]\n")
    assert caught.value.code == "data.not_json"


def test_an_array_nested_too_deeply_is_an_error_and_a_line_is_one_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nested too deeply"):
        read_text(tmp_path, "[" * 100_000)
    items = read_text(tmp_path, GOOD + "\n" + '{"a":' * 100_000 + "\n" + GOOD)
    assert reasons(items) == [None, "not valid JSON (nested too deeply)", None]


@pytest.mark.parametrize("as_array", [True, False])
@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ('{"instruction": "a", "output": null}', "output is null"),
        ('{"instruction": "a", "output": ""}', "output is empty"),
        ('{"instruction": "a", "output": " \\n\\t\\u3000"}', "output is blank"),
        ('{"instruction": "a"}', "output is missing"),
        ('{"instruction": "a", "output": ["b"]}', "output is not text"),
        ('{"instruction": "a", "output": true}', "output is not text"),
        ('{"instruction": "a", "output": NaN}', "output is not text"),
        ('{"instruction": "a", "input": -Infinity, "output": "b"}', "input is not text"),
        ('{"instruction": {"a": 1}, "output": "b"}', "instruction is not text"),
        ('{"instruction": false, "output": "b"}', "instruction is not text"),
        ('{"instruction": "", "input": " ", "output": "b"}', "nothing to ask"),
        ('{"instruction": null, "output": "b"}', "nothing to ask"),
        ('{"output": "b"}', "nothing to ask"),
        ('{"instruction": "a \\ud83d b", "output": "b"}', "half a surrogate pair in instruction"),
        ('{"instruction": "a", "input": "\\udc00", "output": "b"}', "half a surrogate pair in input"),
        ('{"instruction": "a", "output": "\\ude00\\ud83d"}', "half a surrogate pair in output"),
        ('{"instruction": "a", "output": "b", "output": "c"}', "a key stands twice"),
        ('"text"', "not an object"),
        ("3", "not an object"),
        ("null", "not an object"),
    ],
)
def test_a_record_that_cannot_be_used_has_its_reason(tmp_path: Path, record: str, reason: str, as_array: bool) -> None:
    content = f"[{GOOD}, {record}, {GOOD}]" if as_array else f"{GOOD}\n{record}\n{GOOD}"
    first, bad, last = read_text(tmp_path, content)
    assert isinstance(first, Record)
    assert isinstance(bad, Rejected)
    assert (bad.source, bad.record, bad.line, bad.reason) == ("data.json", 1, None if as_array else 2, reason)
    assert isinstance(last, Record)
    assert last.index == 2


@pytest.mark.parametrize("question", ['"input": "", ', '"input": null, ', ""])
def test_a_missing_or_null_input_is_an_empty_one(tmp_path: Path, question: str) -> None:
    (item,) = read_text(tmp_path, f'{{"instruction": "a", {question}"output": "b"}}')
    assert item == Record("data.json", 0, 1, "a", "", "b")


def test_an_input_alone_is_something_to_ask(tmp_path: Path) -> None:
    (item,) = read_text(tmp_path, '[{"instruction": "", "input": "a", "output": "b"}]')
    assert item == Record("data.json", 0, None, "", "a", "b")


@pytest.mark.parametrize("number", ["42", "1.50", "-0", "1e400", "1" * 5000])
def test_a_number_is_kept_as_the_file_writes_it_and_marked(tmp_path: Path, number: str) -> None:
    (item,) = read_text(tmp_path, f'{{"instruction": "a", "output": {number}}}')
    assert isinstance(item, Record)
    assert (item.output, item.has_number) == (number, True)
    assert type(item.output) is str


def test_other_keys_do_no_harm(tmp_path: Path) -> None:
    (item,) = read_text(
        tmp_path,
        '{"id": 12, "history": [{"a": 1, "a": 2}], "n": NaN, "s": "\\ud83d", "instruction": "a", "output": "b"}',
    )
    assert item == Record("data.json", 0, 1, "a", "", "b")


def test_values_come_back_code_point_for_code_point(tmp_path: Path) -> None:
    outputs = ["\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "a\0b", "e\u0301 \xe9", "\ufeffz", " lead\n"]
    for ascii_only in (True, False):
        rows = [{"instruction": "a", "output": output} for output in outputs]
        items = read_text(tmp_path, json.dumps(rows, ensure_ascii=ascii_only))
        assert [item.output for item in items if isinstance(item, Record)] == outputs


def test_joined_files_with_byte_order_marks_lose_no_record(tmp_path: Path) -> None:
    items = read_text(tmp_path, f"\ufeff{GOOD}\n\ufeff{GOOD}\n\ufeff\n")
    assert reasons(items) == [None, None]


def test_lines_are_read_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text((GOOD + "\n") * 10_000, encoding="utf-8")
    reader = RecordReader(DataFile(path, path.name))
    next(iter(reader))
    assert 0 < reader.bytes_done < reader.bytes_total / 10


@pytest.mark.parametrize("content", [f"[{GOOD}, {GOOD}]", f"{GOOD}\n{GOOD}\n"])
def test_the_end_of_a_file_is_the_end_of_its_progress(tmp_path: Path, content: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(content, encoding="utf-8")
    reader = RecordReader(DataFile(path, path.name))
    assert len(list(reader)) == 2
    assert reader.bytes_done == reader.bytes_total == len(content)
