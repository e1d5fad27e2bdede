import csv
import gzip
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.reports import Rejected
from tasks.data.readers import RecordReader
from tasks.data.records import Record, Turn, exchange
from tasks.data.sources import DataFile

GOOD = '{"instruction": "a", "input": "", "output": "b"}'


def read(path: Path, **options: Any) -> list[Record | Rejected]:
    return list(RecordReader(DataFile(path, path.name, **options)))


def read_text(folder: Path, content: str | bytes, name: str = "data.json") -> list[Record | Rejected]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read(path)


def reasons(items: list[Record | Rejected]) -> list[str | None]:
    return [item.reason if isinstance(item, Rejected) else None for item in items]


def answers(items: list[Record | Rejected]) -> list[str]:
    return [item.turns[-1].text for item in items if isinstance(item, Record)]


def test_blank_lines_are_passed_over_and_a_stray_comma_costs_its_own_line_only(tmp_path: Path) -> None:
    lines = [GOOD, "", GOOD, GOOD + ",", "   \t ", GOOD + "   ", GOOD]  # no newline after the last
    items = read_text(tmp_path, "\n".join(lines))
    assert [item.line for item in items] == [1, 3, 4, 6, 7]
    assert reasons(items) == [None, None, f"not valid JSON (Extra data, column {len(GOOD) + 1})", None, None]
    assert [item.index for item in items if isinstance(item, Record)] == [0, 1, 2, 3]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_are_no_part_of_a_value_and_escapes_are(tmp_path: Path, end: str) -> None:
    line = json.dumps({"instruction": "a\r\nb", "output": "c\r"})
    assert read_text(tmp_path, line + end + line) == [
        Record("data.json", 0, 1, exchange("a\r\nb", "c\r")),
        Record("data.json", 1, 2, exchange("a\r\nb", "c\r")),
    ]


def test_characters_that_look_like_line_ends_do_not_end_a_line(tmp_path: Path) -> None:
    (item,) = read_text(tmp_path, '{"instruction": "a\u2028b\x85c\x0bd", "output": "e"}'.replace("\x0b", "\\u000b"))
    assert isinstance(item, Record)
    assert item.turns[0].text == "a\u2028b\x85c\x0bd"


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
    with pytest.raises(InputError, match=r"near line 4, column 1: .*\.$") as caught:
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
        ('{"instruction": "a", "output": "b", "history": [{"a": 1}]}', "history is not a list of pairs (pair 1)"),
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
    assert item == Record("data.json", 0, 1, exchange("a", "b"))


def test_an_input_alone_is_something_to_ask(tmp_path: Path) -> None:
    (item,) = read_text(tmp_path, '[{"instruction": "", "input": "a", "output": "b"}]')
    assert item == Record("data.json", 0, None, exchange("", "b", "a"))


@pytest.mark.parametrize("number", ["42", "1.50", "-0", "1e400", "1" * 5000])
def test_a_number_is_kept_as_the_file_writes_it_and_marked(tmp_path: Path, number: str) -> None:
    (item,) = read_text(tmp_path, f'{{"instruction": "a", "output": {number}}}')
    assert isinstance(item, Record)
    assert (item.turns[-1].text, item.has_number) == (number, True)
    assert type(item.turns[-1].text) is str


def test_other_keys_do_no_harm(tmp_path: Path) -> None:
    (item,) = read_text(
        tmp_path,
        '{"id": 12, "other": [{"a": 1, "a": 2}], "n": NaN, "s": "\\ud83d", "instruction": "a", "output": "b"}',
    )
    assert item == Record("data.json", 0, 1, exchange("a", "b"))


