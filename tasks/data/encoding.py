"""Text to token ids and back, so that nothing in a user's text can become a control token.

A tokenizer looks for its special tokens in every text it is given, so `</s>` in a record would end the answer. To ask
it to leave them alone (`encode_special_tokens`) is not enough: a Unigram or WordLevel model, and a BPE model with
`ignore_merges`, has them in its vocabulary as well and finds them there. Here texts go through a copy of the tokenizer
in which every control token bears another name, made of two Unicode noncharacters around its id. Ids, merges,
normalizer and splitting stay the same; a control token comes into being only where a template asks for it by that
name. Added tokens that are not special (runs of blanks, for example) are vocabulary and stay.

Contexts and answers are encoded apart, each as a text of its own. So a tokenizer that writes a blank before every text
(SentencePiece: `▁`) writes one before the answer as well, and leaves it out again on decoding: the answer's ids decode
to exactly the answer, begin with the word-start tokens that the model knows, and are what the model writes after the
prompt. (Prompt and answer decoded in one piece show that blank between them.) A further context is encoded behind the
end token that it follows. That all texts come back from their ids is checked for every record.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import InputError
from tasks.data.records import Turn
from tasks.data.templates import MARKERS, Control, Piece, Script, Template

# Tokenizer classes that add nothing to tokenizer.json; None: tokenizer_config.json names no class. They are loaded as
# such, since AutoTokenizer would look into the model's config.json, which is no part of the tokenizer.
GENERIC_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True)
class Encoded:
    """The ids of a script.

    Args:
        contexts: of each context; the first begins with what the tokenizer puts before a text.
        answers: of each answer, without BOS and end token.
        contexts_are_whole: whether they are the contexts' control tokens and, between them, exactly their texts.
        answers_are_whole: whether they decode to exactly the answers and hold no control token.
    """

    contexts: list[list[int]]
    answers: list[list[int]]
    contexts_are_whole: bool
    answers_are_whole: bool


class Encoder:
    """The tokenizer of a run.

    Args:
        folder: the tokenizer files; read from the disk only, and no code of theirs is run.

    Raises:
        InputError: the files can't be read (tokenizer.unreadable), or name no end token (tokenizer.no_end_token).
    """

    def __init__(self, folder: Path) -> None:
        tokenizer = _load(folder)
        if tokenizer.eos_token_id is None:
            raise InputError("tokenizer.no_end_token", path=folder)
        full = tokenizer.backend_tokenizer
        self.folder = folder
        self.chat_template: str | None = _chat_template(tokenizer)
        self.special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)  # by their names: eos_token, ...
        self.eos_id: int = tokenizer.eos_token_id
        self.size: int = max(full.get_vocab(with_added_tokens=True).values()) + 1
        self.pad_id: int | None = tokenizer.pad_token_id
        self.prefix = _ids_before_a_text(full)  # what stands before every text
        self.bos_id: int | None = tokenizer.bos_token_id if tokenizer.bos_token_id in self.prefix else None
        self._controls = _control_tokens(tokenizer)
        self._control_names = {i: name for name, i in self._controls.items()}
        self.control_ids = frozenset(self._controls.values())  # tokens that no user's text may turn into
        self._texts = _without_controls(full, self._controls)
        self._bytes = _bytes_of_tokens(self._texts)

    def encode(self, scripts: Sequence[Script], end_id: int) -> list[Encoded]:
        """The ids of some scripts; many at once are faster than one by one.

        Args:
            scripts: contexts and answers.
            end_id: the token that ends an answer.
        """
        answers, answers_whole = self._encode_answers([text for script in scripts for text in script.answers])
        contexts, contexts_whole = self._encode_contexts(
            [(pieces, None if k == 0 else end_id) for script in scripts for k, pieces in enumerate(script.contexts)]
        )
        encoded, answer, context = [], 0, 0
        for script in scripts:
            these, those = slice(context, context + len(script.contexts)), slice(answer, answer + len(script.answers))
            whole = all(contexts_whole[these]), all(answers_whole[those])
            encoded.append(Encoded(contexts[these], answers[those], *whole))
            context, answer = these.stop, those.stop
        return encoded

    def prompt_ids(self, turns: Sequence[Turn], template: Template, system: str | None = None) -> list[int]:
        """Ids of a conversation that the assistant is to go on with: what it was trained to answer behind.

        Args:
            turns: the last is the user's.
            template: how they are written.
            system: a system turn for a conversation that has none.

        Raises:
            TurnsError: the template has no form for the turns.
        """
        script = template.write(with_system(turns, system))
        end = self.end_ids(template)
        (encoded,) = self.encode([script], end[0])
        ids = list(encoded.contexts[0])
        for answer, context in zip(encoded.answers, encoded.contexts[1:], strict=True):
            ids += [*answer, *end, *context]
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt that is plain text, with what the tokenizer puts before a text."""
        return [*self.prefix, *self._encode(text)]

    def answer_ids(self, text: str) -> list[int]:
        """Ids of an answer: no BOS, no end token."""
        (ids,), _ = self._encode_answers([text])
        return ids

    def end_ids(self, template: Template) -> list[int]:
        """The one token that ends an answer: the template's where the tokenizer has it, else the end token."""
        return [self._controls.get(template.end_token, self.eos_id) if template.end_token else self.eos_id]

    def split_controls(self, text: str) -> list[Piece]:
        """The pieces of a text that a template wrote: its control tokens, and what stands between them."""
        if not self._controls:
            return [text] if text else []
        longest_first = sorted(self._controls, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        return [Control(part) if place % 2 else part for place, part in enumerate(parts) if part]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; control tokens, and ids that the tokenizer does not have, are left out."""
        return self.decode_all([list(ids)])[0]

    def decode_all(self, many: Sequence[Sequence[int]]) -> list[str]:
        """As `decode`, for many at once."""
        return self._decode_batch(
            [ids if self.control_ids.isdisjoint(ids) else [i for i in ids if i not in self.control_ids] for ids in many]
        )

    def control_name(self, token: int) -> str | None:
        """How a control token is written; None: the id is none."""
        return self._control_names.get(token)

    def holds_control(self, ids: Iterable[int]) -> bool:
        """Whether a control token is among some ids."""
        return not self.control_ids.isdisjoint(ids)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._texts.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._texts.encode_batch_fast(texts, add_special_tokens=False)]

    def _decode_batch(self, many: Sequence[Sequence[int]]) -> list[str]:
        """The text of some ids, control tokens by their inner names."""
        if self._bytes is not None:
            try:
                return [b"".join(map(self._bytes.__getitem__, ids)).decode() for ids in many]
            except (KeyError, UnicodeDecodeError):
                pass  # an id that the tokenizer does not have, or part of a character: as the library has it
        texts: list[str] = self._texts.decode_batch(many, skip_special_tokens=False)
        return texts

    def _encode_answers(self, texts: Sequence[str]) -> tuple[list[list[int]], list[bool]]:
        """Ids of some answers, and whether each decodes to its text and holds no control token."""
        ids = self._encode_batch(texts)
        decoded = self._decode_batch(ids)
        for k, text in enumerate(texts):
            if decoded[k] != text and text.startswith(" "):
                # Metaspace adds its blank only to texts that don't begin with one, and so loses the text's own
                ids[k] = self._encode(f" {text}")
                (decoded[k],) = self._decode_batch(ids[k : k + 1])
        whole = [
            found == text and not self.holds_control(each)
            for each, found, text in zip(ids, decoded, texts, strict=True)
        ]
        return ids, whole

    def _encode_contexts(
        self, contexts: Sequence[tuple[Sequence[Piece], int | None]]
    ) -> tuple[list[list[int]], list[bool]]:
        """Ids of some contexts, each with the end token that it follows, and whether each is written exactly."""
        names = [_name_of(end) if end in self.control_ids else "" for _, end in contexts]  # a single `!` has none
        texts = ["".join(map(self._spelled, pieces)) for pieces, _ in contexts]
        encoded = self._encode_batch([name + text for name, text in zip(names, texts, strict=True)])
        encoded = [ids[1:] if name else ids for name, ids in zip(names, encoded, strict=True)]
        decoded = self._decode_batch(encoded)
        whole = []
        for (pieces, end), text, found, ids in zip(contexts, texts, decoded, encoded, strict=True):
            controls = [i for i in ids if i in self.control_ids]
            is_same = found == text and controls == [part for part in map(self._control_id, pieces) if part is not None]
            whole.append(is_same or self._writes(ids, pieces))
            if end is None and ids[: len(self.prefix)] != self.prefix:
                ids[:0] = self.prefix
        return encoded, whole

    def _writes(self, ids: Sequence[int], pieces: Sequence[Piece]) -> bool:
        """Whether ids are the control tokens of a context and, between them, exactly its texts.

        The texts are looked at one by one, since a tokenizer may leave out a blank at the start of each.
        """
        found: list[int | str] = []
        segment: list[int] = []
        for i in ids:
            if i in self.control_ids:
                found += [self.decode(segment), i]
                segment = []
            else:
                segment.append(i)
        found.append(self.decode(segment))
        return [part for part in found if part != ""] == self._parts(pieces)

    def _spelled(self, piece: Piece) -> str:
        """A piece as the inner tokenizer takes it."""
        if isinstance(piece, str):
            return piece
        found = self._control_id(piece)
        return piece.token if found is None else _name_of(found)

    def _control_id(self, piece: Piece) -> int | None:
        """The token of a piece that is one; None for texts, and for a control token that the tokenizer lacks."""
        if isinstance(piece, str):
            return None
        return self._controls.get(piece.token) if piece.token else self.bos_id

    def _parts(self, pieces: Iterable[Piece]) -> list[int | str]:
        """What a context should consist of: ids of control tokens and the texts between them, joined, none empty."""
        parts: list[int | str] = []
        text = ""
        for piece in pieces:
            found = self._control_id(piece)
            if found is not None:
                parts += [text, found]
                text = ""
            else:
                text += piece.token if isinstance(piece, Control) else piece
        return [part for part in (*parts, text) if part != ""]


def with_system(turns: Sequence[Turn], system: str | None) -> Sequence[Turn]:
    """A conversation with a system turn in front, where it has none of its own."""
    return turns if system is None or turns[0].role == "system" else (Turn("system", system), *turns)


def _load(folder: Path) -> Any:
    # transformers 4.57 would say on standard error that there is no PyTorch; nothing here needs it
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # a SentencePiece file is read by protobuf, whose compiled form makes a later import of MindSpore 2.7.0 crash
    os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
        generic = config.get("tokenizer_class") in GENERIC_CLASSES
        loader = PreTrainedTokenizerFast if generic else AutoTokenizer
        tokenizer = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it can't read
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError("tokenizer.unreadable", path=folder, problem=problem) from error
    if not tokenizer.is_fast:
        problem = f"{type(tokenizer).__name__} has no form for the tokenizers library"
        raise InputError("tokenizer.unreadable", path=folder, problem=problem)
    return tokenizer


def _chat_template(tokenizer: Any) -> str | None:
    """The template of chats; of several by name, the one that is called `default`."""
    found = tokenizer.chat_template
    return found.get("default") if isinstance(found, dict) else found


def _ids_before_a_text(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text; what it puts after one is left to the caller."""
    for text in ("a", *tokenizer.get_vocab(with_added_tokens=False)):  # the first that has a token of its own
        encoded = tokenizer.encode(text)
        if 0 in encoded.special_tokens_mask:
            return list(encoded.ids[: encoded.special_tokens_mask.index(0)])
    return []


def _control_tokens(tokenizer: Any) -> dict[str, int]:
    """Ids of all tokens that no user's text may turn into, by their text.

    Special tokens, those that the tokenizer's configuration names (end, padding, ...), and the markers of templates. A
    single character is none of them even if a configuration misuses it (`!` for padding): texts need it.
    """
    named = MARKERS.union(tokenizer.all_special_tokens)
    return {
        token.content: i
        for i, token in tokenizer.added_tokens_decoder.items()
        if len(token.content) > 1 and (token.special or token.content in named)
    }


def _without_controls(tokenizer: Any, controls: dict[str, int]) -> Any:
    """A copy of a tokenizers.Tokenizer in which the control tokens bear names that no text holds.

    BPE dropout is switched off as well: it would give other ids each time.
    """
    from tokenizers import Tokenizer

    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        if token["content"] in controls:
            token["content"] = _name_of(token["id"])
            # the flags that would change the text around it, or its name
            token.update(lstrip=False, rstrip=False, single_word=False, normalized=False)
    names = {content: _name_of(i) for content, i in controls.items()}
    model = document["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
    else:  # Unigram: pairs of piece and score, the id is the place
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [
            [left, right]
            for left, right in model["merges"]
            if left + right not in names and left not in names and right not in names
        ]
    if "dropout" in model:
        model["dropout"] = None
    return Tokenizer.from_str(json.dumps(document))


def _bytes_of_tokens(tokenizer: Any) -> dict[int, bytes] | None:
    """What each token adds to a text, where texts are nothing but the bytes of their tokens; None for other tokenizers.

    Joining them is several times as fast as the library's decoding.
    Source: the byte-level alphabet of GPT-2, and the decoder ByteLevel of the tokenizers library, where a token with a
    character outside of the alphabet stands for its own UTF-8.
    """
    from tokenizers import decoders

    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that are written as themselves
    others = (byte for byte in range(256) if byte not in shown)
    byte_of = {byte: byte for byte in shown} | {0x100 + place: byte for place, byte in enumerate(others)}

    def spelled(token: str) -> bytes:
        is_in_alphabet = byte_of.keys() >= set(map(ord, token))
        return token.translate(byte_of).encode("latin-1") if is_in_alphabet else token.encode()

    tokens = tokenizer.get_vocab(with_added_tokens=False)
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    return {i: spelled(token) for token, i in (*tokens.items(), *added.items())}


def _name_of(control_id: int) -> str:
    return f"\U0010fffe{control_id}\U0010ffff"
