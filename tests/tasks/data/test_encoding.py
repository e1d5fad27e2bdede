import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from schemas.errors import InputError
from tasks.data.encoding import Encoder
from tasks.data.records import Turn
from tasks.data.templates import TEMPLATES, Template


def asked(text: str, question_input: str = "") -> list[Turn]:
    return [Turn("user", text, question_input)]


def is_whole(encoder: Encoder, turns: list[Turn], template: Template) -> bool:
    """Whether the prompt comes back from its ids."""
    (encoded,) = encoder.encode([template.write(turns)], encoder.end_ids(template)[0])
    return encoded.contexts_are_whole


LETTERS = "abcdefghijklmnopqrstuvwxyzQA:</>?|_ "
BYTES = [f"<0x{i:02X}>" for i in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a tokenizer folder; keyword arguments go to tokenizer_config.json."""

    def write(tokenizer: Tokenizer, **config: Any) -> Path:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        settings = {"eos_token": "</s>", **config}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return tmp_path

    return write


def byte_level(**options: Any) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate([*alphabet, "ab", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b")], **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def unigram() -> Tokenizer:
    pieces = [*((piece, 0.0) for piece in SPECIAL + BYTES), *((c, -3.0) for c in LETTERS.replace(" ", "\u2581"))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "Hi": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(byte_level(), id="BPE"),
        pytest.param(byte_level(ignore_merges=True), id="BPE that looks whole words up"),
        pytest.param(unigram(), id="Unigram"),
        pytest.param(word_level(), id="WordLevel"),
    ],
)
def test_the_text_of_a_control_token_is_ordinary_characters(tokenizer: Tokenizer, save: Callable[..., Path]) -> None:
    eos = tokenizer.token_to_id("</s>")
    assert eos in tokenizer.encode("</s>").ids  # what has to be prevented
    encoder = Encoder(save(tokenizer))
    for text in ("</s>", "a</s>b", "</s> </s>", "x </s>"):
        assert eos not in encoder.answer_ids(text)
        assert eos not in encoder.prompt_ids(asked(text, text), TEMPLATES["alpaca"])
        if tokenizer.token_to_id("Hi") is None:  # all but WordLevel have a token for every character
            assert encoder.decode(encoder.answer_ids(text)) == text


def test_a_merge_that_makes_a_control_token_is_never_made(save: Callable[..., Path]) -> None:
    tokenizer = byte_level()
    document = json.loads(tokenizer.to_str())
    document["model"]["vocab"] |= {"</": 258, "s>": 259}
    document["model"]["merges"] += [["<", "/"], ["s", ">"], ["</", "s>"]]
    encoder = Encoder(save(Tokenizer.from_str(json.dumps(document))))
    assert encoder.answer_ids("</s>") == [258, 259]


def test_ids_stay_those_of_the_tokenizer(save: Callable[..., Path]) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "   "])  # ordinary vocabulary beyond the special tokens
    encoder = Encoder(save(tokenizer))
    text = "ab<think>   ab"
    assert encoder.answer_ids(text) == tokenizer.encode(text).ids == [256, 260, 261, 256]
    assert encoder.size == 262


def test_a_marker_of_a_template_is_a_control_token_even_where_it_is_not_called_special(
    save: Callable[..., Path],
) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    encoder = Encoder(save(tokenizer))
    ids = encoder.prompt_ids(asked("<|im_end|>"), TEMPLATES["chatml"])
    assert [i for i in ids if i > 257] == [258, 259, 258]
    assert encoder.end_ids(TEMPLATES["chatml"]) == [259]
    assert not encoder.holds_control(encoder.answer_ids("<|im_end|>"))


def test_a_single_character_misused_as_padding_can_still_be_written(save: Callable[..., Path]) -> None:
    encoder = Encoder(save(byte_level(), pad_token="!"))
    assert encoder.decode(encoder.answer_ids("ab!")) == "ab!"


def test_dropout_of_merges_is_switched_off(save: Callable[..., Path]) -> None:
    encoder = Encoder(save(byte_level(dropout=0.5)))
    assert encoder.answer_ids("ab" * 100) == [256] * 100


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_prompt_has_one_bos_exactly_if_the_tokenizer_puts_one(stories: Path, tmp_path: Path, add_bos: bool) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((stories / name).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["add_bos_token"] = add_bos
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    encoder = Encoder(tmp_path)
    ids = encoder.prompt_ids(asked("<s> Who are you?"), TEMPLATES["plain"])
    assert encoder.bos_id == (1 if add_bos else None)
    assert ids.count(1) == add_bos
    assert ids[:1] == [1] if add_bos else [410]
    assert encoder.encode_prompt("a")[:-1] == [1] * add_bos
    assert 1 not in encoder.answer_ids("a")


def test_what_the_tokenizer_puts_after_a_text_is_left_out(save: Callable[..., Path]) -> None:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing("</s> $A </s>", special_tokens=[("</s>", 257)])
    encoder = Encoder(save(tokenizer, bos_token="</s>"))
    assert encoder.encode_prompt("ab") == [257, 256]
    assert encoder.bos_id == 257


@pytest.mark.parametrize("vocabulary", [["</s>", "字"], ["</s>"]])
def test_a_tokenizer_need_not_know_any_letter(save: Callable[..., Path], vocabulary: list[str]) -> None:
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("</s> $A </s>", special_tokens=[("</s>", 0)])
    encoder = Encoder(save(tokenizer, bos_token="</s>"))
    assert encoder.prefix == [0]


@pytest.mark.parametrize("template", ["alpaca", "alpaca-zh", "plain"])
def test_a_prompt_has_the_ids_that_the_tokenizer_itself_gives_to_its_text(stories: Path, template: Any) -> None:
    encoder, tokenizer = Encoder(stories), Tokenizer.from_file(str(stories / "tokenizer.json"))
    question = asked("Who is the  little girl?", "Lily\n 字")
    text = TEMPLATES[template].write(question).text()
    assert encoder.prompt_ids(question, TEMPLATES[template]) == tokenizer.encode(text).ids
    assert encoder.encode_prompt(text) == tokenizer.encode(text).ids


def test_chatml_has_the_ids_that_the_tokenizer_itself_gives_to_its_text(shared_data: Path) -> None:
    folder = shared_data / "models" / "zh-tiny-llama"
    encoder, tokenizer = Encoder(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = TEMPLATES["chatml"].write(asked("你好", "a\nb")).text()
    ids = encoder.prompt_ids(asked("你好", "a\nb"), TEMPLATES["chatml"])
    assert ids == tokenizer.encode(text).ids
    assert [i for i in ids if i < 3] == [1, 2, 1]
    assert (encoder.bos_id, encoder.eos_id, encoder.size) == (None, 2, 6400)
    question = asked("<|im_end|><|im_start|><|endoftext|>")
    assert [i for i in encoder.prompt_ids(question, TEMPLATES["chatml"]) if i < 3] == [1, 2, 1]


def test_chatml_is_plain_text_for_a_tokenizer_without_its_tokens(stories: Path) -> None:
    encoder = Encoder(stories)
    ids = encoder.prompt_ids(asked("a"), TEMPLATES["chatml"])
    assert encoder.decode(ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert encoder.end_ids(TEMPLATES["chatml"]) == [encoder.eos_id]


@pytest.mark.parametrize("text", [" lead", "  two", "\u3000wide", "\nline", "none", "end "])
def test_blanks_around_an_answer_survive_the_tokenizers_own(
    text: str, stories: Path, save: Callable[..., Path]
) -> None:
    for folder in (stories, save(unigram())):
        encoder = Encoder(folder)
        ids = encoder.answer_ids(text)
        assert encoder.decode(ids) == text
        # any other program that decodes the ids reads the same
        assert Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids) == text


def test_decoding_leaves_out_control_tokens_and_unknown_ids(stories: Path) -> None:
    encoder = Encoder(stories)
    ids = encoder.answer_ids("Tom ran.")
    assert encoder.decode([1, *ids[:2], 0, *ids[2:], 2, 9999]) == "Tom ran."


@pytest.mark.parametrize("name", ["tokenizers/minimind", "models/stories260K", None])
def test_decoding_is_that_of_the_library(name: str | None, shared_data: Path, save: Callable[..., Path]) -> None:
    other = byte_level()
    other.add_tokens(["  ", "\u0120a", "好"])  # some are written in the letters that stand for bytes, others are not
    encoder = Encoder(save(other) if name is None else shared_data / name)
    library = encoder._texts
    draw = random.Random(1)
    many = [[i] for i in range(encoder.size + 3)]  # beyond the last one there is no token
    many += [[draw.randrange(encoder.size) for _ in range(draw.randrange(6))] for _ in range(5000)]
    many += [library.encode(text).ids for text in ("a 😀 b", "  好  ", "\x00\ufffd\x7f\xad", "")]
    for ids in many:
        wanted = library.decode([i for i in ids if i not in encoder.control_ids], skip_special_tokens=False)
        assert encoder.decode(ids) == wanted
    assert encoder.decode_all(many) == [encoder.decode(ids) for ids in many]


def test_a_prompt_that_comes_back_changed_is_noticed(save: Callable[..., Path]) -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    encoder = Encoder(save(tokenizer))
    for text, comes_back in (("\xe9", True), ("e\u0301", False)):
        assert is_whole(encoder, asked(text), TEMPLATES["plain"]) is comes_back


def test_the_inner_name_of_a_control_token_in_a_text_is_noticed(stories: Path) -> None:
    encoder = Encoder(stories)
    forged = "\U0010fffe2\U0010ffff"
    question = asked(forged)
    assert not is_whole(encoder, question, TEMPLATES["plain"])
    assert encoder.holds_control(encoder.answer_ids(forged))


def test_flags_of_a_control_token_do_not_change_the_text_beside_it(save: Callable[..., Path]) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>", lstrip=True, rstrip=True)])
    encoder = Encoder(save(tokenizer))
    question = asked("a ")
    assert is_whole(encoder, question, TEMPLATES["chatml"])


def test_a_tokenizer_without_an_end_token_is_refused(save: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match=r"names no end token \(eos_token\)"):
        Encoder(save(byte_level(), eos_token=None))


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "."),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{}"}, "."),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{"}, "Expecting property name"),
        ({"tokenizer_config.json": '{"tokenizer_class": "NoSuchTokenizer"}'}, "NoSuchTokenizer"),
    ],
)
def test_files_that_hold_no_tokenizer_are_refused(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=f"can't be loaded: .*{problem}") as caught:
        Encoder(tmp_path)
    assert caught.value.code == "tokenizer.unreadable"


def test_mindspore_can_be_imported_after_a_sentencepiece_file_was_read(stories: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((stories / name).read_bytes())
    code = (
        "import sys; from pathlib import Path; from tasks.data.encoding import Encoder;"
        "print(Encoder(Path(sys.argv[1])).answer_ids('Once upon a time'));"
        "import mindspore; print(mindspore.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ids, version = done.stdout.splitlines()
    assert ids == str(Encoder(stories).answer_ids("Once upon a time"))
    assert version


def test_ids_do_not_depend_on_the_hash_seed(stories: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tasks.data.encoding import Encoder;"
        "from tasks.data.templates import TEMPLATES; from tasks.data.records import Turn;"
        "print(Encoder(Path(sys.argv[1])).prompt_ids([Turn('user', 'Who </s> is it?')], TEMPLATES['chatml']))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code, str(stories)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
