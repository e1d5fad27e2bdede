"""The tokenizer inside a GGUF file, written as the files of a Hugging Face folder.

`tokenizer.ggml.model` says the kind: `gpt2` is byte-level BPE, whose splitting of the text `tokenizer.ggml.pre` names;
`llama` is SentencePiece BPE, whose merges follow from the scores. What is not known here by name is refused: another
splitting would give other ids than those the model was trained on, without a word.

Source: the splittings as in llama.cpp (src/llama-vocab.cpp) and the tokenizer.json of the models they are named after;
merges out of scores as in Transformers 4.57 (convert_slow_tokenizer.py).
"""

import json
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from schemas.errors import InputError
from tasks.models.gguf_file import GgufFile, damaged, open_gguf, unsupported

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
PREFIX = "tokenizer.ggml."
BLANK = "▁"
LONGEST_TOKEN = 4096  # characters; its merges are looked for at each of them

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_AFTER_NUMBERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE_NUMBERS = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"

# Splittings by their names: expressions that are applied one after the other, each to the parts left by the ones before
# ("digits": the library's own splitter), and last the bytes, with GPT-2's own expression where the flag says so.
_SPLITTINGS: dict[str, tuple[tuple[str, ...], bool]] = {
    "gpt-2": ((), True),
    "smollm": (("digits",), True),
    "default": ((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), False),
    "llama-bpe": ((rf"{_BEFORE_NUMBERS}|\p{{N}}{{1,3}}|{_AFTER_NUMBERS}",), False),
    "qwen2": ((rf"{_BEFORE_NUMBERS}|\p{{N}}|{_AFTER_NUMBERS}",), False),
}
_NFC = ("qwen2",)  # normalize first
_WHOLE_WORDS = ("llama-bpe",)  # take a word that is in the vocabulary without merging it
_BOS_BY_DEFAULT = ("llama-bpe", "llama")  # where the file does not say whether a text begins with BOS


