"""From the bytes of a file to raw records: JSON arrays and Lines, CSV and TSV, Parquet and Arrow, plain text.

Every container is read in blocks, so that memory does not grow with the file. A raw record is a value as JSON has it:
a dict of texts, `Number`, booleans, None, lists and dicts. What holds no usable value is a `Broken` in its place.

    array     one JSON array; whatever breaks it ends the reading with line and column
    lines     one JSON value a line; blank lines are passed over, a broken line costs itself only
    csv, tsv  the first record is the header, every other has as many fields; fields are texts as they stand (`NA`,
              `null`, `007`); in quotes `"`, which are doubled inside, line breaks are part of the field and stay
    parquet, arrow   batches of rows, of Arrow as large as they are in the file; numbers become their shortest text,
                     dates and times are no text
    text      records are the paragraphs, separated by blank lines; the lines of one stay joined by `\\n`

Text is UTF-8, with or without a byte order mark; lines end at LF, CRLF or CR and at nothing else. Bytes that are not
UTF-8 cost their record, in an array the file.
"""

import codecs
import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from decimal import Decimal
from math import isfinite
from typing import Any, NamedTuple

from tasks.data.sources import BLOCK_BYTES, JSON_BLANKS, Container

BATCH_ROWS = 1024
LONGEST = 64 << 20  # characters of one element of an array, or of one CSV field
NOT_UTF8 = "bytes that are not UTF-8"

HALF_PAIR = re.compile("[\ud800-\udfff]")
_CUT = 12  # the longest token of JSON that a block's end can cut and the parser then misjudges: \ud83d\ude00
_BLANKS = re.compile(f"[{JSON_BLANKS}]*")


class Number(str):
    """A number as the file writes it."""

    __slots__ = ()


class NotJson:
    """What JSON has no such values for: NaN, Infinity and -Infinity, which Python's json writes; dates of a table."""


class KeyTwice(dict[str, Any]):
    """An object in which a key stands twice."""


class Broken(NamedTuple):
    """A place of the file that holds no value.

    Args:
        reason: why, with details in round brackets.
        is_record: it counts among the records of the file: where it begins and ends is known.
    """

    reason: str
    is_record: bool


