"""The reference of the settings: complete, readable, and the page in docs is the present one."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from flows.reference import as_markdown, groups
from schemas.config import LlmConfig, LoraConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def _paths(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _paths(field.annotation, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _settings():
    return {setting.path: setting for group in groups() for setting in group.settings}


def test_every_setting_is_listed_with_a_meaning():
    settings = _settings()
    assert set(_paths(LlmConfig)) <= set(settings)
    assert [path for path, setting in settings.items() if not setting.meaning] == []
    assert [group.path for group in groups() if not group.meaning] == []


def test_values_bounds_and_defaults_are_those_of_the_schema():
    settings = _settings()
    rank = settings["train.lora.rank"]
    assert (rank.kind, rank.default, rank.in_key) == ("integer ≥ 1, ≤ 1024", str(LoraConfig().rank), True)
    assert settings["train.max_steps"].kind == "integer ≥ 1 or `null`"
    assert settings["train.keep"].kind == "`best`, `last`"
    assert settings["export.parity_lengths"].kind == "list (at least 1) of integer ≥ 1"
    assert settings["model.base"].default is None
    assert settings["train.log_every_steps"].in_key is False


def test_the_page_in_docs_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == as_markdown() + "\n", (
        "docs/configuration.md is out of date: mindtune config --markdown > docs/configuration.md"
    )


def test_the_command_prints_the_page_and_a_table(cli):
    assert cli("config", "--markdown").out == as_markdown() + "\n"
    assert "train.lora.rank" in cli("config").out
    listed = cli("config", "--json").document["settings"]
    assert [setting["path"] for setting in listed] == list(_settings())
