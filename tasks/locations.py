"""Where a base model or tokenizer lies: from the text in the configuration to a path on this machine.

    FOLDER                 a checkpoint folder
    FILE.gguf              a GGUF file
    pkg:PACKAGE/FILE       a file or folder inside an installed package, by its import name
    hf:OWNER/NAME@REVISION a repository of the Hugging Face hub; without revision `main`
    ms:OWNER/NAME@REVISION one of ModelScope; without revision `master`

A snapshot in a hub's cache is used as it is, without any network: one that was downloaded as `main` stays until it is
deleted there. Only the files that are needed are downloaded, the weights last, so that a snapshot with all its weights
is whole, and a model that its config.json says is not supported is refused before them. Nothing else in the project
knows these forms.
"""

import importlib.util
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from schemas.config import ModelConfig
from schemas.errors import InputError
from tasks.hubs import HUBS, Hub, HubError
from tasks.models.headers import weight_files
from tasks.models.spec import read_spec
from tasks.tokenizer_files import TOKENIZER_CORES, TOKENIZER_FILES

log = logging.getLogger("mindtune.locations")

PACKAGE = "pkg"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MODEL_FILES = ("config.json", "generation_config.json")


def is_path(text: str) -> bool:
    """Whether a location is a path, relative or absolute, rather than one of the forms with a prefix."""
    return text.partition(":")[0] not in (PACKAGE, *HUBS) or ":" not in text


def base_path(model: ModelConfig) -> Path:
    """The folder or GGUF file of the base model.

    Raises:
        InputError: it is on a hub and not downloaded yet, or its package is not installed, or has no such file.
    """
    return _Location("model.base", model.base, model.tokenizer is None, True).path()


def tokenizer_path(model: ModelConfig) -> Path:
    """The folder or GGUF file whose tokenizer the run uses.

    Raises:
        InputError: as `base_path`.
    """
    if model.tokenizer is None:
        return base_path(model)
    return _Location("model.tokenizer", model.tokenizer, True, False).path()


def not_downloaded(model: ModelConfig) -> list[str]:
    """The locations that are on a hub and still have to be downloaded; found without network."""
    return [location.text for location in _locations(model) if location.find() is None]


def download_missing(model: ModelConfig) -> bool:
    """Download what is on a hub and not in its cache; gives whether anything was.

    Raises:
        InputError: there is no network, or the hub's client is not installed; or the repository or its revision is not
            known, asks for terms to be accepted, or lacks files; or, before its weights are downloaded, as
            `spec.read_spec`.
    """
    missing = [location for location in _locations(model) if location.find() is None]
    for location in missing:
        location.download()
    return bool(missing)


def _locations(model: ModelConfig) -> "list[_Location]":
    base = _Location("model.base", model.base, model.tokenizer is None, True)
    return [base] if model.tokenizer is None else [base, _Location("model.tokenizer", model.tokenizer, True, False)]


