"""Conversations: history, what fits the cache, what is shown, with a model that is a few lines of NumPy."""

import logging
import shutil

import numpy as np
import pytest

from schemas.errors import ConfigError, InputError
from schemas.reports import MindirSpec
from tasks.answer import Conversation, Sampling
from tasks.data.chat_template import open_template
from tasks.data.encoding import Encoder
from tasks.data.records import Turn, exchange
from tasks.models.generation import Generator

CACHE, CHUNK, VOCABULARY = 200, 8, 512
NEW = 12


class Babbling(Generator):
    """A generator over a model whose logits are a function of all tokens so far; it notes its prompts."""

    def __init__(self):
        self.rows = np.zeros(CACHE + CHUNK, np.int64)
        self.prompts = []
        super().__init__(self.step, cache_length=CACHE, prefill_chunk=CHUNK, vocabulary=VOCABULARY)

    def step(self, ids, positions):
        self.rows[positions] = ids[0]
        sums = [int(((np.arange(place + 1) + 3) * (self.rows[: place + 1] + 1)).sum()) for place in positions]
        return np.stack([np.cos(np.arange(VOCABULARY) * 1.7 + state) for state in sums]).astype(np.float32)

    def generate(self, ids, *args, **settings):
        self.prompts.append(list(ids))
        return super().generate(ids, *args, **settings)


