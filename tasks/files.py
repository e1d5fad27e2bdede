"""Writing files so that a crash leaves the old state or the new one, and digests of what was written."""

import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no blanks, no NaN.

    Raises:
        TypeError: the value holds something that JSON has no form for (a set, a path).
        ValueError: it holds NaN or infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file beside its place, force it to the disk, and rename it into its place.

    Raises:
        OSError: no space, no permission. Nothing is left behind then.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries (names made by rename) to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Force all files below a folder, and the folders themselves, to the disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            handle = os.open(Path(parent) / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        sync_folder(Path(parent))
