"""From a raw record to its turns: which keys the formats have, which format a file is in, and what a record must hold.

    alpaca     instruction, input, output; system and history ([[question, answer], ...]) where there are any
    prompt     prompt and completion, prompt and response, or query and response; system and history as above
    sharegpt   conversations: a list of {from, value}, also of {role, content}; system where there is any
    messages   messages: the same
    text       text: trained whole, without a template

Nothing is repaired in silence. Values stay as the file has them, code point for code point: not trimmed, not
normalised. The rules:

- a missing or null instruction, input, system or history is an empty one; a blank system text is none;
- a turn, a text, an answer must hold more than blanks, and of instruction and input one must;
- turns alternate, the user begins and the assistant ends; a system turn may come before them. A greeting by the
  assistant at the start, or a question without an answer at the end, rejects the record: it is not cut off;
- roles are human, user; gpt, chatgpt, assistant; system, developer. Turns and definitions of tools reject the record,
  and so does a message that is marked not to be trained (`weight: 0`): all of them would change what is learned;
- content that is a list of parts is joined where all are texts;
- a number stands for its own text, with the digits of the file (`1.50` stays `1.50`), and is counted;
- true, false, lists, objects and Python's NaN and Infinity are not text;
- an unpaired surrogate (from an escape such as `\\ud83d` alone) has no UTF-8 form and rejects the record;
- a key that stands twice in a record, turn or part rejects it, since readers differ in which one they take;
- other keys do no harm.

A reason is one of a small number of texts, sometimes with details in round brackets after it; it names the file's own
keys.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from schemas.errors import InputError
from tasks.data.containers import KeyTwice, Number
from tasks.data.records import Role, Turn
from tasks.data.sources import DataFile

FormatName = Literal["messages", "sharegpt", "alpaca", "prompt", "text"]

PROMPT_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("query", "response"))
# The keys that tell a format, in order of precedence: some files have a prompt or a rendered text beside the turns.
TELLING: Mapping[FormatName, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "sharegpt": (("conversations",),),
    "alpaca": (("instruction", "output"), ("input", "output")),
    "prompt": PROMPT_PAIRS,
    "text": (("text",),),
}
ROLES: Mapping[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
TOOL_ROLES = ("tool", "function", "function_call", "observation", "ipython")
SYNONYMS = {
    "instruction": ("question", "query", "prompt", "ask", "problem", "q"),
    "output": ("answer", "response", "completion", "reply", "target", "solution", "a"),
    "text": ("content", "document", "body"),
}
SHOWN_KEYS = 12


class BadRecordError(Exception):
    """Why a record can't be used."""


def choose_format(file: DataFile, values: Sequence[object]) -> FormatName:
    """The format of a file: the one that is configured, or the one whose keys most of its first records have.

    Args:
        file: the file, with the format and columns configured for it.
        values: its first records.

    Raises:
        InputError: none of them has the keys (data.unknown_keys), or data.columns names keys that none has
            (data.unknown_columns).
    """
    records = [value for value in values if isinstance(value, dict)]
    keys = list(dict.fromkeys(key for record in records for key in record))
    found = ", ".join(map(repr, keys[:SHOWN_KEYS])) + (", ..." if len(keys) > SHOWN_KEYS else "")
    facts: dict[str, Any] = {"path": file.path, "count": len(records), "found": found or "none"}
    unknown = [column for column in file.columns.values() if column not in keys]
    if unknown:
        raise InputError("data.unknown_columns", unknown=", ".join(map(repr, unknown)), **facts)
    names = list(TELLING) if file.format == "auto" else [file.format]
    scores = {name: _score(name, records, file.columns) for name in names}
    best = max(names, key=lambda name: scores[name])  # the first of equals
    if not any(scores[best]):
        wanted = ", or ".join(" and ".join(group) for name in names for group in TELLING[name])
        raise InputError("data.unknown_keys", wanted=wanted, suggestion=_suggestion(keys, names), **facts)
    return best


def _score(name: FormatName, records: Iterable[dict[str, Any]], columns: Mapping[str, str]) -> tuple[int, int]:
    """How many records have a format's keys with a value other than null, and how many have them at all."""
    groups = [[columns.get(key, key) for key in group] for group in TELLING[name]]
    filled = present = 0
    for record in records:
        filled += any(all(record.get(key) is not None for key in group) for group in groups)
        present += any(all(key in record for key in group) for group in groups)
    return filled, present


def _suggestion(keys: Sequence[str], names: Sequence[FormatName]) -> str:
    if len(keys) == 1 and any(mark in keys[0] for mark in ";\t|"):
        return "Its header is one column: separate the columns by commas, or by tabs in a .tsv file."
    by_lower = {key.strip().lower(): key for key in reversed(keys)}
    fields = ("text",) if list(names) == ["text"] else ("instruction", "output")
    guess = {
        name: next((by_lower[word] for word in (name, *SYNONYMS[name]) if word in by_lower), None) for name in fields
    }
    if all(guess.values()):
        return f"Name its keys, e.g. data.columns: {{{', '.join(f'{name}: {key}' for name, key in guess.items())}}}"
    return "Name its keys in data.columns, e.g. {instruction: question, output: answer}, or set data.format."


def turns_of(value: object, name: FormatName, columns: Mapping[str, str]) -> tuple[tuple[Turn, ...], bool]:
    """The turns of a raw record, and whether one of its texts was a number.

    Raises:
        BadRecordError: the record can't be used; its text is the reason.
    """
    if not isinstance(value, dict):
        raise BadRecordError("not an object")
    if isinstance(value, KeyTwice):
        raise BadRecordError("a key stands twice")
    fields = _Fields(value, columns)
    match name:
        case "alpaca":
            turns = _alpaca(fields)
        case "prompt":
            turns = _prompt(fields)
        case "text":
            turns = (Turn("assistant", fields.required("text")),)
        case _:
            turns = _conversation(fields, "messages" if name == "messages" else "conversations")
    return turns, fields.has_number


