"""Which files a configuration names, and whether they hold records at all: what is looked at before any stage runs.

Owns the rule that tells a JSON array from JSON Lines, which `readers` follows. Only the standard library is imported
here, and never more than the first megabyte of a file is read.
"""

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from schemas.errors import InputError

SUFFIXES = (".json", ".jsonl")
HEAD_BYTES = 1_000_000
JSON_BLANKS = " \t\r\n"
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
SHOWN = 40  # characters of a file that an error shows
_JSON = json.JSONDecoder(parse_int=str)  # int refuses numbers of more than 4300 digits

FileKind = Literal["array", "lines"]


@dataclass(frozen=True)
class DataFile:
    """A data file of the configuration.

    Args:
        path: where it lies.
        name: what reports call it: the file's own name, or its path below the folder that was named.
    """

    path: Path
    name: str


def list_files(paths: Sequence[str]) -> tuple[DataFile, ...]:
    """The data files that some paths stand for, in this order; a folder stands for its sorted .json and .jsonl files.

    Raises:
        InputError: a path does not exist, or a folder holds no such file at any depth.
    """
    found: list[DataFile] = []
    for text in paths:
        path = Path(text)
        if path.is_file():
            found.append(DataFile(path, _readable(path.name)))
        elif path.is_dir():
            inside = [file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()]
            if not inside:
                raise InputError("data.folder_empty", path=path)
            named = sorted((file.relative_to(path).as_posix(), file) for file in inside)
            found += [DataFile(file, _readable(name)) for name, file in named]
        else:
            raise InputError("data.file_missing", path=path)
    return tuple(found)


def file_kind(path: Path) -> FileKind:
    """Whether a file is one JSON array or JSON Lines: by its first character that is no blank, not by its name."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        while block := file.read(4096):
            if start := block.lstrip(JSON_BLANKS):
                return "array" if start[0] == "[" else "lines"
    return "lines"


def sniff(path: Path) -> None:
    """Refuse a file whose first megabyte holds no whole JSON object as a record.

    In an array it is enough that one element is an object, in JSON Lines that one line is; what follows is read, and
    reported, by the stage `tokenize`. A record of more than a megabyte in the first place is refused as well: it is
    longer than any text that could be trained on.

    Raises:
        InputError: data.no_record, with the reason.
    """
    problem = _problem(path)
    if problem is not None:
        raise InputError("data.no_record", path=path, problem=problem)


def _readable(name: str) -> str:
    """A file name for reports: its bytes that are not UTF-8 shown as U+FFFD."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _problem(path: Path) -> str | None:
    """Why a file's first megabyte holds no record, or None when it holds one."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES + 1)
    except OSError as error:
        return f"it can't be read ({error.strerror})."
    is_cut = len(head) > HEAD_BYTES
    head = head[:HEAD_BYTES]
    if head.startswith(UTF16_MARKS):
        return "it is UTF-16, not UTF-8."
    # a character that the cut went through is waited for, and so left out; any other bad byte becomes half a pair
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape")
    text = decoder.decode(head, final=not is_cut)
    start = text.lstrip(JSON_BLANKS)
    if not start:
        return "the first megabyte is blank." if is_cut else "it is empty."
    if start[0] == "[":
        return _array_problem(text, is_cut)
    return _lines_problem(text, start, is_cut)


def _array_problem(text: str, is_cut: bool) -> str | None:
    position = text.index("[") + 1
    elements = 0
    while True:
        position = _skip_blanks(text, position)
        if text[position : position + 1] == "]":
            return f"none of the array's {elements} elements is an object." if elements else "the array is empty."
        try:
            element, position = _JSON.raw_decode(text, position)
        except json.JSONDecodeError as error:
            if is_cut:
                return "no element of the array is an object that is whole within it."
            return f"the array is broken near line {error.lineno}, column {error.colno} ({error.msg})."
        except RecursionError:
            return "the array is nested too deeply."
        if isinstance(element, dict):
            return None
        elements += 1
        position = _skip_blanks(text, position)
        if text[position : position + 1] == ",":
            position += 1


def _lines_problem(text: str, start: str, is_cut: bool) -> str | None:
    lines = [line for line in text.replace("\r", "\n").split("\n") if line.strip()]
    if any(isinstance(_value(line.strip().removeprefix("\ufeff")), dict) for line in lines):
        return None
    if "\0" in text:
        return "it is binary, not text."
    if is_cut and len(lines) == 1:
        return "its first line is longer than that."
    try:
        spread = isinstance(_JSON.raw_decode(start)[0], dict)
    except (json.JSONDecodeError, RecursionError):
        spread = False
    if spread:
        return "an object is spread over several lines; put each on one line, or all into an array."
    return f"no line is a JSON object; it begins with {start.splitlines()[0][:SHOWN]!a}."


def _value(line: str) -> object:
    """What a line of JSON Lines holds, or None when it is no JSON."""
    try:
        return _JSON.decode(line)
    except (json.JSONDecodeError, RecursionError):
        return None


def _skip_blanks(text: str, position: int) -> int:
    while text[position : position + 1] and text[position] in JSON_BLANKS:
        position += 1
    return position