def test_values_come_back_code_point_for_code_point(tmp_path: Path) -> None:
    outputs = ["\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "a\0b", "e\u0301 \xe9", "\ufeffz", " lead\n"]
    for ascii_only in (True, False):
        rows = [{"instruction": "a", "output": output} for output in outputs]
        assert answers(read_text(tmp_path, json.dumps(rows, ensure_ascii=ascii_only))) == outputs


def test_joined_files_with_byte_order_marks_lose_no_record(tmp_path: Path) -> None:
    items = read_text(tmp_path, f"\ufeff{GOOD}\n\ufeff{GOOD}\n\ufeff\n")
    assert reasons(items) == [None, None]


def test_places_in_a_table_count_its_broken_rows(tmp_path: Path) -> None:
    items = read_text(tmp_path, 'instruction,output\n"a\nb",c\nd\ne,f,g\n"h"i,j\nk,l\n', "data.csv")
    places = [(item.line, item.record if isinstance(item, Rejected) else item.index) for item in items]
    assert places == [(2, 0), (4, 1), (5, 2), (6, None), (7, 3)]
    assert answers(items) == ["c", "l"]


@pytest.mark.parametrize("as_array", [True, False])
def test_a_file_is_read_while_its_records_are_used(tmp_path: Path, as_array: bool) -> None:
    path = tmp_path / "data.jsonl"
    record = GOOD.replace('"b"', f'"{"b" * 300}"')
    path.write_text(f"[{','.join([record] * 30_000)}]" if as_array else (record + "\n") * 30_000, encoding="utf-8")
    reader = RecordReader(DataFile(path, path.name))
    items = iter(reader)
    next(items)
    assert 0 < reader.bytes_done < reader.bytes_total / 3
    items.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", [f"[{GOOD}, {GOOD}]", f"{GOOD}\n{GOOD}\n"])
def test_the_end_of_a_file_is_the_end_of_its_progress(tmp_path: Path, content: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(content, encoding="utf-8")
    reader = RecordReader(DataFile(path, path.name))
    assert len(list(reader)) == 2
    assert reader.bytes_done == reader.bytes_total == len(content)


def test_container_and_format_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mindtune.data"):
        read_text(tmp_path, "text\na\n", "data.csv")
    assert caplog.messages == ["data.csv: CSV, text"]


def test_the_file_s_own_names_are_used(tmp_path: Path) -> None:
    path = tmp_path / "data.tsv"
    path.write_text("question\tanswer\na\tb\nc\t\n", encoding="utf-8")
    first, second = read(path, columns={"instruction": "question", "output": "answer"})
    assert first == Record("data.tsv", 0, 2, exchange("a", "b"))
    assert isinstance(second, Rejected)
    assert second.reason == "answer is empty"


def test_records_without_known_keys_are_an_error_and_values_that_are_no_objects_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="have no keys of") as caught:
        read_text(tmp_path, '{"a": 1}')
    assert caught.value.code == "data.unknown_keys"
    assert reasons(read_text(tmp_path, "[1, 2]")) == ["not an object"] * 2


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_file_that_can_no_longer_be_read_is_an_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress((GOOD + "\n").encode() * 5000, mtime=0))
    reader = RecordReader(DataFile(path, path.name))
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"data\.jsonl\.gz can't be read: .+\.$") as caught:
        list(reader)
    assert caught.value.code == "data.unreadable"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FILLED = TEXTS.filter(lambda text: bool(text.strip()))
FLAT = st.fixed_dictionaries({"instruction": FILLED, "input": TEXTS, "output": TEXTS})
CONVERSATION = st.builds(
    lambda system, pairs: [
        *({"role": "system", "content": text} for text in system),
        *(
            {"role": role, "content": text}
            for pair in pairs
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ),
    ],
    st.lists(FILLED, max_size=1),
    st.lists(st.tuples(FILLED, FILLED), min_size=1, max_size=3),
)


def as_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_csv(rows: list[Any], delimiter: str) -> bytes:
    sink = io.StringIO(newline="")
    writer = csv.DictWriter(sink, rows[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


def write_all(rows: list[Any], folder: Path) -> list[Path]:
    """The same rows in every container that can hold them."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    lines, table = as_lines(rows), pa.Table.from_pylist(rows)
    contents = {
        "a.json": json.dumps(rows).encode(),
        "b.jsonl": lines,
        "c.jsonl.gz": gzip.compress(lines),
        "d.json.zst": pa.compress(json.dumps(rows, indent=2).encode(), codec="zstd", asbytes=True),
    }
    if "messages" not in rows[0]:
        contents |= {
            "e.csv": as_csv(rows, ","),
            "f.tsv": as_csv(rows, "\t"),
            "g.csv.gz": gzip.compress(as_csv(rows, ",")),
        }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    parquet.write_table(table, folder / "h.parquet", row_group_size=2)
    for name, new in (("i.arrow", ipc.new_file), ("j.arrow", ipc.new_stream)):
        with new(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return sorted(folder.iterdir())


@given(
    rows=st.lists(FLAT, min_size=1, max_size=6)
    | st.lists(CONVERSATION.map(lambda turns: {"messages": turns}), min_size=1, max_size=4)
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_records_come_out_of_every_container(
    rows: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = {}
    for path in write_all(rows, tmp_path_factory.mktemp("files")):
        made[path.name] = [
            (item.index, item.turns) if isinstance(item, Record) else (item.record, item.reason)
            for path_or_uri in (path, path.as_uri())
            for item in RecordReader(DataFile(path_or_uri, path.name))
        ]
    wanted = made["b.jsonl"]
    assert len(wanted) == 2 * len(rows)
    assert wanted[: len(rows)] == wanted[len(rows) :]
    for name, items in made.items():
        assert items == wanted, name
    if "messages" in rows[0]:
        expected = [tuple(Turn(turn["role"], turn["content"]) for turn in row["messages"]) for row in rows]
        assert [turns for _, turns in wanted[: len(rows)]] == expected
    else:
        for row, (_, found) in zip(rows, wanted, strict=False):
            if row["output"].strip():
                assert found == exchange(row["instruction"], row["output"], row["input"])
            else:
                assert found == ("output is blank" if row["output"] else "output is empty")