def write_tokenizer(path: Path, folder: Path) -> tuple[str, ...]:
    """Write tokenizer.json and tokenizer_config.json of a GGUF file into an existing folder; gives their names.

    Raises:
        InputError: the file is damaged, has no tokenizer, or one of a kind that is not known here; or its parts do not
            belong together.
    """
    file = open_gguf(path)
    tokens, types = _vocabulary(file)
    kind = file.metadata[PREFIX + "model"]
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
        defaults = file.get(PREFIX + "pre", str)
    elif kind == "llama":
        tokenizer = _sentence_piece(file, tokens, types)
        defaults = kind
    else:
        raise unsupported(path, f"a tokenizer of the kind {kind!r}", "gpt2, llama")
    named = {field: _named(file, field, tokens) for field in ("bos", "eos", "unknown", "padding")}
    _add_tokens(tokenizer, tokens, types, [name for name in named.values() if name is not None])
    around = {
        "bos": file.get(PREFIX + "add_bos_token", bool, defaults in _BOS_BY_DEFAULT),
        "eos": file.get(PREFIX + "add_eos_token", bool, False),
    }
    _set_post_processor(tokenizer, kind, {field: named[field] for field, wanted in around.items() if wanted})
    # a name is filled in only where the file has it; Transformers takes what is absent for None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": named["bos"],
        "eos_token": named["eos"],
        "unk_token": named["unknown"],
        "pad_token": named["padding"],
        "add_bos_token": around["bos"],
        "add_eos_token": around["eos"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get("llama.context_length", int),
        "chat_template": file.get("tokenizer.chat_template", str),
    }
    present = {name: value for name, value in config.items() if value is not None}
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(present, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return "tokenizer.json", "tokenizer_config.json"


def _vocabulary(file: GgufFile) -> tuple[list[str], list[int]]:
    """Tokens and their types, by id."""
    if PREFIX + "model" not in file.metadata:
        raise InputError("tokenizer.missing", path=file.path, wanted=PREFIX + "model")
    tokens = _texts(file, "tokens")
    types = file.get(PREFIX + "token_type", list, [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise damaged(file.path, f"it has {len(tokens)} tokens, but {len(types)} types of tokens")
    if type(types[0]) is not int:  # a list is of one type
        raise damaged(file.path, f"its types of tokens are no whole numbers, the first is {types[0]!r:.60}")
    if (longest := max(map(len, tokens))) > LONGEST_TOKEN:
        raise damaged(file.path, f"one of its tokens has {longest} characters")
    if len(set(tokens)) != len(tokens):
        raise damaged(file.path, f"{len(tokens) - len(set(tokens))} of its tokens stand twice")
    return tokens, types


def _texts(file: GgufFile, name: str) -> list[str]:
    values: list[str] = file.get(PREFIX + name, list, [])
    if not values or type(values[0]) is not str:  # a list is of one type
        raise damaged(file.path, f"{PREFIX}{name} is absent or no list of texts")
    return values


def _named(file: GgufFile, field: str, tokens: Sequence[str]) -> str | None:
    number = file.get(f"{PREFIX}{field}_token_id", int)
    if number is None or number in (2**32 - 1, -1):  # a way to say: none
        return None
    if not 0 <= number < len(tokens):
        raise damaged(file.path, f"{PREFIX}{field}_token_id is {number}, but there are {len(tokens)} tokens")
    return tokens[int(number)]


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.get(PREFIX + "pre", str)
    if name not in _SPLITTINGS:
        found = f"a tokenizer that splits texts as {name!r}" if name else f"a tokenizer without {PREFIX}pre"
        raise unsupported(file.path, found, ", ".join(_SPLITTINGS))
    merges = [tuple(merge.split(" ")) for merge in _texts(file, "merges")]
    known = set(tokens)
    broken = [" ".join(merge) for merge in merges if len(merge) != 2 or not known.issuperset((*merge, "".join(merge)))]
    if broken:
        raise damaged(file.path, f"{len(broken)} merges make no token, the first is {broken[0][:60]!r}")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS))
    if name in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    expressions, gpt2 = _SPLITTINGS[name]
    steps = [
        pre_tokenizers.Digits(individual_digits=True)
        if expression == "digits"
        else pre_tokenizers.Split(Regex(expression), "isolated")
        for expression in expressions
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    for option in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if file.metadata.get(PREFIX + option):
            raise unsupported(file.path, f"a tokenizer with {PREFIX}{option}", "SentencePiece without it")
    scores = file.get(PREFIX + "scores", list, [])
    if len(scores) != len(tokens) or type(scores[0]) is not float:
        raise damaged(file.path, f"it has {len(tokens)} tokens, but {len(scores)} scores of tokens")
    if any(map(isnan, scores)):
        raise damaged(file.path, "a score of its tokens is no number")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(vocabulary, scores, types),
            unk_token=next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    prefix = file.get(PREFIX + "add_space_prefix", bool, True)
    blanks = normalizers.Replace(" ", BLANK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), blanks]) if prefix else blanks
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """The merges that make each normal token out of two others, best score first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, number in vocabulary.items():
        if types[number] not in (NORMAL, USER_DEFINED):
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in pairs if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(scores[number], len(left), len(right), left, right) for left, right in known]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [merge[3:] for merge in found]


def _add_tokens(tokenizer: Any, tokens: Sequence[str], types: Sequence[int], named: Sequence[str]) -> None:
    """Control tokens as special ones, user-defined tokens as ones that are found before the text is split."""
    from tokenizers import AddedToken

    special = {token for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN)} | set(named)
    user_defined = {token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED} - special
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens if token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens if token in user_defined])


def _set_post_processor(tokenizer: Any, kind: str, around: Mapping[str, str | None]) -> None:
    from tokenizers import processors

    steps = [processors.ByteLevel(trim_offsets=False)] if kind == "gpt2" else []
    before, after = around.get("bos"), around.get("eos")
    if before or after:
        single = [token for token in (before, "$A", after) if token]
        ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((before, after)) if token]
        pair = [
            token for token in (before, "$A", after, before and f"{before}:1", "$B:1", after and f"{after}:1") if token
        ]
        steps.append(processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids))
    if steps:
        tokenizer.post_processor = processors.Sequence(steps) if len(steps) > 1 else steps[0]
