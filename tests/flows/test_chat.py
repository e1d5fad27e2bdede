"""`mindtune generate` with the MindIR of a real run: answers as they come, and a chat on a terminal."""

import json
import os
import signal
import subprocess
import time

import pytest
from command_line import PROJECT
from terminal import CTRL_C, CTRL_D, Terminal

QUESTION = "What color is the sky?"
# So hot that all 512 tokens are equally likely; none of this seed's first 200 draws is an end token.
LONG = ("--temperature", "1e6", "--seed", "0", "--max-new-tokens")

pytestmark = pytest.mark.e2e


def chat(cli, *arguments):
    return Terminal(cli.command("generate", *arguments), cli.environment(), PROJECT)


def say(terminal, line):
    """Type a line and give what is shown until the next prompt."""
    terminal.type(f"{line}\n")
    return terminal.wait_for("\n> ").removeprefix(line).removesuffix("\n> ").removeprefix("\n")


@pytest.fixture(scope="module")
def alone(finished):
    """The document of one answer."""
    cli, _ = finished
    return cli("generate", "--prompt", QUESTION, "--max-new-tokens", "40", "--json").document


def test_an_answer_is_the_same_as_text_and_as_a_document(finished, alone):
    cli, _ = finished
    answer = cli("generate", "--prompt", QUESTION, "--max-new-tokens", "40")
    assert answer.code == 0, answer.err
    assert answer.out == alone["text"] + "\n"
    assert set(alone) == {"run", "text", "tokens", "stopped", "first_token_seconds", "tokens_per_second"}


def test_settings_left_out_are_those_of_the_evaluation(finished):
    cli, run = finished
    limit = cli("show", run.document["run"], "--json").document["config"]["evaluate"]["max_new_tokens"]
    answer = cli("generate", "--prompt", QUESTION, "--temperature", "1e6", "--json")
    assert (answer.document["tokens"], answer.document["stopped"]) == (limit, False)
    again = cli("generate", "--prompt", QUESTION, "--temperature", "1e6", "--seed", "0")
    assert again.out == answer.document["text"] + "\n"
    assert f"cut after {limit} tokens" in again.err


def test_a_pipe_gets_the_text_as_it_comes(finished):
    """The first piece is there long before the last: many reads, the text of all is the answer."""
    cli, _ = finished
    arguments = ("generate", "--prompt", QUESTION, *LONG, "200")
    process = subprocess.Popen(
        cli.command(*arguments), env=cli.environment(), cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        pieces = []
        while piece := os.read(process.stdout.fileno(), 65536):
            pieces.append(piece)
    assert process.returncode == 0
    assert len(pieces) > 3
    assert b"".join(pieces).decode() == cli(*arguments).out


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_without_a_question_and_without_a_terminal_there_is_an_error(finished, arguments):
    cli, _ = finished
    answer = cli("generate", *arguments)
    assert answer.code == 2
    assert "--prompt is missing" in answer.err


def test_a_question_that_does_not_fit_is_refused_before_the_model_is_loaded(finished):
    cli, _ = finished
    answer = cli("generate", "--prompt", "the sky " * 300, "--json", PYTHONPROFILEIMPORTTIME="1")
    assert answer.code == 2
    assert json.loads(answer.out)["error"]["code"] == "generate.too_long"
    assert "mindspore" not in answer.err


def test_a_chat_answers_remembers_and_forgets(finished, alone):
    cli, _ = finished
    with chat(cli, "--max-new-tokens", "40") as terminal:
        terminal.wait_for("\n> ")
        first = say(terminal, QUESTION)
        assert first.splitlines()[0] == alone["text"].splitlines()[0]
        assert say(terminal, "/reset") == ""
        assert say(terminal, QUESTION) == first
        say(terminal, "Who are you?")
        assert "/exit" in say(terminal, "/help")
        assert say(terminal, "") == ""
        terminal.type("/exit\n")
        assert terminal.end() == 0


def test_the_oldest_exchange_is_dropped_with_a_notice(finished):
    cli, _ = finished
    with chat(cli, *LONG, "100") as terminal:
        terminal.wait_for("\n> ")
        first, *_, last = [say(terminal, QUESTION) for _ in range(3)]
        notice = "no room in the KV cache of 256 tokens: forgot the oldest question and answer"
        assert notice not in first
        assert notice in last
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_a_question_that_does_not_fit_leaves_the_chat_alive(finished):
    cli, _ = finished
    with chat(cli, "--max-new-tokens", "20") as terminal:
        terminal.wait_for("\n> ")
        assert "does not fit the KV cache of 256" in say(terminal, "the sky " * 300)
        assert say(terminal, QUESTION)
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_ctrl_c_ends_the_answer_and_not_the_chat(finished):
    cli, _ = finished
    with chat(cli, *LONG, "200") as terminal:
        terminal.wait_for("\n> ")
        terminal.type(f"{QUESTION}\n")
        whole = terminal.wait_for("\n> ")
        assert "cut after 200 tokens" in whole
        say(terminal, "/reset")
        for pause in (0.0, 0.1, 0.2):
            terminal.type(f"{QUESTION}\n")
            terminal.wait_for(f"{QUESTION}\n")
            time.sleep(pause)
            terminal.type(CTRL_C)
            assert "cut after" not in terminal.wait_for("\n> ")
            say(terminal, "/reset")
        terminal.repeat(lambda: terminal.type(CTRL_C), "\n> ")  # at the prompt it begins a new line
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_keys_and_echo_are_as_before_after_an_answer(finished):
    cli, _ = finished
    with chat(cli, "--max-new-tokens", "8") as terminal:
        terminal.wait_for("\n> ")
        say(terminal, QUESTION)
        terminal.type("echoed")
        terminal.wait_for("echoed")


def test_sigterm_ends_the_chat(finished):
    cli, _ = finished
    with chat(cli) as terminal:
        terminal.wait_for("\n> ")
        terminal.repeat(lambda: os.kill(terminal.pid, signal.SIGTERM), "Stopped by a signal")
        assert terminal.end() == 130
