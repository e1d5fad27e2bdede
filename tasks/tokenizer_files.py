"""Which files of a checkpoint folder make up its tokenizer."""

import shutil
from pathlib import Path

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


def copy_tokenizer(source: Path, target: Path) -> tuple[str, ...]:
    """Copy the tokenizer files that a folder has; gives their names."""
    present = tuple(name for name in TOKENIZER_FILES if (source / name).is_file())
    for name in present:
        shutil.copyfile(source / name, target / name)
    return present
