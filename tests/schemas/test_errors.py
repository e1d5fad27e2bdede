import ast
import pickle
import string
from pathlib import Path

import pytest

from schemas.errors import ConfigError, InputError, StageError, message_templates

PROJECT = Path(__file__).parents[2]


def _raised_codes() -> dict[str, tuple[str, set[str] | None]]:
    """Code -> place and facts of every error that the source builds (facts None: passed on as a mapping)."""
    found: dict[str, tuple[str, set[str] | None]] = {}
    for path in (p for package in ("schemas", "tasks", "flows") for p in (PROJECT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if not node.func.id.endswith(("Error", "InterruptionError")) or not node.args:
                continue
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value in message_templates():
                names = {keyword.arg for keyword in node.keywords}
                facts = None if None in names else {str(name) for name in names}
                found[first.value] = (f"{path.name}:{node.lineno}", facts)
            elif isinstance(first, ast.Constant) and isinstance(first.value, str) and "." in first.value.split(" ")[0]:
                pytest.fail(f"{path}:{node.lineno} raises the unknown code {first.value}")
    return found


def test_every_raised_code_has_a_message_and_gives_its_facts():
    for code, (place, facts) in _raised_codes().items():
        entry = message_templates()[code]
        wanted = {name for text in entry.values() for _, name, _, _ in string.Formatter().parse(text) if name}
        wanted = {name.split("!")[0] for name in wanted}
        if facts is not None:
            assert wanted - facts - {"stage"} == set(), f"{place}: {code} lacks the facts {wanted - facts}"


def test_every_message_is_used_and_says_what_to_do():
    raised = set(_raised_codes())
    for code, entry in message_templates().items():
        assert set(entry) == {"message", "hint"}
        assert code in raised, f"{code} is raised nowhere"
        assert entry["hint"].strip(), f"{code} has no hint"


def test_an_error_survives_pickling():
    error = InputError("data.file_missing", path="/a/b.json")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.code, again.message, again.hint) == (InputError, error.code, error.message, error.hint)


def test_exit_codes_follow_the_kind():
    assert ConfigError("config.bad_override", text="x").exit_code == 2
    assert StageError("train.no_change", step=1).exit_code == 1


def test_braces_in_a_value_are_printed_as_they_are():
    assert "{0} {x}" in InputError("data.file_missing", path="{0} {x}").message
