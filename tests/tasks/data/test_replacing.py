"""data.replace: literal, all at once, in every text, and counted."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tasks.data.encoding import Encoder
from tasks.data.records import Record, Turn, exchange
from tasks.data.replacing import Replacer


def record(*turns: Turn) -> Record:
    return Record("a.json", 0, None, turns)


def test_every_text_of_a_conversation_is_searched() -> None:
    replacer = Replacer({"{{name}}": "小狸"})
    turns = (
        Turn("system", "You are {{name}}."),
        *exchange("{{name}}?", "I am {{name}}, {{name}}!", question_input="about {{name}}"),
    )
    assert replacer(record(*turns)) == record(
        Turn("system", "You are 小狸."), *exchange("小狸?", "I am 小狸, 小狸!", question_input="about 小狸")
    )
    assert replacer.counts == {"{{name}}": 5}


def test_what_was_put_in_is_not_searched_again() -> None:
    replacer = Replacer({"a": "b", "b": "a"})
    assert replacer(record(*exchange("ab", "ba"))) == record(*exchange("ba", "ab"))


def test_the_longest_text_is_replaced_where_several_begin() -> None:
    replacer = Replacer({"{{name": "x", "{{name}}": "y"})
    assert replacer(record(*exchange("{{name}} {{name", "-"))) == record(*exchange("y x", "-"))


def test_texts_are_literal() -> None:
    replacer = Replacer({".*": r"\1 \g<0> {0}"})
    assert replacer(record(*exchange("a.*b", "ab"))) == record(*exchange(r"a\1 \g<0> {0}b", "ab"))


def test_a_text_that_was_not_met_is_counted_as_such() -> None:
    replacer = Replacer({"{{naem}}": "x"})
    same = record(*exchange("{{name}}", "-"))
    assert replacer(same) == same
    assert replacer.counts == {"{{naem}}": 0}


def test_without_replacements_records_stay_as_they_are() -> None:
    same = record(*exchange("q", "a"))
    assert Replacer({})(same) is same


def test_stage_trains_on_the_replaced_texts_and_counts_them(
    tokenize_files: Any, stories: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"instruction": "Who are you?", "output": "I am {{name}}."}, {"instruction": "{{name}}!", "output": "Yes."}]
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        made = tokenize_files(tmp_path / "a.json", replace={"{{name}}": "Pip", "{{author}}": "Tom"})
    encoder = Encoder(stories)
    assert [encoder.decode(labels) for labels in made.trained()] == ["I am Pip.", "Yes."]
    assert "Pip!" in encoder.decode(made.masked()[1])
    assert made.report.replaced == {"{{name}}": 2, "{{author}}": 0}
    assert "data.replace names '{{author}}', which stands in no record" in caplog.text
