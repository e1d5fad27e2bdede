"""What is looked at before any stage runs: whether a data file holds records, and in a format that is known.

Never more than the first megabyte is read (of Parquet and Arrow files: their schema and first rows), and nothing heavy
is imported but pyarrow for the files that need it. What follows is read, and reported, by the stage `tokenize`.
"""

import codecs
import io
import json
import re
from contextlib import closing
from itertools import islice
from typing import Any

from schemas.config import DataConfig
from schemas.errors import InputError
from tasks.data.containers import HALF_PAIR, Broken, BrokenFileError, Raw, read_records
from tasks.data.formats import FormatName, choose_format
from tasks.data.readers import FIRST_LINES, first_records, named_errors
from tasks.data.sources import (
    HEAD_BYTES,
    JSON_BLANKS,
    Container,
    DataFile,
    container_of,
    decompress,
    training_files,
    validation_files,
)

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
SHOWN = 40  # characters of a file that an error shows

_JSON = json.JSONDecoder(parse_int=str)  # int refuses numbers of more than 4300 digits
_HANZI = re.compile("[\u4e00-\u9fff]{2}")


def check_data(data: DataConfig) -> None:
    """Refuse data of a configuration that can be seen to be unusable.

    Raises:
        InputError: a file is missing, or see `sniff`.
    """
    for file in (*training_files(data), *validation_files(data)):
        sniff(file)


def sniff(file: DataFile) -> tuple[Container, FormatName]:
    """Container and format of a file; one whose first megabyte holds no record that could be used is refused.

    In an array it is enough that one element is an object, in JSON Lines that one line is. A record of more than a
    megabyte in the first place is refused as well: it is longer than any text that could be trained on.

    Raises:
        InputError: it can't be read (data.unreadable), holds no record (data.no_record, with the reason), or its first
            records have none of the keys that are needed (data.unknown_keys, data.unknown_columns).
    """
    with named_errors(file):
        container = container_of(file)
        with file.open() as raw:
            if container in ("parquet", "arrow"):
                with closing(read_records(container, decompress(raw))) as items:
                    problem, first = None, first_records(items)
            else:
                head = decompress(raw).read(HEAD_BYTES + 1)
                problem = _problem(head, container)
                first = [] if problem else _first_of(head, container)
    values = [value for value, _ in first if isinstance(value, dict)]
    if problem is None and not values:
        reason = next((value.reason for value, _ in first if isinstance(value, Broken)), None)
        problem = f"nothing in it can be used: {reason}." if reason else "it has no rows."
    if problem is not None:
        raise InputError("data.no_record", path=file.path, problem=problem)
    return container, choose_format(file, values)


def _first_of(head: bytes, container: Container) -> list[Raw]:
    """The first records of a text file's first megabyte; what the cut at its end broke is none of them."""
    found: list[Raw] = []
    try:
        for item in islice(read_records(container, io.BytesIO(head)), FIRST_LINES):
            found.append(item)
    except BrokenFileError:
        if not found:
            raise
    return found


def _problem(head: bytes, container: Container) -> str | None:
    """Why a text file's first megabyte holds no record, or None when it may hold one."""
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
    if _is_gbk(head, text):
        return "it is not UTF-8 but GBK or GB 18030; convert it, e.g. iconv -f GB18030 -t UTF-8 FILE > NEW."
    match container:
        case "array":
            return _array_problem(text, is_cut)
        case "lines":
            return _lines_problem(text, start, is_cut)
        case "text" if is_cut and not re.search(r"\n[ \t\r]*\n", start.rstrip().replace("\r\n", "\n")):
            return "no blank line is in it; the records of a text file are separated by blank lines."
    return "it is binary, not text." if "\0" in text else None


def _is_gbk(head: bytes, text: str) -> bool:
    """Whether no line beyond ASCII is UTF-8, and the whole makes sense as Chinese in GB 18030."""
    if text.isascii() or any(not line.isascii() and not HALF_PAIR.search(line) for line in text.split("\n")):
        return False
    try:
        decoded = codecs.getincrementaldecoder("gb18030")().decode(head)
    except UnicodeDecodeError:
        return False
    return _HANZI.search(decoded) is not None


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


def _value(line: str) -> Any:
    """What a line of JSON Lines holds, or None when it is no JSON."""
    try:
        return _JSON.decode(line)
    except (json.JSONDecodeError, RecursionError):
        return None


def _skip_blanks(text: str, position: int) -> int:
    while text[position : position + 1] and text[position] in JSON_BLANKS:
        position += 1
    return position
