"""The reference of all settings, read from the schema of the configuration; `docs/configuration.md` is made by it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from schemas.config import LlmConfig

HEAD = """\
# Configuration

Made by `mindtune config --markdown` from `schemas/config.py`; a test says when this page is out of date.

A configuration is a YAML file (or a preset, which is one, in `flows/presets`). A setting is named by its path:
`train.lora.rank` is `rank` below `lora` below `train`; so `--set train.lora.rank=16` changes it on the command line.
Unknown settings, values out of range and contradictions are refused before anything runs. Paths are relative to the
file, those of `--set` to the working folder; `~` and `${VARIABLE}` are filled in.

*Key* says whether a setting is part of the artifact key of the stage that uses it, so that another value makes that
stage, and those after it, again. A setting that can't change a result is not; of files it is the content that counts.
"""
_BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}


@dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        path: its name in the configuration, for example `train.lora.rank`.
        kind: what values it takes, with bounds.
        default: as YAML writes it; None: it has to be given.
        in_key: whether its value is part of an artifact key.
        meaning: its description.
    """

    path: str
    kind: str
    default: str | None
    in_key: bool
    meaning: str


@dataclass(frozen=True)
class Group:
    """The settings of one section, for example `train.lora`.

    Args:
        path: its name; empty: the top.
        meaning: first line of the section's docstring.
        settings: in the order of the schema.
    """

    path: str
    meaning: str
    settings: tuple[Setting, ...]


def groups() -> list[Group]:
    """All settings of a job, by section, those of the top first."""
    schema = LlmConfig.model_json_schema()
    return list(_groups(schema, "", schema["$defs"]))


def as_markdown() -> str:
    """The page `docs/configuration.md`."""
    parts = [HEAD]
    for group in groups():
        lines = [f"## `{group.path}`" if group.path else "## Top", "", group.meaning, ""]
        lines += ["| setting | values | default | key | meaning |", "|---|---|---|---|---|"]
        for setting in group.settings:
            default = "*required*" if setting.default is None else f"`{setting.default}`"
            name = setting.path.rpartition(".")[2]
            key = "yes" if setting.in_key else "no"
            meaning = re.sub(r"[|*<]", r"\\\g<0>", setting.meaning)
            lines.append(f"| `{name}` | {setting.kind} | {default} | {key} | {meaning} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts).rstrip("\n")


def as_table() -> Table:
    """All settings for a terminal."""
    table = Table()
    for column in ("setting", "values", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for group in groups():
        for setting in group.settings:
            default = "required" if setting.default is None else setting.default
            table.add_row(*(escape(cell) for cell in (setting.path, setting.kind, default, setting.meaning)))
    return table


def as_document() -> dict[str, Any]:
    """All settings for machines."""
    return {"settings": [vars(setting) for group in groups() for setting in group.settings]}


def _groups(schema: dict[str, Any], path: str, definitions: dict[str, Any]) -> Iterator[Group]:
    settings, below = [], []
    for name, field in schema["properties"].items():
        place = f"{path}.{name}" if path else name
        section = _section(field, definitions)
        if section is not None:
            below.append((section, place))
            continue
        below += [(definitions[inner], f"{place}[]") for inner in _sections_inside(field, definitions)]
        settings.append(
            Setting(
                path=place,
                kind=_kind(field, definitions),
                default=None if name in schema.get("required", []) else _as_yaml(field.get("default")),
                in_key=field.get("changes_result", True),
                meaning=field.get("description", ""),
            )
        )
    if settings:
        yield Group(path, schema.get("description", "").partition("\n")[0], tuple(settings))
    for section, place in below:
        yield from _groups(section, place, definitions)


def _section(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any] | None:
    """The section that a field stands for, or None when it is a setting."""
    found = definitions.get(_reference(field))
    return found if found is not None and "properties" in found else None


def _sections_inside(field: dict[str, Any], definitions: dict[str, Any]) -> list[str]:
    """The sections that may stand in a list or beside other kinds of value."""
    inner = [field["items"]] if "items" in field else []
    found = []
    for part in (*field.get("anyOf", ()), *inner):
        if _section(part, definitions) is not None:
            found.append(_reference(part))
        else:
            found += _sections_inside(part, definitions)
    return found


def _reference(field: dict[str, Any]) -> str:
    return str(field.get("$ref", "")).rpartition("/")[2]


def _kind(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """The values that a setting takes, for people."""
    if "anyOf" in field:
        return " or ".join(_kind(part, definitions) for part in field["anyOf"])
    if (name := _reference(field)) in definitions:
        return "a mapping" if "properties" in definitions[name] else _kind(definitions[name], definitions)
    if "enum" in field or "const" in field:
        return ", ".join(f"`{_as_yaml(value)}`" for value in field.get("enum", [field.get("const")]))
    kind = {"string": "text", "boolean": "true, false", "null": "`null`"}.get(field["type"], field["type"])
    if field["type"] == "array":
        least = f" (at least {field['minItems']})" if field.get("minItems") else ""
        return f"list{least} of {_kind(field['items'], definitions)}"
    if field["type"] == "object":
        return f"mapping of names to {_kind(field['additionalProperties'], definitions)}"
    bounds = [text.format(field[name]) for name, text in _BOUNDS.items() if name in field]
    return f"{kind} {', '.join(bounds)}" if bounds else str(kind)


def _as_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_as_yaml, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
