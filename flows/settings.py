"""From a preset or a file, and `--set`, to a configuration: nothing else decides what a run is made with."""

import difflib
import os
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from schemas.config import DataSource, EnvConfig, LlmConfig
from schemas.errors import ConfigError
from schemas.manifest import StageName
from tasks.locations import is_path
from tasks.stages import STAGES

PRESETS = Path(__file__).parent / "presets"
PROJECT = Path(__file__).parent.parent
NEUTRAL_ENV = set(EnvConfig.model_fields) - set(EnvConfig().key_fields())
PATH_FIELDS = (("model", "base"), ("model", "tokenizer"), ("data", "train"), ("data", "validation"), ("artifacts",))


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML's safe loader, which takes the last of two equal keys without a word, with an error instead."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are all different."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:merge" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


def preset_names() -> list[str]:
    """The names of the presets that come with mindtune."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_config(name: str, overrides: Sequence[str] = ()) -> LlmConfig:
    """The configuration of a preset or a YAML file, with settings changed.

    Args:
        name: preset name or path of a YAML file. Paths in it are relative to it; `${MINDTUNE_DATA}` and other
            environment variables are filled in.
        overrides: `path.to.field=value` texts; the value is YAML, its paths are relative to the working folder.

    Raises:
        ConfigError: no such preset or file, not a YAML mapping, or not a valid configuration.
    """
    path = PRESETS / f"{name}.yaml"
    if name not in preset_names():
        path = Path(name)
        if not path.is_file():
            known = preset_names()
            close = difflib.get_close_matches(name, known, n=1)
            suggestion = f"Did you mean {close[0]}?" if close else "Name one of them, or the path of a YAML file."
            raise ConfigError("config.unknown_preset", name=name, known=", ".join(known), suggestion=suggestion)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)  # a SafeLoader
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError("config.not_yaml", path=path, problem=" ".join(str(error).split())) from error
    if not isinstance(values, dict):
        raise ConfigError(
            "config.not_yaml",
            path=path,
            problem=f"it holds a {type(values).__name__}" if values is not None else "it is empty",
        )
    _resolve_paths(values, path.resolve().parent)
    return validate(merge(values, parse_overrides(overrides)), source=name)


def with_data_files(config: LlmConfig, files: Sequence[str]) -> LlmConfig:
    """A configuration with other data files, all to train on; their paths are relative to the working folder."""
    changed: dict[str, Any] = {"train": list(files), "validation": []}
    values = {"data": changed}
    _resolve_paths(values, Path.cwd())
    return validate(merge(config.model_dump(mode="json"), values), source="with other data files")


def change_config(config: LlmConfig, overrides: Sequence[str]) -> LlmConfig:
    """A configuration with settings changed.

    Raises:
        ConfigError: an override is malformed, or the result is not valid.
    """
    return validate(merge(config.model_dump(mode="json"), parse_overrides(overrides)), source="with --set")


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`path.to.field=value` texts as one nested mapping.

    Raises:
        ConfigError: a text is not of that form.
    """
    values: dict[str, Any] = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        parts = name.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError("config.bad_override", text=text)
        try:
            parsed: Any = yaml.load(value, _UniqueKeys)
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError("config.bad_override", text=text) from error
        for part in reversed(parts):
            parsed = {part: parsed}
        values = merge(values, parsed)
    _resolve_paths(values, Path.cwd())
    return values


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings laid over each other; a value that is no mapping replaces the old one."""
    merged = dict(old)
    for name, value in new.items():
        below = merged.get(name)
        merged[name] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def validate(values: Mapping[str, Any], source: str) -> LlmConfig:
    """A configuration out of plain values.

    Raises:
        ConfigError: with every problem on its own line, by field.
    """
    try:
        return LlmConfig.model_validate(values)
    except ValidationError as error:
        problems = "\n".join(f"  {_problem(item)}" for item in _telling(error.errors(include_url=False)))
        raise ConfigError("config.invalid", source=source, problems=problems) from error


def check_overrides_belong(overrides: Sequence[str], stage: StageName) -> None:
    """Refuse settings of earlier stages when one stage is run again: their artifacts are pinned.

    Raises:
        ConfigError: config.upstream_override.
    """
    order = list(STAGES)
    for section, fields in parse_overrides(overrides).items():
        if section == "env" and isinstance(fields, dict) and set(fields) <= NEUTRAL_ENV:
            continue
        # the base model's folder holds the tokenizer as well, so `model` counts from the stage that reads it first
        owner = next(
            (
                other.name
                for other in STAGES.values()
                if section in (*other.sections, "artifacts") or (section == "model" and "tokenizer" in other.sources)
            ),
            None,
        )
        if owner is not None and (order.index(owner) < order.index(stage) or section == "artifacts"):
            field = f"{section}.{next(iter(fields))}" if isinstance(fields, dict) else section
            raise ConfigError("config.upstream_override", field=field, owner=owner, stage=stage)


def artifact_root(config: LlmConfig | None = None) -> Path:
    """The artifact root: the configuration's, else MINDTUNE_ARTIFACTS, else `artifacts` of the project."""
    chosen = (config.artifacts if config else None) or os.environ.get("MINDTUNE_ARTIFACTS")
    if chosen:
        return Path(chosen).expanduser().resolve()
    project = PROJECT if (PROJECT / "pyproject.toml").is_file() else Path.cwd()
    return project / "artifacts"