class BrokenFileError(Exception):
    """The rest of a file can't be read.

    Args:
        problem: why, a sentence without its full stop.
        line: where, from 1; None where there are no lines.
        column: where in the line, from 1.
    """

    def __init__(self, problem: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(problem)
        self.problem, self.line, self.column = problem, line, column


Raw = tuple[object, int | None]  # a value or a Broken, and the line where it begins, in containers with lines


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    return result if len(result) == len(pairs) else KeyTwice(result)


_JSON = json.JSONDecoder(
    parse_int=Number, parse_float=Number, parse_constant=lambda _: NotJson(), object_pairs_hook=_object
)


def read_records(container: Container, stream: Any) -> Generator[Raw, None, None]:
    """The raw records of a file.

    Args:
        container: what they stand in.
        stream: an open binary file.

    Raises:
        BrokenFileError: while iterating, see the module.
        OSError, EOFError, zlib.error: while iterating, where it can't be read or is compressed and damaged.
    """
    readers: dict[Container, Callable[[Any], Iterator[Raw]]] = {
        "array": read_array,
        "lines": _read_lines,
        "csv": lambda file: _read_csv(file, ","),
        "tsv": lambda file: _read_csv(file, "\t"),
        "text": _read_text,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
    }
    yield from readers[container](stream)


def read_array(stream: Any, block_bytes: int = BLOCK_BYTES) -> Iterator[Raw]:
    """The elements of a JSON array, which is parsed while it is read; what is wrong is found as `json.loads` does.

    Args:
        stream: an open binary file that begins with `[`, after blanks or a byte order mark.
        block_bytes: bytes to read at once; an element that is longer is read whole.

    Raises:
        BrokenFileError: while iterating, with line and column.
    """
    return _Array(stream, block_bytes).elements()


class _Array:
    """A window of the text of a JSON array that moves along with the parser."""

    def __init__(self, stream: Any, block_bytes: int) -> None:
        self._stream = stream
        self._block_bytes = block_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._line, self._column = 1, 1  # of the first character of the window
        self._ended = self._not_utf8 = False

    def elements(self) -> Iterator[Raw]:
        self._next()
        self._at += 1  # the opening bracket
        if self._next() != "]":
            while True:
                yield self._element(), None
                mark = self._next()
                if mark not in (",", "]"):
                    raise self._error("Expecting ',' delimiter", self._at)
                if mark == "]":
                    break
                self._at += 1
                self._next()
        self._at += 1
        if self._next():
            raise self._error("Extra data", self._at)

    def _element(self) -> object:
        while True:
            try:
                value, end = _JSON.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # an error at the end of the window may only come from the window's end
                near_end = error.pos > len(self._text) - _CUT or error.msg.startswith("Unterminated string")
                if not near_end or not self._more():
                    raise self._error(error.msg, error.pos) from error
            except RecursionError as error:
                raise self._error("nested too deeply", self._at) from error
            else:
                if end <= len(self._text) - _CUT or not self._more():
                    self._at = end
                    return value

    def _next(self) -> str:
        """The next character that is no blank, where the window then stands; empty at the end."""
        while True:
            found = _BLANKS.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _more(self) -> bool:
        """Let go of what is parsed, and add a block, at least as long as what is kept."""
        if self._ended:
            return False
        if self._not_utf8:
            raise self._error(NOT_UTF8, len(self._text))
        kept = len(self._text) - self._at
        if kept > LONGEST:
            raise self._error(f"an element of more than {LONGEST} characters", self._at)
        self._line, self._column = self._place(self._at)
        block = self._stream.read(max(self._block_bytes, kept))
        self._ended = not block
        try:
            text = self._decoder.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            text = error.object[: error.start].decode()
            self._not_utf8, self._ended = True, False
        self._text = self._text[self._at :] + text
        self._at = 0
        return True

    def _place(self, position: int) -> tuple[int, int]:
        """Line and column, from 1, of a place in the window."""
        newlines = self._text.count("\n", 0, position)
        if newlines:
            return self._line + newlines, position - self._text.rindex("\n", 0, position)
        return self._line, self._column + position

    def _error(self, problem: str, position: int) -> BrokenFileError:
        return BrokenFileError(problem, *self._place(position))


@contextmanager
def _lines(stream: Any, newline: str | None = None) -> Iterator[io.TextIOWrapper]:
    """The lines of a stream, which stays open; bytes that are not UTF-8 become unpaired surrogates, and so cost their
    own line only.
    """
    file = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    try:
        yield file
    finally:
        file.detach()


def _read_lines(stream: Any) -> Iterator[Raw]:
    with _lines(stream) as file:
        for number, text in enumerate(file, start=1):
            # a byte order mark inside the file: files that begin with one were joined
            if line := text.strip().removeprefix("\ufeff"):
                yield _parse_line(line), number


def _parse_line(line: str) -> object:
    if _holds_bad_bytes(line):
        return Broken(NOT_UTF8, is_record=False)
    try:
        return _JSON.decode(line)
    except json.JSONDecodeError as error:
        return Broken(f"not valid JSON ({error.msg}, column {error.colno})", is_record=False)
    except RecursionError:
        return Broken("not valid JSON (nested too deeply)", is_record=False)


def _holds_bad_bytes(text: str) -> bool:
    return not text.isascii() and HALF_PAIR.search(text) is not None


def _read_csv(stream: Any, delimiter: str) -> Iterator[Raw]:
    csv.field_size_limit(LONGEST)  # for the process; Python's own limit is 131072 characters
    with _lines(stream, newline="") as file:
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        header: list[str] = []
        while True:
            line = rows.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                if not header:
                    raise BrokenFileError(f"its header is not valid ({error})", line) from error
                ended = f"line {line}" if rows.line_num == line else f"lines {line} to {rows.line_num}"
                yield Broken(f"not valid CSV ({error}, {ended})", is_record=False), line
                continue
            if not row:  # a blank line
                continue
            if not header:
                header = _checked_header(row, line)
            elif _holds_bad_bytes("".join(row)):
                yield Broken(NOT_UTF8, is_record=True), line
            elif len(row) != len(header):
                yield (
                    Broken(f"wrong number of columns ({len(row)}, the header has {len(header)})", is_record=True),
                    line,
                )
            else:
                yield dict(zip(header, row, strict=True)), line


def _checked_header(names: list[str], line: int | None) -> list[str]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BrokenFileError(f"it has more than one column {', '.join(map(repr, twice))}", line)
    return names


def _read_text(stream: Any) -> Iterator[Raw]:
    paragraph: list[str] = []
    start = 0

    def record() -> Raw:
        text = "".join(paragraph).removesuffix("\n")
        paragraph.clear()
        return (Broken(NOT_UTF8, is_record=True) if _holds_bad_bytes(text) else {"text": text}), start

    with _lines(stream) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                if paragraph:
                    yield record()
                continue
            if not paragraph:
                start = number
            paragraph.append(line)
    if paragraph:
        yield record()


def _read_parquet(stream: Any) -> Iterator[Raw]:
    import pyarrow
    from pyarrow import parquet

    _check_plain(stream, "Parquet")
    try:
        # read through a buffer: without it a column of a whole row group is held in memory
        file = parquet.ParquetFile(stream, buffer_size=BLOCK_BYTES, pre_buffer=False)
        _checked_header(file.schema_arrow.names, None)
        for batch in file.iter_batches(BATCH_ROWS):
            yield from _rows(batch)
    except pyarrow.ArrowException as error:
        raise BrokenFileError(_one_line(error)) from error


def _read_arrow(stream: Any) -> Iterator[Raw]:
    import pyarrow
    from pyarrow import ipc

    _check_plain(stream, "Arrow")
    try:
        magic = stream.read(6)
        stream.seek(0)
        reader = ipc.open_file(stream) if magic == b"ARROW1" else ipc.open_stream(stream)
        _checked_header(reader.schema.names, None)
        batches = (
            (reader.get_batch(number) for number in range(reader.num_record_batches)) if magic == b"ARROW1" else reader
        )
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from _rows(batch.slice(start, BATCH_ROWS))
    except pyarrow.ArrowException as error:
        raise BrokenFileError(_one_line(error)) from error


def _check_plain(stream: Any, title: str) -> None:
    if isinstance(stream, gzip.GzipFile) or not stream.seekable():
        raise BrokenFileError(f"it is a compressed {title} file, which can't be read in pieces; unpack it")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _rows(batch: Any) -> Iterator[Raw]:
    """The rows of a record batch as raw records."""
    from pyarrow import types

    # dates and times are neither texts nor numbers, and some of them Python can't hold
    foreign = [field.name for field in batch.schema if types.is_temporal(field.type)]
    looked_at = [field for field in batch.schema if field.name not in foreign and not _is_text(field.type)]
    try:
        rows = batch.drop_columns(foreign).to_pylist()
    except (ValueError, OverflowError, LookupError) as error:
        if batch.num_rows == 1:
            is_text = isinstance(error, UnicodeDecodeError)
            reason = NOT_UTF8 if is_text else f"values that can't be read ({_one_line(error)})"
            yield Broken(reason, is_record=True), None
        else:
            for place in range(batch.num_rows):
                yield from _rows(batch.slice(place, 1))
        return
    for number, row in enumerate(rows):
        for field in looked_at:
            row[field.name] = _as_json(row[field.name], field.type)
        for name in foreign:
            row[name] = NotJson() if batch.column(name)[number].is_valid else None
        yield row, None


def _is_text(kind: Any) -> bool:
    """Whether the values of an Arrow type are texts, or lists and structs of nothing else."""
    from pyarrow import types

    if types.is_struct(kind):
        return all(_is_text(kind.field(place).type) for place in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind))


def _as_json(value: Any, kind: Any) -> object:
    """A value of a table as a raw record has it.

    Args:
        value: as pyarrow gives it.
        kind: its Arrow type.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return Number(_shortest(value, kind)) if isfinite(value) else NotJson()
    if isinstance(value, int | Decimal):
        return Number(value)
    if isinstance(value, list):
        inner = getattr(kind, "value_type", None)
        return [_as_json(each, inner) for each in value]
    if isinstance(value, dict):
        return {name: _as_json(each, kind.field(name).type) for name, each in value.items()}
    return value


def _shortest(value: float, kind: Any) -> str:
    """The fewest digits that give a number of this type again; widened to float64 it would have more."""
    import numpy as np
    from pyarrow import types

    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        kind = kind.value_type
    if types.is_float16(kind):
        return str(np.float16(value))
    return str(np.float32(value) if types.is_float32(kind) else value)
