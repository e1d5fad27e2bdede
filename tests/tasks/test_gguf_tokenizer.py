import json
import random

import gguf
import numpy as np
import pytest
from gguf_files import byte_level_metadata, sentence_piece_metadata
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from schemas.errors import InputError
from tasks.gguf_tokenizer import write_tokenizer
from tasks.tokenizer_files import check_tokenizer, open_tokenizer

TEXTS = [
    "Hello, world! I'll say WE'VE got it's   three blanks",
    "2024 and 1234567 paid $3.50 (10%) ½ ² Ⅷ",
    " tab\tand\n\n\r\nlines  \n end ",
    "昇腾处理器，标点。é é naïve 👩‍👩‍👧",
    "x=y+1;//comment snake_case camelCase <=> ^~|",
    "",
]


@pytest.fixture
def write(tmp_path):
    """A function that writes a GGUF file with a tokenizer and no model worth the name."""

    def written(metadata):
        writer = gguf.GGUFWriter(tmp_path / "tokenizer.gguf", "llama")
        for name, value in metadata.items():
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            elif value is not None:
                writer.add_array(name, value)
        writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "tokenizer.gguf"

    return written


@pytest.fixture
def opened(write, tmp_path):
    """A function from metadata to the tokenizer that is written for them, and its configuration."""

    def made(metadata):
        folder = tmp_path / "written"
        folder.mkdir(exist_ok=True)
        assert write_tokenizer(write(metadata), folder) == ("tokenizer.json", "tokenizer_config.json")
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return Tokenizer.from_file(str(folder / "tokenizer.json")), config

    return made


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A tokenizer.json of byte-level BPE, trained on the texts above."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    path = tmp_path_factory.mktemp("byte-level") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_sentence_piece_comes_out_as_the_models_own_tokenizer_json(stories, opened, tmp_path):
    opened(sentence_piece_metadata(stories / "tokenizer.model"))
    written = json.loads((tmp_path / "written" / "tokenizer.json").read_text(encoding="utf-8"))
    assert written == json.loads((stories / "tokenizer.json").read_text(encoding="utf-8"))


def test_sentence_piece_without_a_blank_before_the_text(stories, opened):
    tokenizer, _ = opened(
        sentence_piece_metadata(stories / "tokenizer.model") | {"tokenizer.ggml.add_space_prefix": False}
    )
    ids = tokenizer.encode("Lily and Tom", add_special_tokens=False)
    assert not ids.tokens[0].startswith("▁")
    assert tokenizer.decode(ids.ids) == "Lily and Tom"


def theirs(pre):
    """The splitter that Transformers builds for the model that a splitting is named after."""
    from transformers.convert_slow_tokenizer import Qwen2Converter, TikTokenConverter

    if pre == "qwen2":
        return Qwen2Converter(None).converted({"a": 0, "b": 1, "ab": 2}, [("a", "b")]).pre_tokenizer
    if pre == "llama-bpe":
        pattern = TikTokenConverter().pattern  # its default is Llama 3's
        from tokenizers import Regex

        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    steps = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_texts_are_split_as_by_the_models_own_tokenizer(byte_level, opened, pre):
    tokenizer, _ = opened(byte_level_metadata(byte_level, pre))
    for text in TEXTS:
        assert tokenizer.pre_tokenizer.pre_tokenize_str(text) == theirs(pre).pre_tokenize_str(text), text


def test_the_default_splitting_parts_signs_words_and_numbers_of_three(byte_level, opened):
    tokenizer, _ = opened(byte_level_metadata(byte_level, "default"))
    parts = [part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str("Tom's 12345, a<=b")]
    assert parts == ["Tom", "'", "s", "Ġ", "123", "45", ",", "Ġa", "<=", "b"]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "default", "llama-bpe", "qwen2"])
def test_every_text_comes_back(byte_level, opened, pre):
    tokenizer, _ = opened(byte_level_metadata(byte_level, pre))
    for text in TEXTS:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)
        assert back == (text.replace("é", "é") if pre == "qwen2" else text)  # NFC


def test_a_byte_level_tokenizer_gives_the_ids_of_the_one_it_was_made_from(byte_level, opened, shared_data):
    for source in (byte_level, shared_data / "tokenizers" / "minimind" / "tokenizer.json"):
        original = Tokenizer.from_file(str(source))
        tokenizer, _ = opened(byte_level_metadata(source, "gpt-2"))
        for text in TEXTS:
            assert tokenizer.encode(text).ids == original.encode(text, add_special_tokens=False).ids


def test_control_tokens_are_special_and_user_defined_ones_are_found_whole(byte_level, opened):
    metadata = byte_level_metadata(byte_level, "gpt-2")
    metadata["tokenizer.ggml.tokens"] += ["wxyz!"]
    metadata["tokenizer.ggml.token_type"] += [4]
    tokenizer, _ = opened(metadata)
    end, whole = len(metadata["tokenizer.ggml.tokens"]) - 2, len(metadata["tokenizer.ggml.tokens"]) - 1
    ids = tokenizer.encode("a<|end|>wxyz!").ids
    assert ids[-2:] == [end, whole]
    assert tokenizer.decode(ids) == "awxyz!"


