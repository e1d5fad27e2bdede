"""Text to token ids and back, so that nothing in a user's text can become a control token.

A tokenizer looks for its special tokens in every text it is given, so `</s>` in a record would end the answer. To ask
it to leave them alone (`encode_special_tokens`) is not enough: a Unigram or WordLevel model, and a BPE model with
`ignore_merges`, has them in its vocabulary as well and finds them there. Here texts go through a copy of the tokenizer
in which every control token bears another name, made of two Unicode noncharacters around its id. Ids, merges,
normalizer and splitting stay the same; a control token comes into being only where a template asks for it by that
name. Added tokens that are not special (runs of blanks, for example) are vocabulary and stay.

Prompt and answer are encoded apart, each as a text of its own. So a tokenizer that writes a blank before every text
(SentencePiece: `▁`) writes one before the answer as well, and leaves it out again on decoding: the answer's ids decode
to exactly the answer, begin with the word-start tokens that the model knows, and are what the model writes after the
prompt. (Prompt and answer decoded in one piece show that blank between them.) That this holds is checked for every
record, see `masks`.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from schemas.errors import InputError
from tasks.data.templates import MARKERS, Control, Piece, Question, Template

# Tokenizer classes that add nothing to tokenizer.json; None: tokenizer_config.json names no class. They are loaded as
# such, since AutoTokenizer would look into the model's config.json, which is no part of the tokenizer.
GENERIC_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")


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
        self.eos_id: int = tokenizer.eos_token_id
        self.size: int = max(full.get_vocab(with_added_tokens=True).values()) + 1
        self._prefix = _ids_before_a_text(full)
        self.bos_id: int | None = tokenizer.bos_token_id if tokenizer.bos_token_id in self._prefix else None
        self._controls = _control_tokens(tokenizer)
        self._control_ids = frozenset(self._controls.values())
        self._texts = _without_controls(full, self._controls)

    def prompt_ids(self, question: Question, template: Template) -> list[int]:
        """Ids of a question's prompt, with what the tokenizer puts before a text (one BOS, where it does)."""
        texts = (self._name(piece) if isinstance(piece, Control) else piece for piece in template.prompt(question))
        return self.encode_prompt("".join(texts))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt that is plain text, with what the tokenizer puts before a text."""
        return [*self._prefix, *self._encode(text)]

    def answer_ids(self, text: str) -> list[int]:
        """Ids of an answer: no BOS, no end token."""
        ids = self._encode(text)
        if text.startswith(" ") and self.decode(ids) != text:
            # Metaspace adds its blank only to texts that don't begin with one, and so loses the text's own
            ids = self._encode(f" {text}")
        return ids

    def end_ids(self, template: Template) -> list[int]:
        """The one token that ends an answer: the template's where the tokenizer has it, else the end token."""
        return [self._controls.get(template.end_token, self.eos_id) if template.end_token else self.eos_id]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; control tokens, and ids that the tokenizer does not have, are left out."""
        text: str = self._texts.decode([i for i in ids if i not in self._control_ids], skip_special_tokens=False)
        return text

    def holds_control(self, ids: Iterable[int]) -> bool:
        """Whether a control token is among some ids."""
        return not self._control_ids.isdisjoint(ids)

    def writes_prompt(self, ids: Sequence[int], question: Question, template: Template) -> bool:
        """Whether the ids of a prompt are its control tokens and, between them, exactly its texts."""
        if list(ids[: len(self._prefix)]) != self._prefix:
            return False
        found: list[int | str] = []
        segment: list[int] = []
        for i in ids[len(self._prefix) :]:
            if i in self._control_ids:
                found += [self.decode(segment), i]
                segment = []
            else:
                segment.append(i)
        found.append(self.decode(segment))
        return [part for part in found if part != ""] == self._parts(template.prompt(question))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._texts.encode(text, add_special_tokens=False).ids
        return ids

    def _name(self, control: Control) -> str:
        found = self._controls.get(control.token)
        return control.token if found is None else _name_of(found)

    def _parts(self, pieces: Iterable[Piece]) -> list[int | str]:
        """What a prompt should consist of: ids of control tokens and the texts between them, joined, none empty."""
        parts: list[int | str] = []
        text = ""
        for piece in pieces:
            if isinstance(piece, Control) and piece.token in self._controls:
                parts += [text, self._controls[piece.token]]
                text = ""
            else:
                text += piece.token if isinstance(piece, Control) else piece
        return [part for part in (*parts, text) if part != ""]


def _load(folder: Path) -> Any:
    # transformers 4.57 would say on standard error that there is no PyTorch; nothing here needs it
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
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


def _ids_before_a_text(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text; what it puts after one is left to the caller."""
    encoded = tokenizer.encode("a")
    count = 0
    while encoded.special_tokens_mask[count]:
        count += 1
    return list(encoded.ids[:count])


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


def _name_of(control_id: int) -> str:
    return f"\U0010fffe{control_id}\U0010ffff"
