import json
from typing import Any

import pytest

from schemas.errors import InputError
from tasks.data.containers import KeyTwice, NotJson, Number
from tasks.data.formats import BadRecordError, choose_format, turns_of
from tasks.data.records import Turn
from tasks.data.sources import DataFile

EXCHANGE = (Turn("user", "q"), Turn("assistant", "a"))


def file(**options: Any) -> DataFile:
    return DataFile("data.json", "data.json", **options)


def talk(*turns: str) -> list[dict[str, str]]:
    """Turns written `role: text`."""
    return [dict(zip(("from", "value"), turn.split(": ", 1), strict=True)) for turn in turns]


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"instruction": "q", "input": "", "output": "a", "text": "whole"}, "alpaca"),
        ({"input": "q", "output": "a"}, "alpaca"),
        ({"conversations": []}, "sharegpt"),
        ({"messages": [], "prompt": "q"}, "messages"),
        ({"prompt": "q", "completion": "a"}, "prompt"),
        ({"prompt": "q", "response": "a"}, "prompt"),
        ({"query": "q", "response": "a"}, "prompt"),
        ({"text": "a", "label": 1}, "text"),
    ],
)
def test_the_format_is_told_by_the_keys(record: dict[str, Any], name: str) -> None:
    assert choose_format(file(), [record]) == name


def test_most_of_the_first_records_decide_and_null_counts_less() -> None:
    text, alpaca = {"text": "a"}, {"instruction": "q", "output": "a"}
    assert choose_format(file(), ["x", alpaca, text, text]) == "text"
    assert choose_format(file(), [{"messages": None, **text}, {"messages": None, **text}]) == "text"
    assert choose_format(file(), [{"messages": None}]) == "messages"


def test_unknown_keys_are_shown_with_the_mapping_that_would_help() -> None:
    with pytest.raises(InputError) as caught:
        choose_format(file(), [{"Question": "q", "id": 1, "answer": "a"}])
    assert caught.value.code == "data.unknown_keys"
    assert "Keys of its first 1 records: 'Question', 'id', 'answer'." in caught.value.message
    assert caught.value.hint == "Name its keys, e.g. data.columns: {instruction: Question, output: answer}"


def test_a_header_in_one_piece_is_told_by_its_marks() -> None:
    with pytest.raises(InputError) as caught:
        choose_format(file(), [{"instruction;output": "a;b"}])
    assert caught.value.hint == "Its header is one column: separate the columns by commas, or by tabs in a .tsv file."


def test_a_format_that_is_asked_for_needs_its_keys() -> None:
    assert choose_format(file(format="text"), [{"text": "a", "messages": []}]) == "text"
    with pytest.raises(InputError, match=r"have no keys of conversations\."):
        choose_format(file(format="sharegpt"), [{"text": "a"}])


def test_columns_name_the_files_own_keys() -> None:
    columns = {"instruction": "question", "output": "answer"}
    record = {"question": "q", "answer": "a", "input": "i"}
    assert choose_format(file(columns=columns), [record]) == "alpaca"
    assert turns_of(record, "alpaca", columns)[0] == (Turn("user", "q", "i"), Turn("assistant", "a"))
    with pytest.raises(BadRecordError, match="answer is missing"):
        turns_of({"question": "q"}, "alpaca", columns)
    with pytest.raises(InputError, match="names 'answr', which no record"):
        choose_format(file(columns={"output": "answr"}), [record])


def test_system_and_history_come_before_the_last_exchange() -> None:
    record = {"instruction": "q", "output": "a", "system": "be brief", "history": [["q1", "a1"], ["q2", "a2"]]}
    wanted = [("system", "be brief"), ("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]
    turns = (*(Turn(*each) for each in wanted), *EXCHANGE)  # type: ignore[arg-type]
    assert turns_of(record, "alpaca", {})[0] == turns
    record = {"query": record.pop("instruction"), "response": record.pop("output"), **record}
    assert turns_of(record, "prompt", {})[0] == turns


@pytest.mark.parametrize("empty", [{}, {"system": None, "history": None}, {"system": " ", "history": []}])
def test_no_system_and_no_history_leave_one_exchange(empty: dict[str, Any]) -> None:
    assert turns_of({"instruction": "q", "output": "a", **empty}, "alpaca", {})[0] == EXCHANGE
    assert turns_of({"conversations": talk("human: q", "gpt: a"), "tools": "", **empty}, "sharegpt", {})[0] == EXCHANGE


@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_conversations_and_messages_take_either_names(key: str) -> None:
    name = "sharegpt" if key == "conversations" else "messages"
    wanted = (Turn("system", "s"), *EXCHANGE, *EXCHANGE)
    named = talk("system: s", "human: q", "gpt: a", "user: q", "assistant: a")
    assert turns_of({key: named}, name, {}) == (wanted, False)  # type: ignore[arg-type]
    openai = [{"role": turn.role, "content": turn.text, "value": None} for turn in wanted]
    openai[0]["role"] = "developer"
    assert turns_of({key: openai}, name, {})[0] == wanted  # type: ignore[arg-type]
    assert turns_of({key: openai[1:], "system": "s"}, name, {})[0] == wanted  # type: ignore[arg-type]


def test_parts_of_text_are_joined_and_a_number_is_its_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b "}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": Number("1.50"), "weight": Number(1)},
    ]
    assert turns_of({"messages": messages}, "messages", {}) == ((Turn("user", "a b "), Turn("assistant", "1.50")), True)


