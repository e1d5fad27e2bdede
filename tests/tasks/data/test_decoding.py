"""Streams of tokens with real tokenizers: whole characters only, and in the end the text of all tokens."""

import json
import random
import shutil

import pytest

from tasks.data.decoding import HALF, TextStream
from tasks.data.encoding import Encoder

TEXTS = [
    "Hello, world!  Two  blanks, a tab\tand\n\na new line.",
    " a blank before, one after ",
    "你好，世界。昇腾处理器上的微调：𠮷野家、龘、㍿。",
    "😀😁 flags 🇨🇳, a family 👩‍👩‍👧‍👦, a tone 👍🏽!",
    "mixed 中文 and English，数字123，naïve café e\u0301 Ω≈ç√ \u200b\ufeff end",
    "the sign \ufffd itself, and at the end \ufffd",
    "def f(x):\n    return x  # 缩进\r\n",
]


@pytest.fixture(scope="module", params=["llama2", "minimind", "stories260K"])
def encoder(request, stories, tmp_path_factory):
    if request.param == "stories260K":
        return Encoder(stories)
    folder = request.getfixturevalue("shared_data") / "tokenizers" / request.param
    if request.param == "llama2":  # tokenizer.model alone
        copy = tmp_path_factory.mktemp("llama2")
        shutil.copy(folder / "tokenizer.model", copy)
        about = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (copy / "tokenizer_config.json").write_text(json.dumps(about))
        folder = copy
    return Encoder(folder)


def streamed(encoder, ids):
    stream = TextStream(encoder.decode)
    pieces = [stream.push(token) for token in ids]
    pieces.append(stream.end())
    assert stream.text == "".join(pieces)
    assert stream.ids == list(ids)
    return pieces


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_whole_characters_and_together_the_text(encoder, text):
    ids = encoder.answer_ids(text)
    pieces = streamed(encoder, ids)
    assert "".join(pieces) == encoder.decode(ids) == text
    if HALF not in text:
        assert not any(HALF in piece for piece in pieces)


def test_text_comes_as_early_as_it_can(encoder):
    """After any token all characters whose bytes are there have been given out."""
    text = "One day 你好😀 went on"
    ids = encoder.answer_ids(text)
    stream = TextStream(encoder.decode)
    for count, token in enumerate(ids, 1):
        stream.push(token)
        whole = encoder.decode(ids[:count]).rstrip(HALF)
        assert len(stream.text) >= len(whole)
    assert stream.text == text


def test_a_character_over_several_tokens_is_held_back(encoder):
    ids = encoder.answer_ids("𠮷")
    stream = TextStream(encoder.decode)
    shown = [stream.push(token) for token in ids]
    assert len(ids) > 1
    assert (set(shown[:-1]), shown[-1]) == ({""}, "𠮷")


def test_a_text_cut_in_a_character_ends_with_the_mark_and_keeps_what_was_before(encoder):
    ids = encoder.answer_ids("go 𠮷")[:-1]
    pieces = streamed(encoder, ids)
    assert "".join(pieces).rstrip(HALF) == "go "
    assert "".join(pieces).endswith(HALF)
    assert not any(HALF in piece for piece in pieces[:-1])


def test_good_characters_stay_when_the_next_is_cut_off(encoder):
    """Byte tokens are decoded as a run: a cut-off character would take the good ones before it along."""
    ids = encoder.answer_ids("😀𠮷")[:-1]
    assert "".join(streamed(encoder, ids)).startswith("😀")


def test_control_tokens_have_no_text_and_keep_the_blank_after_them(encoder):
    first, second = encoder.answer_ids("Once"), encoder.answer_ids("Once upon")
    assert second[: len(first)] == first
    ids = [*first, encoder.eos_id, *second[len(first) :]]
    assert "".join(streamed(encoder, ids)) == encoder.decode(ids) == "Once upon"


def test_any_tokens_give_the_text_of_all_unless_bytes_run_into_invalid_ones(encoder):
    draw = random.Random(5)
    equal = 0
    for _ in range(200):
        ids = [draw.randrange(encoder.size) for _ in range(draw.randrange(1, 30))]
        made, wanted = "".join(streamed(encoder, ids)), encoder.decode(ids)
        equal += made == wanted
        if made != wanted:  # a run of byte tokens: nothing but marks may differ
            assert HALF in wanted
            assert len(made.replace(HALF, "")) >= len(wanted.replace(HALF, ""))
    assert equal > 100


def test_an_empty_stream_has_no_text(encoder):
    assert streamed(encoder, []) == [""]
