"""Which files a configuration names, how their bytes are opened, and what tells their container.

A path of the configuration is a file, a folder, a glob (`*`, `?`, `[...]`, `**` for folders at any depth) or a URI of
one of these that `pyarrow.fs` opens (`s3://bucket/data/*.jsonl`, `hdfs://`, `file://`). A folder stands for its data
files at any depth, in the order of their paths; `.txt` files in it are passed over, since folders hold a README.txt or
a LICENSE.txt more often than texts to train on: name them, or a glob of them. Hidden files and folders (`._a.json`,
`.ipynb_checkpoints/`) are passed over as well, by globs too unless a part of the glob begins with a full stop.

The container is told by what stands in the file where that is sure, else by the name (`train.csv`, `train.csv.gz`):

    parquet, arrow   begins with their magic bytes (Arrow IPC files and streams)
    array, lines     the first character that is no blank is `[`, or something else: JSON array, JSON Lines
    csv, tsv         the name ends so
    text             the name ends with .txt, and the first line is neither a JSON object nor the start of an array
    gzip, zstd       begins with their magic bytes; what is inside is judged by the same rules

Only the standard library is imported here, pyarrow where a file needs it.
"""

import codecs
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import quote, unquote

from schemas.config import DataConfig, DataSource, RecordFormat
from schemas.errors import InputError

Container = Literal["array", "lines", "csv", "tsv", "text", "parquet", "arrow"]

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")  # of the files of a folder
COMPRESSED = (".gz", ".zst")
HEAD_BYTES = 1_000_000
BLOCK_BYTES = 1 << 20
JSON_BLANKS = " \t\r\n"

_BY_NAME: Mapping[str, Container] = {".csv": "csv", ".tsv": "tsv", ".txt": "text"}
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_PARQUET = b"PAR1"
_ARROW = (b"ARROW1\0\0", b"\xff\xff\xff\xff")  # IPC file; IPC stream
_ARRAY_OF_OBJECTS = re.compile(r"\[\s*\{")


