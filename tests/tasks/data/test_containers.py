import gzip
import io
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.containers import Broken, BrokenFileError, KeyTwice, NotJson, Number, read_array, read_records

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def read(container: Any, content: str | bytes) -> list[Any]:
    return list(read_records(container, io.BytesIO(content.encode() if isinstance(content, str) else content)))


def whole(content: str) -> Any:
    """What json.loads makes of a text: its value with numbers as texts, or its error."""
    try:
        return json.loads(content, parse_int=str, parse_float=str, parse_constant=lambda _: "constant")
    except json.JSONDecodeError as error:
        return error.msg, error.lineno, error.colno


def in_blocks(content: str, block_bytes: int) -> Any:
    try:
        return [plain(value) for value, _ in read_array(io.BytesIO(content.encode()), block_bytes)]
    except BrokenFileError as error:
        return error.problem, error.line, error.column


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return "constant" if isinstance(value, NotJson) else str(value) if isinstance(value, Number) else value


@given(
    values=st.lists(JSON_VALUES, max_size=4),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    block_bytes=st.integers(1, 40),
    data=st.data(),
)
def test_an_array_in_blocks_of_any_size_is_what_json_loads_makes_of_it_or_the_same_error(
    values: list[Any], indent: int | None, ascii_only: bool, block_bytes: int, data: st.DataObject
) -> None:
    content = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    damage = data.draw(st.sampled_from(["none", "cut", "insert", "replace"]))
    place = data.draw(st.integers(1, len(content)))
    inserted = data.draw(st.sampled_from([",", "]", "[", '"', "\\", "\n", "-", "1", "e", "{", "}", ":", "N", "\\u12"]))
    if damage == "cut":
        content = content[:place]
    elif damage != "none":
        content = content[:place] + inserted + content[place + (damage == "replace") :]
    assert in_blocks(content, block_bytes) == whole(content)


@pytest.mark.parametrize("block_bytes", range(1, 30))
@pytest.mark.parametrize(
    "content",
    [
        '[12345, 1.5e+10, -0.25, -Infinity, NaN, "\\ud83d\\ude00", "字", {"a": [true, false, null]}]  \n',
        "[1.]",
        "[-]",
        "[1e]",
        '["\\ud83d\\u12"]',
        '["a\nb"]',
        '[{"a" 1}]',
        "[1,\n2,\n]",
        "[1] 2",
        "[",
        "[]",
        "[ ]",
        "[,]",
        "[tru]",
        '[{"a": 1, }]',
    ],
)
def test_a_block_may_end_anywhere(content: str, block_bytes: int) -> None:
    assert in_blocks(content, block_bytes) == whole(content)


@pytest.mark.parametrize("block_bytes", [1, 7, 1000])
def test_bad_bytes_in_an_array_are_named_by_place(block_bytes: int) -> None:
    with pytest.raises(BrokenFileError, match="bytes that are not UTF-8") as caught:
        list(read_array(io.BytesIO(b'\xef\xbb\xbf[1,\n "\xe5\xad\x97\xff"]'), block_bytes))
    assert (caught.value.line, caught.value.column) == (2, 4)


def test_numbers_keep_their_digits_and_a_key_that_stands_twice_stays_visible() -> None:
    ((value, _),) = read("array", '[{"a": 1.50, "b": NaN, "c": {"d": 1, "d": 2}}]')
    assert (value["a"], type(value["a"])) == ("1.50", Number)
    assert isinstance(value["b"], NotJson)
    assert isinstance(value["c"], KeyTwice)


def endless(start: bytes, record: bytes, megabytes: int) -> Any:
    """A stream of records that never stands in memory as a whole."""

    class Stream(io.RawIOBase):
        left = megabytes << 20
        rest = start

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            while len(self.rest) < len(buffer) and self.left > 0:
                self.rest += record * 1000
                self.left -= len(record) * 1000
            part, self.rest = self.rest[: len(buffer)], self.rest[len(buffer) :]
            buffer[: len(part)] = part
            return len(part)

    return io.BufferedReader(Stream(), 1 << 20)