def _resolve_paths(values: dict[str, Any], folder: Path) -> None:
    """Make the paths in plain configuration values absolute, in place."""
    for field in PATH_FIELDS:
        parent: Any = values
        for part in field[:-1]:
            parent = parent.get(part) if isinstance(parent, dict) else None
        if not isinstance(parent, dict) or field[-1] not in parent:
            continue
        value = parent[field[-1]]
        if field[0] == "data" and isinstance(value, str | dict):
            value = [value]
        if isinstance(value, str):
            parent[field[-1]] = _absolute(value, folder)
        elif isinstance(value, list):
            parent[field[-1]] = [_with_absolute_path(item, folder) for item in value]


def _with_absolute_path(item: Any, folder: Path) -> Any:
    """An entry of data.train or data.validation: a path, or a mapping with one."""
    if isinstance(item, dict) and isinstance(item.get("path"), str):
        return {**item, "path": _absolute(item["path"], folder)}
    return _absolute(item, folder) if isinstance(item, str) else item


def _absolute(text: str, folder: Path) -> str:
    if not is_path(text):
        return text
    variables = {"MINDTUNE_DATA": str(PROJECT.parent / "shared" / "data"), **os.environ}
    filled = string.Template(text).safe_substitute(variables)
    if "://" in filled or not filled.strip():
        return filled
    return os.path.normpath(folder / Path(filled).expanduser())


def _telling(items: Sequence[Any]) -> list[Any]:
    """The problems without those that pydantic adds to a data source that is not valid: that it is no path either, and
    that too few of the list are left.
    """

    def follows(item: Any) -> bool:
        if item["type"] == "string_type":
            return isinstance(item["input"], dict) and "path" in item["input"]
        below = [other for other in items if other["loc"][: len(item["loc"])] == item["loc"]]
        return item["type"] == "too_short" and len(below) > 1

    return [item for item in items if not follows(item)]


def _problem(item: Any) -> str:
    place = ".".join(str(part) for part in item["loc"] if part != DataSource.__name__) or "(the whole)"
    if item["type"] == "extra_forbidden":
        known = _fields_at(item["loc"][:-1])
        close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.7)
        return f"{place}: unknown setting" + (
            f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
        )
    if item["type"] == "missing":
        return f"{place}: missing"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error" and isinstance(item["input"], dict):
        return f"{place}: {message}"
    return f"{place}: {message} (got {item['input']!r})"


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    model: Any = LlmConfig
    for part in location:
        if part == DataSource.__name__:
            model = DataSource
            continue
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        model = field.annotation if field else None
    return sorted(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