class _Location:
    """One location and what is wanted of it."""

    def __init__(self, field: str, text: str, tokenizer: bool, weights: bool) -> None:
        self.field, self.text, self.tokenizer, self.weights = field, text, tokenizer, weights
        self.kind, _, rest = ("", "", text) if is_path(text) else text.partition(":")
        self.rest = rest
        if self.kind in HUBS:
            self.hub: Hub = HUBS[self.kind]
            self.name, _, revision = rest.partition("@")
            self.revision = revision or self.hub.revision

    def path(self) -> Path:
        """Where it lies on this machine."""
        found = self.find()
        if found is None:
            raise InputError("model.not_downloaded", field=self.field, location=self.text)
        return found

    def find(self) -> Path | None:
        """Where it lies on this machine; None: it is on a hub, and not, or not whole, in the cache."""
        if not self.kind:
            return Path(self.text)
        if self.kind == PACKAGE:
            return self._in_package()
        folder = self.hub.cached(self.name, self.revision)
        return folder if folder is not None and not self._missing(folder) else None

    def download(self) -> Path:
        """Get the files that are wanted into the hub's cache."""
        log.info("%s: downloading from %s", self.text, self.hub.title)
        try:
            names = self.hub.files(self.name, self.revision)
            small = [name for name in (*MODEL_FILES, INDEX, *TOKENIZER_FILES) if name not in TOKENIZER_CORES]
            folder = self._fetch(small, names)
            if self.weights and folder is not None and "config.json" in names:
                read_spec(folder)  # before gigabytes come of a model that is refused afterwards
            folder = self._fetch(TOKENIZER_CORES, names) or folder
            if self.weights:
                folder = self._fetch(_weights(folder, names), names) or folder
        except HubError as error:
            raise self._refusal(error) from error
        missing = self._missing(folder) if folder else ["all files"]
        if folder is None or missing:
            raise InputError(
                "model.hub_files", location=self.text, missing=", ".join(missing), has=", ".join(sorted(names)[:20])
            )
        return folder

    def _fetch(self, wanted: Iterable[str], names: Sequence[str]) -> Path | None:
        present = [name for name in wanted if name in names]
        return self.hub.fetch(self.name, self.revision, present) if present else None

    def _refusal(self, error: HubError) -> InputError:
        facts = {
            "field": self.field,
            "location": self.text,
            "name": self.name,
            "revision": self.revision,
            "hub": self.hub.title,
            "mirror": self.hub.mirror,
            "problem": error.text,
            "files": _wanted(self.tokenizer, self.weights),
        }
        if error.problem == "unknown":
            return InputError("model.hub_unknown", **facts)
        if error.problem == "revision":
            return InputError("model.hub_revision", **facts)
        if error.problem == "gated":
            return InputError("model.hub_gated", **facts)
        return InputError("model.hub_network", **facts)

    def _missing(self, folder: Path) -> list[str]:
        """What a snapshot lacks of what is wanted."""
        missing = []
        if self.weights and not (folder / "config.json").is_file():
            missing.append("config.json")
        if self.tokenizer and not any((folder / name).is_file() for name in TOKENIZER_CORES):
            missing.append(" or ".join(TOKENIZER_CORES))
        if self.weights:
            try:
                weight_files(folder)
            except InputError:
                missing.append("*.safetensors")
        return missing

    def _in_package(self) -> Path:
        package, _, inner = self.rest.partition("/")
        place = PurePosixPath(inner)
        is_package = package.isidentifier() and package != "__main__"  # the running program has perhaps no place
        if not is_package or not inner or ".." in place.parts or place.is_absolute():
            raise InputError("model.location", field=self.field, location=self.text)
        spec = importlib.util.find_spec(package)
        if spec is None:
            distribution = package.replace("_", "-")
            raise InputError(
                "model.package_missing", field=self.field, location=self.text, package=package, install=distribution
            )
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        # Path.exists raises OSError for a name that is too long
        found = next((folder / inner for folder in folders if os.path.exists(folder / inner)), None)  # noqa: PTH110
        if found is None:
            raise InputError("model.package_file", field=self.field, package=package, inner=inner)
        return found


def _weights(folder: Path | None, names: Sequence[str]) -> list[str]:
    """The files that `weight_files` will choose; of an index that can't be read none, which is told afterwards."""
    if WEIGHTS in names:
        return [WEIGHTS]
    if INDEX in names and folder is not None:
        try:
            return sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []
    return [name for name in names if name.endswith(".safetensors") and "/" not in name]


def _wanted(tokenizer: bool, weights: bool) -> str:
    """The files to place by hand, in words."""
    parts = []
    if weights:
        parts.append(f"config.json, generation_config.json, {WEIGHTS} (or its parts with {INDEX})")
    if tokenizer:
        parts.append(f"the tokenizer files, as far as there are any ({', '.join(TOKENIZER_FILES)})")
    return " and ".join(parts)
