"""Records of a data file: every one is either accepted, as turns, or rejected with a reason.

`sources` says which files there are, `containers` makes raw records of their bytes, `formats` makes turns of those;
here the parts meet, and what was read gets the number and line by which a person finds it.
"""

import logging
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import chain

from schemas.errors import InputError
from schemas.reports import Rejected
from tasks.data.containers import Broken, BrokenFileError, Raw, read_records
from tasks.data.formats import BadRecordError, FormatName, choose_format, turns_of
from tasks.data.records import Record
from tasks.data.sources import Container, DataFile, container_of, decompress

log = logging.getLogger("mindtune.data")

FIRST_RECORDS = 100  # that a format is judged by
FIRST_LINES = 1000  # among which they are looked for
PROGRESS_RECORDS = 256  # between looks at the place in the file
TITLES: dict[Container, str] = {
    "array": "JSON array",
    "lines": "JSON Lines",
    "csv": "CSV",
    "tsv": "TSV",
    "text": "plain text",
    "parquet": "Parquet",
    "arrow": "Arrow",
}


class RecordReader:
    """Reads one file; iterating gives a Record or a Rejected for each record, in the order of the file.

    The file is read in blocks: memory does not grow with it. Container and format are said in the log, and known as
    `container` and `format` from the first record on.

    Args:
        file: a file that `first_look.sniff` has let pass.

    Raises:
        InputError: the file is gone or damaged (data.unreadable), or, while iterating, its records are in no known
            format (data.unknown_keys, data.unknown_columns) or a JSON array is broken (data.not_json, with line and
            column); in other containers what is broken is one Rejected instead.
    """

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self.container: Container | None = None
        self.format: FormatName | None = None
        self.bytes_done = 0
        with named_errors(file):
            self.bytes_total, _ = file.stat()

    def __iter__(self) -> Iterator[Record | Rejected]:
        file = self._file
        with named_errors(file):
            self.container = container_of(file)
            with file.open() as raw, closing(read_records(self.container, decompress(raw))) as items:
                first = first_records(items)
                # where no value is an object, every one is rejected whatever the format
                is_judged = any(isinstance(value, dict) for value, _ in first)
                self.format = choose_format(file, [value for value, _ in first]) if is_judged else "text"
                log.info("%s: %s, %s", file.name, TITLES[self.container], self.format)
                for number, item in enumerate(self._judge(chain(first, items), self.format)):
                    if number % PROGRESS_RECORDS == 0 and not raw.closed:  # a decompressor closes it at the end
                        self.bytes_done = raw.tell()
                    yield item
        self.bytes_done = self.bytes_total

    def _judge(self, items: Iterable[Raw], name: FormatName) -> Iterator[Record | Rejected]:
        source, columns, index = self._file.name, self._file.columns, 0
        for value, line in items:
            if isinstance(value, Broken):
                yield Rejected(source=source, record=index if value.is_record else None, line=line, reason=value.reason)
                index += value.is_record
                continue
            try:
                turns, has_number = turns_of(value, name, columns)
            except BadRecordError as error:
                yield Rejected(source=source, record=index, line=line, reason=str(error))
            else:
                yield Record(source, index, line, turns, has_number)
            index += 1


def first_records(items: Iterator[Raw]) -> list[Raw]:
    """The items of a file up to the hundredth object; no more than a thousand once there is one."""
    first: list[Raw] = []
    objects = 0
    for item in items:
        first.append(item)
        objects += isinstance(item[0], dict)
        if objects >= FIRST_RECORDS or (objects and len(first) >= FIRST_LINES):
            break
    return first


@contextmanager
def named_errors(file: DataFile) -> Iterator[None]:
    """Turn what goes wrong in reading a file into an InputError that names it."""
    try:
        yield
    except BrokenFileError as error:
        if error.column is not None:
            raise InputError(
                "data.not_json", path=file.path, line=error.line, column=error.column, problem=f"{error.problem}."
            ) from error
        place = "" if error.line is None else f"line {error.line}: "
        raise InputError("data.unreadable", path=file.path, problem=f"{place}{error.problem}.") from error
    except (OSError, EOFError, zlib.error) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        raise InputError("data.unreadable", path=file.path, problem=f"{problem.rstrip('.')}.") from error
