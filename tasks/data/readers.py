"""Alpaca records from JSON arrays and JSON Lines: every record is either accepted or rejected with a reason.

Nothing is repaired in silence. Values stay as the file has them, code point for code point: not trimmed, not
normalised; `\\r\\n` inside a JSON string is an escape of the author's and stays, a carriage return that ends a line of
the file is no part of any value. Whether a file is an array or JSON Lines is told by its content (`sources`).

A field is read by these rules:

- a missing or null instruction or input is an empty one; an output must be there and must hold more than blanks;
- a number stands for its own text, with the digits of the file (`1.50` stays `1.50`), and is counted;
- true, false, lists, objects and Python's NaN and Infinity are not text;
- an unpaired surrogate (from an escape such as `\\ud83d` alone) has no UTF-8 form and rejects the record;
- a key that stands twice in a record rejects it, since readers differ in which one they take;
- other keys do no harm.

A reason is one of a small number of texts, sometimes with details in round brackets after it.
"""

import codecs
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from schemas.errors import InputError
from schemas.reports import Rejected
from tasks.data.sources import DataFile, file_kind

FIELDS = ("instruction", "input", "output")

_HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Record:
    """One accepted record.

    Args:
        source: name of its file.
        index: its place among the records of the file, from 0; broken lines, which hold none, are not counted.
        line: its line in a JSON Lines file, from 1, blank ones counted; None in an array.
        instruction: what is asked; may be empty when input is not.
        input: what it is asked about; may be empty.
        output: the answer, never blank.
        has_number: a field was a number in the file and is its text here.
    """

    source: str
    index: int
    line: int | None
    instruction: str
    input: str
    output: str
    has_number: bool = False


class _Number(str):
    """A JSON number as the file writes it."""

    __slots__ = ()


class _NotJson:
    """NaN, Infinity or -Infinity, which Python's json writes although JSON has no such values."""


class _KeyTwice(dict[str, Any]):
    """An object in which a key stands twice."""


class _BadRecordError(Exception):
    """Why a record can't be used."""


class RecordReader:
    """Reads one file; iterating gives a Record or a Rejected for each record, in the order of the file.

    JSON Lines are read line by line and take little memory whatever the size; an array is read whole.

    Args:
        file: a file that `sources.sniff` has let pass.

    Raises:
        InputError: while iterating, when an array is not valid JSON (data.not_json, with line and column); in JSON
            Lines a broken line is one Rejected instead.
    """

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self.bytes_done = 0
        self.bytes_total = file.path.stat().st_size

    def __iter__(self) -> Iterator[Record | Rejected]:
        kind = file_kind(self._file.path)
        return self._read_array() if kind == "array" else self._read_lines()

    def _read_array(self) -> Iterator[Record | Rejected]:
        data = self._file.path.read_bytes().removeprefix(codecs.BOM_UTF8)
        try:
            values = _JSON.decode(data.decode())
        except UnicodeDecodeError as error:
            before = data[: error.start].decode()
            place = json.JSONDecodeError("bytes that are not UTF-8", before, len(before))
            raise self._not_json(place) from error
        except json.JSONDecodeError as error:
            raise self._not_json(error) from error
        except RecursionError as error:
            raise self._not_json(json.JSONDecodeError("nested too deeply", "", 0)) from error
        for index, value in enumerate(values):
            self.bytes_done = self.bytes_total * (index + 1) // len(values)
            yield self._judge(value, index, None)

    def _not_json(self, error: json.JSONDecodeError) -> InputError:
        return InputError(
            "data.not_json", path=self._file.path, line=error.lineno, column=error.colno, problem=f"{error.msg}."
        )

    def _read_lines(self) -> Iterator[Record | Rejected]:
        index = 0
        # Universal newlines end a line at LF, CRLF and CR, and at nothing else: JSON has no other line end, and may
        # hold U+2028 in a string. Bad bytes become unpaired surrogates, so that they cost their own line only.
        with self._file.path.open("rb") as raw:
            file = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape")
            for number, text in enumerate(file, start=1):
                self.bytes_done = raw.tell()
                # a byte order mark inside the file: files that begin with one were joined
                line = text.strip().removeprefix("\ufeff")
                if not line:
                    continue
                try:
                    value = _parse_line(line)
                except _BadRecordError as error:
                    yield Rejected(source=self._file.name, line=number, reason=str(error))
                    continue
                yield self._judge(value, index, number)
                index += 1

    def _judge(self, value: object, index: int, line: int | None) -> Record | Rejected:
        try:
            texts, has_number = _fields(value)
        except _BadRecordError as error:
            return Rejected(source=self._file.name, record=index, line=line, reason=str(error))
        return Record(self._file.name, index, line, *texts, has_number=has_number)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    return result if len(result) == len(pairs) else _KeyTwice(result)


_JSON = json.JSONDecoder(
    parse_int=_Number, parse_float=_Number, parse_constant=lambda _: _NotJson(), object_pairs_hook=_object
)


def _parse_line(line: str) -> Any:
    if _HALF_PAIR.search(line):
        raise _BadRecordError("bytes that are not UTF-8")
    try:
        return _JSON.decode(line)
    except json.JSONDecodeError as error:
        raise _BadRecordError(f"not valid JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise _BadRecordError("not valid JSON (nested too deeply)") from error


def _fields(value: object) -> tuple[tuple[str, str, str], bool]:
    """Instruction, input and output of a parsed record, and whether one of them was a number.

    Raises:
        _BadRecordError: the record can't be used; its text is the reason.
    """
    if not isinstance(value, dict):
        raise _BadRecordError("not an object")
    if isinstance(value, _KeyTwice):
        raise _BadRecordError("a key stands twice")
    if "output" not in value:
        raise _BadRecordError("output is missing")
    if value["output"] is None:
        raise _BadRecordError("output is null")
    instruction, question, output = (_text(value.get(name), name) for name in FIELDS)
    if not output:
        raise _BadRecordError("output is empty")
    if not output.strip():
        raise _BadRecordError("output is blank")
    if not instruction.strip() and not question.strip():
        raise _BadRecordError("nothing to ask")
    return (instruction, question, output), any(isinstance(value.get(name), _Number) for name in FIELDS)


def _text(value: object, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _BadRecordError(f"{name} is not text")
    if _HALF_PAIR.search(value):
        raise _BadRecordError(f"half a surrogate pair in {name}")
    return str(value)