def test_names_flags_and_chat_template_are_written(byte_level, opened):
    metadata = byte_level_metadata(byte_level, "gpt-2", add_bos_token=True, add_eos_token=True, bos_token_id=0)
    tokenizer, config = opened(metadata | {"tokenizer.chat_template": "{{ messages }}", "llama.context_length": 77})
    assert config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": metadata["tokenizer.ggml.tokens"][0],
        "eos_token": "<|end|>",
        "add_bos_token": True,
        "add_eos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 77,
        "chat_template": "{{ messages }}",
    }
    end = metadata["tokenizer.ggml.eos_token_id"]
    assert (tokenizer.encode("a").ids[0], tokenizer.encode("a").ids[-1]) == (0, end)


@pytest.mark.parametrize(("pre", "before"), [("gpt-2", []), ("qwen2", []), ("llama-bpe", [0])])
def test_bos_without_a_flag_follows_the_kind(byte_level, opened, pre, before):
    tokenizer, _ = opened(byte_level_metadata(byte_level, pre, bos_token_id=0))
    assert tokenizer.encode("").ids == before


def test_the_encoder_opens_it_and_the_folder_is_gone_afterwards(stories, write):
    from tasks.data.encoding import Encoder

    path = write(sentence_piece_metadata(stories / "tokenizer.model"))
    with open_tokenizer(path) as folder:
        encoder, own = Encoder(folder), Encoder(stories)
    assert not folder.exists()
    assert encoder.encode_prompt("Once upon a time") == own.encode_prompt("Once upon a time") == [1, 403, 407, 261, 378]
    assert (encoder.bos_id, encoder.eos_id, encoder.size) == (1, 2, 512)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": None}, r"holds no tokenizer: none of tokenizer\.ggml\.model"),
        ({"model": "bert"}, "a tokenizer of the kind 'bert'; supported: gpt2, llama"),
        ({"pre": "viking"}, "splits texts as 'viking'; supported: gpt-2, smollm"),
        ({"pre": None}, r"without tokenizer\.ggml\.pre"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is absent"),
        ({"token_type": [1, 1]}, "tokens, but 2 types"),
        ({"merges": ["a b c"]}, "1 merges make no token, the first is 'a b c'"),
        ({"merges": ["! zzz"]}, "1 merges make no token"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is absent"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000, but there are"),
        ({"eos_token_id": "two"}, "not of the type int"),
        ({"model": "llama"}, "but 0 scores"),
    ],
)
def test_what_is_no_known_tokenizer_is_refused_by_name(byte_level, write, changes, problem):
    metadata = byte_level_metadata(byte_level, "gpt-2", **changes)
    with pytest.raises(InputError, match=problem):
        check_tokenizer(write(metadata))


def test_an_option_of_sentence_piece_that_is_not_built_is_refused(stories, write):
    metadata = sentence_piece_metadata(stories / "tokenizer.model")
    with pytest.raises(InputError, match="remove_extra_whitespaces"):
        check_tokenizer(write(metadata | {"tokenizer.ggml.remove_extra_whitespaces": True}))


def test_a_token_twice_is_refused(byte_level, write):
    metadata = byte_level_metadata(byte_level, "gpt-2")
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][6]
    with pytest.raises(InputError, match="1 of its tokens stand twice"):
        check_tokenizer(write(metadata))


def test_tokens_types_and_scores_have_to_be_usable(stories, write):
    metadata = sentence_piece_metadata(stories / "tokenizer.model")
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    with pytest.raises(InputError, match="one of its tokens has 5000 characters"):
        check_tokenizer(write(metadata | {"tokenizer.ggml.tokens": ["a" * 5000, *tokens[1:]]}))
    with pytest.raises(InputError, match=r"no whole numbers, the first is 1\.0"):
        check_tokenizer(write(metadata | {"tokenizer.ggml.token_type": [1.0] * len(tokens)}))
    with pytest.raises(InputError, match="a score of its tokens is no number"):
        check_tokenizer(write(metadata | {"tokenizer.ggml.scores": [*scores[:-1], float("nan")]}))


def test_a_changed_byte_gives_a_tokenizer_or_an_input_error(stories, write):
    path = write(sentence_piece_metadata(stories / "tokenizer.model"))
    content, draw, refused = path.read_bytes(), random.Random(2), 0
    for _ in range(200):
        changed = bytearray(content)
        for _ in range(3):
            changed[draw.randrange(len(content))] = draw.choice((0, 1, 3, 0x7F, 0x80, 0xFF))
        path.write_bytes(changed)
        try:
            check_tokenizer(path)
        except InputError:
            refused += 1
    assert refused > 50
