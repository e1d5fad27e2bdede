"""Digests of the outside inputs of a run: data files, tokenizer, base model, host.

A digest is of content, never of path or time. Digests of files are remembered by (device, inode, size, times), so that
planning does not read gigabytes of weights again; a file is remembered only once its last change is two seconds old,
since a clock tick can hide a second write.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.config import DataConfig, DataSource, LlmConfig
from tasks.data.readers import named_errors
from tasks.data.sources import DataFile, files_of
from tasks.environment import host_fingerprint
from tasks.files import digest_of, sha256_file, write_atomically
from tasks.locations import MODEL_FILES, base_path, tokenizer_path
from tasks.models.headers import is_gguf, weight_files
from tasks.tokenizer_files import TOKENIZER_FILES

SETTLED_SECONDS = 2.0


class FileDigests:
    """SHA-256 of files, remembered between processes.

    Args:
        memory: JSON file that keeps the digests; it may be deleted at any time.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, str] = {}
        self._changed = False
        try:
            self._known = dict(json.loads(memory.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            self._known = {}  # absent, or torn by a crash: it is a memory, the files are the truth

    def of_file(self, path: Path) -> str:
        """SHA-256 (hex) of a file's content."""
        stat = path.stat()
        identity = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
        if identity not in self._known:
            digest = sha256_file(path)
            if path.stat() != stat or time.time() - stat.st_ctime < SETTLED_SECONDS:
                return digest
            self._known[identity] = digest
            self._changed = True
        return self._known[identity]

    def of_remote(self, file: DataFile) -> str:
        """SHA-256 (hex) of a remote file's content, remembered by URI, size and time."""
        size, time_ns = file.stat()
        identity = f"{file.path}:{size}:{time_ns}"
        if identity not in self._known:
            with named_errors(file), file.open() as raw:
                digest = hashlib.file_digest(raw, "sha256").hexdigest()
            if time_ns is None or file.stat() != (size, time_ns) or time.time() - time_ns / 1e9 < SETTLED_SECONDS:
                return digest
            self._known[identity] = digest
            self._changed = True
        return self._known[identity]

    def save(self) -> None:
        """Write the memory down; a failure only costs time later."""
        if not self._changed:
            return
        try:
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._memory, json.dumps(self._known))
            self._changed = False
        except OSError:
            return


def source_digest(name: str, config: LlmConfig, digests: FileDigests) -> str:
    """Digest of one outside input: `data`, `tokenizer`, `base` or `host`.

    Raises:
        InputError: a file is missing.
    """
    if name == "data":
        return digest_of(
            {
                "train": [_data_digest(source, config.data, digests) for source in config.data.train],
                "validation": [_data_digest(source, config.data, digests) for source in config.data.validation],
            }
        )
    if name == "tokenizer":
        path = tokenizer_path(config.model)
        return digests.of_file(path) if is_gguf(path) else _folder_digest(path, TOKENIZER_FILES, digests)
    if name == "base":
        path = base_path(config.model)
        if is_gguf(path):
            return digests.of_file(path)
        weights = [file.name for file in weight_files(path)]
        return _folder_digest(path, (*MODEL_FILES, *weights), digests)
    if name == "host":
        return digest_of(host_fingerprint())
    raise ValueError(f"unknown source {name}")


def _data_digest(source: str | DataSource, data: DataConfig, digests: FileDigests) -> Any:
    """What a source counts by.

    A file counts by its content, and by its name as far as that decides how it is read; in a folder or glob the names
    count as well, and so do settings that a source has of its own.
    """
    files = files_of(source, data)
    content = [
        [file.name, *_file_digest(file, digests)] if file.listed else _file_digest(file, digests) for file in files
    ]
    if isinstance(source, str):
        return content
    return {"content": content, **source.model_dump(mode="json", exclude={"path"})}


def _file_digest(file: DataFile, digests: FileDigests) -> list[str]:
    digest = digests.of_file(file.path) if isinstance(file.path, Path) else digests.of_remote(file)
    return [digest] if file.read_as is None else [digest, file.read_as]


def _folder_digest(folder: Path, names: Sequence[str], digests: FileDigests) -> str:
    present = [name for name in names if (folder / name).is_file()]
    return digest_of([[name, digests.of_file(folder / name)] for name in present])
