"""Which files make up a checkpoint's tokenizer, and how one comes out of a GGUF file."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import InputError
from tasks.models.headers import is_gguf

TOKENIZER_CORES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)


def check_tokenizer(source: Path) -> None:
    """Refuse a folder or GGUF file without a tokenizer, or a GGUF file's tokenizer of a kind that is not known.

    Raises:
        InputError: no vocabulary is there; or as `gguf_tokenizer.write_tokenizer`.
    """
    if is_gguf(source):
        with open_tokenizer(source):
            return
    if not any((source / name).is_file() for name in TOKENIZER_CORES):
        raise InputError("tokenizer.missing", path=source, wanted=", ".join(TOKENIZER_CORES))


def copy_tokenizer(source: Path, target: Path) -> tuple[str, ...]:
    """Copy the tokenizer files that a folder has, or write those of a GGUF file; gives their names.

    Raises:
        InputError: as `gguf_tokenizer.write_tokenizer`.
    """
    if is_gguf(source):
        from tasks.gguf_tokenizer import write_tokenizer

        return write_tokenizer(source, target)
    present = tuple(name for name in TOKENIZER_FILES if (source / name).is_file())
    for name in present:
        shutil.copyfile(source / name, target / name)
    return present


@contextmanager
def open_tokenizer(source: Path) -> Iterator[Path]:
    """The folder of a tokenizer's files; of a GGUF file a temporary one, which goes again at the end.

    Raises:
        InputError: as `gguf_tokenizer.write_tokenizer`.
    """
    if not is_gguf(source):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="mindtune-tokenizer-") as folder:
        copy_tokenizer(source, Path(folder))
        yield Path(folder)