class _Fields:
    """The values of a raw record by the names of its format."""

    __slots__ = ("_columns", "_value", "has_number")

    def __init__(self, value: dict[str, Any], columns: Mapping[str, str]) -> None:
        self._value = value
        self._columns = columns
        self.has_number = False

    def key(self, name: str) -> str:
        return self._columns.get(name, name)

    def get(self, name: str) -> object:
        return self._value.get(self._columns.get(name, name))

    def __contains__(self, name: str) -> bool:
        return self._columns.get(name, name) in self._value

    def optional(self, name: str) -> str:
        value = self.get(name)
        return "" if value is None else self.text(value, self.key(name))

    def required(self, name: str) -> str:
        value, key = self.get(name), self.key(name)
        if value is None:
            raise BadRecordError(f"{key} is null" if name in self else f"{key} is missing")
        return _filled(self.text(value, key), key)

    def text(self, value: object, what: str) -> str:
        """A value that has to be a text, or a number in its place."""
        if type(value) is not str:
            if not isinstance(value, Number):
                raise BadRecordError(f"{what} is not text")
            self.has_number = True
            value = str(value)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRecordError(f"half a surrogate pair in {what}") from error
        return value


def _filled(text: str, what: str, details: str = "") -> str:
    if not text or text.isspace():
        raise BadRecordError(f"{what} is {'blank' if text else 'empty'}{details}")
    return text


def _alpaca(fields: _Fields) -> tuple[Turn, ...]:
    output = fields.required("output")
    instruction, question = fields.optional("instruction"), fields.optional("input")
    if not instruction.strip() and not question.strip():
        raise BadRecordError("nothing to ask")
    return *_before(fields), Turn("user", instruction, question), Turn("assistant", output)


def _prompt(fields: _Fields) -> tuple[Turn, ...]:
    asks, answers = max(PROMPT_PAIRS, key=lambda pair: sum(name in fields for name in pair))  # the first of equals
    question, answer = fields.required(asks), fields.required(answers)
    return *_before(fields), Turn("user", question), Turn("assistant", answer)


def _before(fields: _Fields) -> Iterator[Turn]:
    """System and history of a record that holds its last exchange in keys of their own."""
    system = fields.optional("system")
    if system.strip():
        yield Turn("system", system)
    history, key = fields.get("history"), fields.key("history")
    if history is None or history == "":
        return
    if not isinstance(history, list):
        raise BadRecordError(f"{key} is not a list of pairs")
    for number, pair in enumerate(history, start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRecordError(f"{key} is not a list of pairs (pair {number})")
        question, answer = (_filled(fields.text(text, key), f"a text of {key}", f" (pair {number})") for text in pair)
        yield Turn("user", question)
        yield Turn("assistant", answer)


def _conversation(fields: _Fields, name: str) -> tuple[Turn, ...]:
    messages, key = fields.get(name), fields.key(name)
    if messages is None:
        raise BadRecordError(f"{key} is null" if name in fields else f"{key} is missing")
    if not isinstance(messages, list):
        raise BadRecordError(f"{key} is not a list")
    if not messages:
        raise BadRecordError(f"{key} is empty")
    if fields.get("tools") not in (None, "", "[]", []):
        raise BadRecordError("tools are not supported")
    turns = [_turn(message, fields, f" (turn {number})") for number, message in enumerate(messages, start=1)]
    system = fields.optional("system")
    if system.strip():
        if turns[0].role == "system":
            raise BadRecordError("two system turns")
        turns.insert(0, Turn("system", system))
    start = 1 if turns[0].role == "system" else 0
    dialogue = turns[start:]
    if not dialogue or dialogue[0].role != "user":
        raise BadRecordError("the first turn is not the user's")
    for number, (turn, following) in enumerate(pairwise(dialogue), start=len(messages) - len(dialogue) + 2):
        if following.role == "system":
            raise BadRecordError(f"a system turn after the first (turn {number})")
        if turn.role == following.role:
            raise BadRecordError(f"two turns of the {turn.role} in a row (turn {number})")
    if dialogue[-1].role != "assistant":
        raise BadRecordError("the last turn is not the assistant's")
    return tuple(turns)


def _turn(message: object, fields: _Fields, details: str) -> Turn:
    if not isinstance(message, dict):
        raise BadRecordError(f"a turn is not an object{details}")
    if isinstance(message, KeyTwice):
        raise BadRecordError(f"a key stands twice{details}")
    name = message.get("role")
    if name is None:
        name = message.get("from")
    if name in TOOL_ROLES or message.get("tool_calls") or message.get("function_call"):
        raise BadRecordError(f"tool turns are not supported{details}")
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRecordError("a turn has no known role" + (f"{details[:-1]}: {name!r})" if name else details))
    if message.get("weight") not in (None, "1", "1.0"):
        raise BadRecordError(f"weights of messages are not supported{details}")
    content = message.get("content")
    if content is None:
        content = message.get("value")
    if content is None:
        raise BadRecordError(f"a turn has no text{details}")
    if isinstance(content, list):
        content = "".join(_part(part, fields, details) for part in content)
    return Turn(role, _filled(fields.text(content, "a turn"), "a turn", details))


def _part(part: object, fields: _Fields, details: str) -> str:
    if isinstance(part, KeyTwice):
        raise BadRecordError(f"a key stands twice{details}")
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else None
        raise BadRecordError(f"only parts of text are supported (type {kind!r})")
    return fields.text(part.get("text"), "a part")