@pytest.mark.parametrize(
    ("container", "start", "record"),
    [
        ("array", b'[{"a": "b"}', b',\n{"instruction": "' + b"x" * 900 + b'"}'),
        ("lines", b"", b'{"instruction": "' + b"x" * 900 + b'"}\n'),
        ("csv", b"a,b\n", b'1,"' + b"x" * 900 + b'"\n'),
        ("text", b"", b"x" * 900 + b"\n\n"),
    ],
)
def test_memory_does_not_grow_with_the_file(container: Any, start: bytes, record: bytes) -> None:
    peaks = []
    for megabytes in (8, 32):
        tracemalloc.start()
        try:
            count = sum(1 for _ in read_records(container, endless(start, record, megabytes)))
        except BrokenFileError:  # the array has no end
            count = 0
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count > megabytes * 1000 or container == "array"
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < 8 << 20


def test_csv_fields_are_texts_as_they_stand() -> None:
    content = '\ufeffa,b\r\nNA,null\r\n007," x, ""y""\r\nz "\r\n,\r\n\r\n"é",1.50\r\n'
    assert read("csv", content) == [
        ({"a": "NA", "b": "null"}, 2),
        ({"a": "007", "b": ' x, "y"\r\nz '}, 3),
        ({"a": "", "b": ""}, 5),
        ({"a": "é", "b": "1.50"}, 7),
    ]


def test_a_row_of_another_width_or_with_a_wrong_quote_costs_itself_only() -> None:
    content = b'a,b\n1\n1,2,3\n"x"y,2\n\xff,2\n3,4\n"5,6\n7,8'
    assert read("csv", content) == [
        (Broken("wrong number of columns (1, the header has 2)", True), 2),
        (Broken("wrong number of columns (3, the header has 2)", True), 3),
        (Broken("not valid CSV (',' expected after '\"', line 4)", False), 4),
        (Broken("bytes that are not UTF-8", True), 5),
        ({"a": "3", "b": "4"}, 6),
        (Broken("not valid CSV (unexpected end of data, lines 7 to 8)", False), 7),
    ]


def test_a_column_that_stands_twice_is_refused() -> None:
    with pytest.raises(BrokenFileError, match="more than one column 'b'"):
        read("csv", "a,b,b\n1,2,3\n")


def test_tabs_separate_the_fields_of_tsv() -> None:
    assert read("tsv", 'a\tb\n1,2\t"3\t4"\n') == [({"a": "1,2", "b": "3\t4"}, 2)]


def test_blank_lines_separate_the_records_of_a_text() -> None:
    content = "\ufeff\n  one\r\ntwo \r\n \t\r\n\r\nthree\u2028four\n\n\xe4"
    assert read("text", content) == [
        ({"text": "  one\ntwo "}, 2),
        ({"text": "three\u2028four"}, 6),
        ({"text": "\xe4"}, 8),
    ]
    assert read("text", b"a\n\n\xff\nb\n\nc")[1] == (Broken("bytes that are not UTF-8", True), 3)


