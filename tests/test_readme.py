"""The documents keep their word: commands, options, files and targets that they name exist, in both languages alike."""

import json
import re

import pytest
import yaml
from readme import PAGES, PROJECT, READMES, commands, shown_file
from typer.main import get_command

from flows.cli import app
from flows.settings import preset_names
from schemas.config import LlmConfig
from tasks.stages import STAGES

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
readmes = pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)


def parse(words):
    """Take a command line apart as the command line itself does, without running it."""
    name, command, rest = "mindtune", get_command(app), list(words)
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(command.make_context(name, list(rest)), rest)
    command.make_context(name, rest)


@pages
def test_every_command_is_one_that_exists_with_its_options(page):
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    for command in commands(page):
        program, *rest = command.words
        if program == "make":
            for target in rest:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
        else:
            assert program == "mindtune", command
            parse(rest)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run stories260k --nonsense", "No such option"),
        ("artifacts lits", "No such command"),
        ("artifacts why latest", "Missing parameter"),
        ("stage trian", "not one of"),
    ],
)
def test_a_command_that_does_not_exist_would_be_seen(line, words):
    with pytest.raises(Exception, match=words):
        parse(line.split())


@readmes
def test_the_readme_shows_the_two_commands_and_the_main_ones(page):
    found = [command.words for command in commands(page)]
    assert found[:2] == [("make", "demo"), ("make", "test")]
    named = {words[1] for words in found if words[0] == "mindtune"}
    assert {"run", "plan", "show", "stage", "generate", "artifacts", "config"} <= named


@readmes
def test_every_stage_and_every_preset_is_described(page):
    text = page.read_text(encoding="utf-8")
    for name in (*STAGES, *preset_names()):
        assert f"`{name}`" in text


def test_both_languages_show_the_same_commands_and_files():
    english, chinese = READMES
    assert commands(english) == commands(chinese)
    assert json.loads(shown_file(english, "json", "[")) == json.loads(shown_file(chinese, "json", "["))
    assert yaml.safe_load(shown_file(english, "yaml", "model:")) == yaml.safe_load(
        shown_file(chinese, "yaml", "model:")
    )


@readmes
def test_the_example_is_a_valid_configuration_of_valid_records(page):
    LlmConfig.model_validate(yaml.safe_load(shown_file(page, "yaml", "model:")))
    for record in json.loads(shown_file(page, "json", "[")):
        assert set(record) == {"instruction", "input", "output"}


@pages
def test_every_linked_file_and_picture_exists(page):
    targets = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    for target in targets:
        if not target.startswith(("http", "#")):
            assert (page.parent / target.partition("#")[0]).is_file(), target


def test_figures_are_the_same_in_both_languages():
    """Numbers outside code: sizes, seconds, losses."""
    found = []
    for page in READMES:
        text = re.sub(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        found.append(sorted(re.findall(r"\d+(?:\.\d+)?", text)))
    assert found[0] == found[1]