def test_a_text_is_one_turn() -> None:
    assert turns_of({"text": " a\n"}, "text", {}) == ((Turn("assistant", " a\n"),), False)


GOOD = talk("human: q", "gpt: a")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([], "not an object"),
        (KeyTwice(conversations=GOOD), "a key stands twice"),
        ({}, "conversations is missing"),
        ({"conversations": None}, "conversations is null"),
        ({"conversations": "x"}, "conversations is not a list"),
        ({"conversations": []}, "conversations is empty"),
        ({"conversations": ["x"]}, "a turn is not an object (turn 1)"),
        ({"conversations": [KeyTwice(GOOD[0])]}, "a key stands twice (turn 1)"),
        (
            {"conversations": [{"from": "human", "value": [KeyTwice(type="text", text="x")]}]},
            "a key stands twice (turn 1)",
        ),
        ({"conversations": [{"value": "x"}]}, "a turn has no known role (turn 1)"),
        ({"conversations": talk("human: q", "bot: a")}, "a turn has no known role (turn 2: 'bot')"),
        ({"conversations": [{"from": "human"}]}, "a turn has no text (turn 1)"),
        ({"conversations": [*GOOD, {"from": "human", "value": ""}]}, "a turn is empty (turn 3)"),
        ({"conversations": [{"from": "human", "value": "\n"}]}, "a turn is blank (turn 1)"),
        ({"conversations": [{"from": "human", "value": NotJson()}]}, "a turn is not text"),
        ({"conversations": [{"from": "human", "value": "\ud83d"}]}, "half a surrogate pair in a turn"),
        ({"conversations": talk("gpt: hello", "human: q", "gpt: a")}, "the first turn is not the user's"),
        ({"conversations": talk("system: s")}, "the first turn is not the user's"),
        ({"conversations": [*GOOD, *talk("human: and?")]}, "the last turn is not the assistant's"),
        ({"conversations": talk("human: q", "human: r", "gpt: a")}, "two turns of the user in a row (turn 2)"),
        ({"conversations": talk("system: s", *["human: q"] * 2)}, "two turns of the user in a row (turn 3)"),
        ({"conversations": [*GOOD, *talk("gpt: b")]}, "two turns of the assistant in a row (turn 3)"),
        ({"conversations": [*GOOD, *talk("system: s")]}, "a system turn after the first (turn 3)"),
        ({"conversations": talk("system: s", "human: q", "gpt: a"), "system": "t"}, "two system turns"),
        ({"conversations": GOOD, "tools": "[{}]"}, "tools are not supported"),
        ({"conversations": talk("human: q", "function_call: f")}, "tool turns are not supported (turn 2)"),
        ({"conversations": [{**GOOD[0], "tool_calls": [{}]}]}, "tool turns are not supported (turn 1)"),
        ({"conversations": [*GOOD, {"role": "tool", "content": None}]}, "tool turns are not supported (turn 3)"),
        ({"conversations": [{**GOOD[0], "weight": "0"}]}, "weights of messages are not supported (turn 1)"),
        (
            {"conversations": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "only parts of text are supported (type 'image_url')",
        ),
    ],
)
def test_a_conversation_that_cannot_be_used_has_its_reason(record: Any, reason: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        turns_of(record, "sharegpt", {})
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"history": "x"}, "history is not a list of pairs"),
        ({"history": [["q", "a"], ["q"]]}, "history is not a list of pairs (pair 2)"),
        ({"history": [["q", " "]]}, "a text of history is blank (pair 1)"),
        ({"history": [["q", None]]}, "history is not text"),
        ({"system": ["x"]}, "system is not text"),
    ],
)
def test_a_history_that_cannot_be_used_has_its_reason(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        turns_of({"instruction": "q", "output": "a", **more}, "alpaca", {})
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "q"}, "completion is missing"),
        ({"query": "q", "response": None}, "response is null"),
        ({"response": "a"}, "prompt is missing"),
        ({"prompt": " ", "response": "a"}, "prompt is blank"),
        ({"prompt": [], "completion": "a"}, "prompt is not text"),
    ],
)
def test_a_prompt_that_cannot_be_used_has_its_reason(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        turns_of(record, "prompt", {})
    assert str(caught.value) == reason


def test_real_conversations_are_read(shared_data: Any) -> None:
    from tasks.data.readers import RecordReader
    from tasks.data.records import Record

    path = shared_data / "instruction" / "sharegpt_zh_first200.jsonl"
    reader = RecordReader(DataFile(path, path.name))
    items = list(reader)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert reader.format in ("sharegpt", "messages")
    for item in items:
        if isinstance(item, Record):
            (turns,) = (value for value in lines[item.index].values() if isinstance(value, list))
            texts = [turn.get("value", turn.get("content")) for turn in turns]
            assert [turn.text for turn in item.turns] == texts
    assert sum(isinstance(item, Record) for item in items) > 150