def arrow_bytes(table: Any, kind: str) -> bytes:
    from pyarrow import ipc, parquet

    sink = io.BytesIO()
    if kind == "parquet":
        parquet.write_table(table, sink)
    else:
        with (ipc.new_file if kind == "file" else ipc.new_stream)(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_values_of_tables_are_those_of_json(kind: str) -> None:
    import pyarrow as pa

    turns = [{"role": "user", "content": "a"}]
    table = pa.table(
        {
            "text": pa.array(["字", None, ""]),
            "number": pa.array([7, None, -1]),
            "float": pa.array([1.5, float("nan"), None]),
            "flag": pa.array([True, None, False]),
            "turns": pa.array([turns, [], None]),
            "word": pa.array(["x", "y", "x"]).dictionary_encode(),
            "nothing": pa.nulls(3),
        }
    )
    first, second, _ = (
        value for value, _ in read("parquet" if kind == "parquet" else "arrow", arrow_bytes(table, kind))
    )
    assert first == {
        "text": "字",
        "number": "7",
        "float": "1.5",
        "flag": True,
        "turns": turns,
        "word": "x",
        "nothing": None,
    }
    assert isinstance(first["number"], Number)
    assert isinstance(second["float"], NotJson)
    assert second["turns"] == []


def test_numbers_of_a_table_have_the_digits_that_their_type_holds() -> None:
    import pyarrow as pa

    single = pa.array([0.1, 5.0], pa.float32())
    columns = {
        "half": single.cast(pa.float16()),
        "single": single,
        "double": pa.array([0.1, 5.0]),
        "word": single.dictionary_encode(),
        "list": pa.array([[0.1], [5.0]], pa.list_(pa.float32())),
        "struct": pa.array([{"a": 0.1}, {"a": 5.0}], pa.struct([("a", pa.float32())])),
    }
    rows = [value for value, _ in read("arrow", arrow_bytes(pa.table(columns), "file"))]
    for row, text in zip(rows, ("0.1", "5.0"), strict=True):
        assert row == dict.fromkeys(("half", "single", "double", "word"), text) | {
            "list": [text],
            "struct": {"a": text},
        }


@pytest.mark.parametrize(
    "kind", ["timestamp us", "timestamp us of no known zone", "date32", "time64 ns", "duration s", "months"]
)
def test_dates_of_a_table_do_no_harm_even_those_that_python_can_not_hold(kind: str) -> None:
    import pyarrow as pa

    column = {
        "timestamp us": lambda: pa.array([2**62, None], pa.timestamp("us")),
        "timestamp us of no known zone": lambda: pa.array([0, None], pa.timestamp("us", tz="No/Where")),
        "date32": lambda: pa.array([5_000_000, None], pa.date32()),
        "time64 ns": lambda: pa.array([1, None], pa.time64("ns")),
        "duration s": lambda: pa.array([2**60, None], pa.duration("s")),
        "months": lambda: pa.array([pa.MonthDayNano([1, 2, 3]), None]),
    }[kind]()
    first, second = (
        value for value, _ in read("arrow", arrow_bytes(pa.table({"text": ["a", "b"], "t": column}), "file"))
    )
    assert (first["text"], second) == ("a", {"text": "b", "t": None})
    assert isinstance(first["t"], NotJson)


def test_a_row_of_a_table_that_python_can_not_hold_costs_itself_only() -> None:
    import pyarrow as pa

    inner = pa.struct([("a", pa.date32())])
    column = pa.array([{"a": 5_000_000}, {"a": None}], inner)
    items = read("arrow", arrow_bytes(pa.table({"text": ["a", "b"], "s": column}), "file"))
    assert items[0] == (Broken("values that can't be read (date value out of range)", True), None)
    assert items[1] == ({"text": "b", "s": {"a": None}}, None)


def test_bytes_of_a_table_that_are_not_utf8_cost_their_row_only() -> None:
    import pyarrow as pa

    texts = pa.array([b"a", b"\xff", b"b"], pa.binary()).view(pa.string())
    items = read("arrow", arrow_bytes(pa.table({"text": texts}), "file"))
    assert items == [({"text": "a"}, None), (Broken("bytes that are not UTF-8", True), None), ({"text": "b"}, None)]


@pytest.mark.parametrize("container", ["parquet", "arrow"])
def test_a_damaged_or_compressed_table_is_an_error(container: Any) -> None:
    import pyarrow as pa

    content = arrow_bytes(pa.table({"text": ["a"]}), "parquet" if container == "parquet" else "file")
    with pytest.raises(BrokenFileError):
        read(container, content[:-9])
    with pytest.raises(BrokenFileError, match="unpack it"):
        list(read_records(container, gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(content)))))