@dataclass(frozen=True)
class DataFile:
    """A data file of the configuration.

    Args:
        path: where it lies; a text is a URI.
        name: what reports call it: the file's own name, or its path below the folder or glob that was named.
        format: what its records look like.
        columns: names that it uses instead of a format's own.
        weight: how often each of its records is seen in an epoch, see `readers.copies_of`.
        listed: a folder or a glob was named, not the file itself.
    """

    path: Path | str
    name: str
    format: RecordFormat = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    listed: bool = False

    def open(self) -> Any:
        """Its bytes as they lie: a binary file that can `read`, `seek` and `tell`.

        Raises:
            InputError: data.uri.
            OSError: it can't be opened.
        """
        if isinstance(self.path, Path):
            return self.path.open("rb")
        system, inside = _file_system(self.path)
        return io.BufferedReader(system.open_input_file(inside), BLOCK_BYTES)  # few requests over the network

    def stat(self) -> tuple[int, int | None]:
        """Its size in bytes and the time of its last change in ns; None where the file system keeps none."""
        if isinstance(self.path, Path):
            found = self.path.stat()
            return found.st_size, found.st_mtime_ns
        system, inside = _file_system(self.path)
        info = system.get_file_info(inside)
        return info.size or 0, info.mtime_ns

    @property
    def read_as(self) -> Container | None:
        """The container that its name alone decides, None where its content does."""
        return _BY_NAME.get(PurePosixPath(self.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix)


def training_files(data: DataConfig) -> tuple[DataFile, ...]:
    """The files to train on, folders and globs spelled out.

    Raises:
        InputError: a path does not exist or can't be looked at, or a folder or glob holds no data file.
    """
    return tuple(file for source in data.train for file in files_of(source, data))


def validation_files(data: DataConfig) -> tuple[DataFile, ...]:
    """The files that are held out whole; raises like `training_files`."""
    return tuple(file for source in data.validation for file in files_of(source, data))


def files_of(source: str | DataSource, data: DataConfig) -> tuple[DataFile, ...]:
    """The files of one entry of the configuration; raises like `training_files`."""
    if isinstance(source, str):
        source = DataSource(path=source)
    record_format = data.format if source.format is None else source.format
    columns = data.columns if source.columns is None else source.columns
    own = {str(field): column for field, column in columns.items()}
    listed, found = _remote(source.path) if "://" in source.path else _local(source.path)
    return tuple(
        DataFile(path, _readable(name), record_format, own, source.weight, listed=listed) for path, name in found
    )


def _local(text: str) -> tuple[bool, list[tuple[Path | str, str]]]:
    """Whether a path stands for a folder or glob, and its files with their names."""
    path = Path(text)
    try:
        if path.is_file():
            return False, [(path, path.name)]
        if path.is_dir():
            return True, list(_named(path, path.rglob("*"), text))
        base, pattern = _split_glob(text)
        if pattern:
            return True, list(_named(Path(base), Path(base).glob(pattern), text, pattern))
    except InputError:
        raise
    except (OSError, ValueError) as error:  # a name that is too long; `**` beside other characters
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError("data.unreadable", path=text, problem=f"{problem}.") from error
    raise InputError("data.file_missing", path=text)


def _named(base: Path, files: Iterable[Path], text: str, pattern: str = "") -> Iterator[tuple[Path | str, str]]:
    found = ((file.relative_to(base).as_posix(), file) for file in files)
    chosen = sorted((name, file) for name, file in found if _is_wanted(name, pattern) and file.is_file())
    if not chosen:
        raise InputError("data.folder_empty", path=text, suffixes=" ".join(SUFFIXES))
    for name, file in chosen:
        yield file, name


def _is_wanted(name: str, pattern: str) -> bool:
    """Whether a file of a folder is taken; one that a pattern names is, whatever its suffix."""
    asks_for_hidden = any(part.startswith(".") for part in pattern.split("/"))
    is_hidden = any(part.startswith(".") for part in name.split("/"))
    return (asks_for_hidden or not is_hidden) and (bool(pattern) or _is_data_name(name))


def _remote(uri: str) -> tuple[bool, list[tuple[Path | str, str]]]:
    """The same for a URI; in it `?` begins the options of the file system and is no wildcard."""
    from pyarrow import fs

    location, mark, options = uri.partition("?")
    base, pattern = _split_glob(location, "*[")
    system, inside = _file_system(base + mark + options)
    try:
        info = system.get_file_info(inside)
        if info.type == fs.FileType.File and not pattern:
            return False, [(uri, PurePosixPath(inside).name)]
        if info.type != fs.FileType.Directory:
            raise InputError("data.file_missing", path=uri)
        infos = system.get_file_info(fs.FileSelector(inside, recursive=True))
        names = sorted(
            str(PurePosixPath(each.path).relative_to(inside)) for each in infos if each.type == fs.FileType.File
        )
    except (OSError, UnicodeDecodeError) as error:  # a file name that is not UTF-8
        raise InputError("data.uri", uri=uri, problem=_one_line(error)) from error
    wanted = PurePosixPath(pattern).parts
    names = [
        name
        for name in names
        if _is_wanted(name, pattern) and (not pattern or _matches(PurePosixPath(name).parts, wanted))
    ]
    if not names:
        raise InputError("data.folder_empty", path=uri, suffixes=" ".join(SUFFIXES))
    return True, [(f"{base.rstrip('/')}/{quote(name)}{mark}{options}", name) for name in names]


def _file_system(uri: str) -> tuple[Any, str]:
    """The pyarrow file system of a URI, and the path inside it."""
    import pyarrow

    location, mark, options = uri.partition("?")
    folder, _, name = location.rstrip("/").rpartition("/")
    try:
        if folder.endswith(":/"):  # nothing above it
            return _resolve(uri)
        system, inside = _resolve(folder + mark + options)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError("data.uri", uri=uri, problem=_one_line(error)) from error
    return system, f"{inside.rstrip('/')}/{unquote(name)}"


@cache
def _resolve(uri: str) -> tuple[Any, str]:
    # once for each folder: for S3 it asks the network for the region of the bucket
    from pyarrow import fs

    system, inside = fs.FileSystem.from_uri(uri)
    return system, str(inside)


def _one_line(error: Exception) -> str:
    return f"{' '.join(str(error).split()).rstrip('.')}."


def _split_glob(text: str, wildcards: str = "*?[") -> tuple[str, str]:
    """A path as the folder before its first wildcard, and the pattern below it; the pattern is empty without one."""
    parts = text.split("/")
    for place, part in enumerate(parts):
        if any(wildcard in part for wildcard in wildcards):
            return "/".join(parts[:place]) or ("/" if text.startswith("/") else "."), "/".join(parts[place:])
    return text, ""


def _matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a path matches a pattern, part by part; `**` stands for any number of folders."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return _matches(parts, wanted[1:]) or (bool(parts) and _matches(parts[1:], wanted))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])


def _is_data_name(name: str) -> bool:
    path = PurePosixPath(name.lower())
    return (PurePosixPath(path.stem) if path.suffix in COMPRESSED else path).suffix in SUFFIXES


def _readable(name: str) -> str:
    """A file name for reports: its bytes that are not UTF-8 shown as U+FFFD."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def decompress(raw: Any) -> Any:
    """The bytes of an opened file, out of gzip or zstd where its first bytes say so; the file is read from its start.

    Raises:
        OSError, EOFError, zlib.error: on reading, where the compressed data is damaged.
    """
    magic = raw.read(len(_ZSTD))
    raw.seek(0)
    if magic.startswith(_GZIP):
        return gzip.GzipFile(fileobj=raw)
    if magic == _ZSTD:
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), BLOCK_BYTES)
    return raw


def container_of(file: DataFile) -> Container:
    """What a file's records stand in.

    Raises:
        OSError, EOFError, zlib.error: it can't be read.
    """
    with file.open() as raw, decompress(raw) as stream:
        decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape")
        start = ""
        block = stream.read(HEAD_BYTES if file.read_as == "text" else 4096)
        if block.startswith(_PARQUET):
            return "parquet"
        if block.startswith(_ARROW):
            return "arrow"
        if file.read_as in ("csv", "tsv"):
            return file.read_as
        while block and not start:
            start = decoder.decode(block).lstrip(JSON_BLANKS)
            block = stream.read(4096)
    if file.read_as == "text":
        is_json = _ARRAY_OF_OBJECTS.match(start) or _begins_with_object(start)
        if not is_json:
            return "text"
    return "array" if start.startswith("[") else "lines"


def _begins_with_object(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        json.JSONDecoder(parse_int=str).decode(text.splitlines()[0])
    except (json.JSONDecodeError, RecursionError):
        return False
    return True