@pytest.fixture
def folder(stories, tmp_path):
    """What `export` leaves, but the graph."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(stories / name, tmp_path)
    about = MindirSpec(graph_file="model.mindir", cache_length=CACHE, prefill_chunk=CHUNK, vocabulary=VOCABULARY)
    (tmp_path / "mindtune.json").write_text(about.model_dump_json())
    return tmp_path


@pytest.fixture
def model(monkeypatch):
    babbling = Babbling()
    monkeypatch.setattr(Conversation, "load", lambda self: babbling)
    return babbling


def conversation(folder, template="plain", system=None, **changed):
    settings = {"max_new_tokens": NEW, "temperature": 0.0, "top_p": 1.0, "seed": 0} | changed
    return Conversation(folder, template, device="CPU", sampling=Sampling(**settings), system=system)


def shown_reply(talk, question):
    pieces = []
    return talk.reply(question, pieces.append), pieces


def prompt(folder, template, *turns):
    encoder = Encoder(folder)
    return encoder.prompt_ids(turns, open_template(template, encoder))


def test_what_is_shown_is_the_text_and_that_of_the_tokens(folder, model):
    reply, pieces = shown_reply(conversation(folder), "Who?")
    fresh = Babbling().generate(prompt(folder, "plain", Turn("user", "Who?")), NEW, stop_ids={2})
    assert "".join(pieces) == reply.text == Encoder(folder).decode(fresh.ids)
    assert (reply.tokens, reply.stopped) == (len(fresh.ids), fresh.stopped)
    assert reply.tokens > 3


def test_an_answer_ends_at_the_end_token(folder, model, monkeypatch):
    """One of the tokens that the model would say is made the end token."""
    whole = Babbling().generate(prompt(folder, "plain", Turn("user", "Who?")), NEW).ids
    place = next(place for place in range(2, NEW) if whole[place] not in whole[:place])
    monkeypatch.setattr(Encoder, "end_ids", lambda self, template: [whole[place]])
    reply, pieces = shown_reply(conversation(folder), "Who?")
    assert (reply.tokens, reply.stopped) == (place, True)
    assert "".join(pieces) == Encoder(folder).decode(whole[:place])


@pytest.mark.parametrize("template", ["plain", "chatml", "alpaca-zh"])
def test_a_question_comes_after_all_turns_before_it(folder, model, template):
    talk = conversation(folder, template, max_new_tokens=2)
    first, _ = shown_reply(talk, "Hi?")
    second, _ = shown_reply(talk, "And?")
    shown_reply(talk, "So?")
    turns = [*exchange("Hi?", first.text), *exchange("And?", second.text), Turn("user", "So?")]
    assert model.prompts[-1] == prompt(folder, template, *turns)


def test_a_system_turn_comes_before_everything_and_needs_a_place(folder, model):
    talk = conversation(folder, "chatml", "Be brief.")
    shown_reply(talk, "Hi?")
    assert model.prompts[-1] == prompt(folder, "chatml", Turn("system", "Be brief."), Turn("user", "Hi?"))
    with pytest.raises(ConfigError, match="plain"):
        conversation(folder, "plain", "Be brief.")


def test_what_is_forgotten_counts_no_more(folder, model):
    talk = conversation(folder)
    first, _ = shown_reply(talk, "Who?")
    shown_reply(talk, "What?")
    talk.forget()
    again, _ = shown_reply(talk, "Who?")
    assert again.text == first.text
    assert model.prompts[-1] == model.prompts[0]


def test_the_oldest_exchanges_make_room_with_a_warning(folder, model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mindtune"), "propagate", True)
    talk = conversation(folder)
    replies = []
    while not caplog.records:
        replies.append(shown_reply(talk, f"Number {len(replies)}?")[0])
        assert len(replies) < 20
    assert len(replies) > 2
    assert f"no room in the KV cache of {CACHE} tokens: forgot the oldest question" in caplog.text
    last = len(replies) - 1
    kept = [turn for number in range(1, last) for turn in exchange(f"Number {number}?", replies[number].text)]
    wanted = prompt(folder, "plain", *kept, Turn("user", f"Number {last}?"))
    assert model.prompts[-1] == wanted  # exactly one was dropped
    assert len(wanted) + NEW <= CACHE


def test_an_answer_that_the_template_can_not_write_again_is_forgotten(folder, model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mindtune"), "propagate", True)
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    talk = conversation(folder, "tokenizer")
    shown_reply(talk, "Who?")
    talk._exchanges[0] = ("Who?", "hm </think> yes")  # as another model would have answered
    talk._exchanges.append(("What?", "fine"))
    shown_reply(talk, "So?")
    assert "can't write an earlier answer: forgot the oldest question and answer" in caplog.text
    turns = [*exchange("What?", "fine"), Turn("user", "So?")]
    assert model.prompts[-1] == prompt(folder, "tokenizer", *turns)
    with pytest.raises(InputError, match="changes its texts"):
        talk.reply("hm </think> yes", print)


def test_a_question_that_does_not_fit_is_refused_before_work_and_changes_nothing(folder, monkeypatch):
    def never(self):
        raise AssertionError("loaded")

    monkeypatch.setattr(Conversation, "load", never)
    with pytest.raises(InputError, match=f"does not fit the KV cache of {CACHE}"):
        conversation(folder).reply("sky " * CACHE, print)


def test_a_refused_question_leaves_the_history(folder, model):
    talk = conversation(folder)
    first, _ = shown_reply(talk, "Who?")
    with pytest.raises(InputError):
        talk.reply("sky " * CACHE, print)
    shown_reply(talk, "What?")
    assert model.prompts[-1] == prompt(folder, "plain", *exchange("Who?", first.text), Turn("user", "What?"))


def test_an_answer_that_was_stopped_stays_as_far_as_it_came(folder, model):
    talk = conversation(folder)
    pieces = []

    def show(piece):
        pieces.append(piece)
        if len(pieces) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.reply("Who?", show)
    shown_reply(talk, "What?")
    turns = [*exchange("Who?", "".join(pieces)), Turn("user", "What?")]
    assert model.prompts[-1] == prompt(folder, "plain", *turns)


def test_the_same_seed_draws_the_same_answer(folder, model):
    texts = [shown_reply(conversation(folder, temperature=2.0, seed=seed), "Who?")[0].text for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_bad_settings_and_texts_are_refused(folder, model):
    with pytest.raises(ConfigError, match="top_p must be above 0"):
        conversation(folder, top_p=0.0)
    with pytest.raises(ConfigError, match="The system turn must be UTF-8 text"):
        conversation(folder, "chatml", "\udcff")
    with pytest.raises(ConfigError, match="The prompt must be UTF-8 text"):
        conversation(folder).reply("\udcff", print)
