"""Digests of the outside inputs of a run: data files, tokenizer, base model, host.

A digest is of content, never of path or time. Digests of files are remembered by (device, inode, size, times), so that
planning does not read gigabytes of weights again; a file is remembered only once its last change is two seconds old,
since a clock tick can hide a second write.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from schemas.config import LlmConfig
from tasks.data.sources import list_files
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
                "train": [_data_digest(path, digests) for path in config.data.train],
                "validation": [_data_digest(path, digests) for path in config.data.validation],
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


def _data_digest(path: str, digests: FileDigests) -> str | list[list[str]]:
    """A file counts by its content; in a folder the names of the files count as well."""
    files = list_files([path])
    if Path(path).is_dir():
        return [[file.name, digests.of_file(file.path)] for file in files]
    return digests.of_file(files[0].path)


def _folder_digest(folder: Path, names: Sequence[str], digests: FileDigests) -> str:
    present = [name for name in names if (folder / name).is_file()]
    return digest_of([[name, digests.of_file(folder / name)] for name in present])
