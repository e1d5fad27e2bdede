"""Generating text, token by token, from any model with a KV cache: prompts in chunks, stopping, timing.

A model comes in as a *step*: token ids (1, T) and their positions (T,) in, logits (T, V) out, its cache inside. It is
only called with two lengths, `prefill_chunk` and 1, because a graph of free length pays 0.2 to 0.6 s and memory for
each new one.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError, InputError, StoreError
from schemas.reports import MINDIR_SPEC_VERSION, MindirSpec
from tasks.models.sampling import check_settings, sample

if TYPE_CHECKING:
    from tasks.models.decoder import Decoder

Ids = NDArray[np.int32]
Logits = NDArray[np.float32]
Step = Callable[[Ids, Ids], Logits]

SPEC_FILE = "mindtune.json"


@dataclass(frozen=True)
class Generated:
    """One answer.

    Args:
        ids: the new tokens, without the stop token.
        first_token_seconds: from the call to the first token, the whole prompt included.
        decode_seconds: from the first token to the last.
        stopped: whether a stop token ended it, not the length.
    """

    ids: tuple[int, ...]
    first_token_seconds: float
    decode_seconds: float
    stopped: bool

    @property
    def decoded(self) -> int:
        """Tokens made in `decode_seconds`: all but the first, and the stop token too."""
        return len(self.ids) - 1 + self.stopped


def check_prompt(ids: Sequence[int], new: int, cache_length: int, vocabulary: int) -> None:
    """Refuse a prompt that a model can't take, before any work.

    Args:
        ids: the prompt.
        new: tokens that are to follow it.
        cache_length: tokens that the cache holds.
        vocabulary: V.

    Raises:
        InputError: no token, an id outside the vocabulary, or more tokens than the cache holds.
    """
    if len(ids) == 0:
        raise InputError("generate.setting", name="The prompt", wanted="at least one token long", value="empty")
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        wanted = f"0 to {vocabulary - 1}"
        raise InputError("generate.setting", name="A token of the prompt", wanted=wanted, value=wrong)
    if len(ids) + new > cache_length:
        raise InputError("generate.too_long", prompt=len(ids), new=new, cache=cache_length)


def read_mindir_spec(folder: Path) -> MindirSpec:
    """What an exported folder says about its graph.

    Raises:
        StoreError: it was written in another format version.
    """
    path = folder / SPEC_FILE
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format_version") != MINDIR_SPEC_VERSION:
        found = document.get("format_version")
        raise StoreError("store.version", path=path, found=found, known=MINDIR_SPEC_VERSION)
    return MindirSpec.model_validate(document)


class Generator:
    """Answers prompts with one model, one at a time: the KV cache belongs to the answer being made.

    Args:
        step: the model; see the module.
        cache_length: tokens that its cache holds, prompt and answer together.
        prefill_chunk: tokens of a prompt that go through it at once.
        vocabulary: V.
    """

    def __init__(self, step: Step, *, cache_length: int, prefill_chunk: int, vocabulary: int) -> None:
        self.cache_length = cache_length
        self.prefill_chunk = prefill_chunk
        self.vocabulary = vocabulary
        self._step = step
        self._held: list[int] = []  # the tokens in the cache, as far as they are known

    @classmethod
    def from_mindir(cls, folder: Path) -> Self:
        """The model that the stage `export` left in a folder, compiled for both lengths.

        Raises:
            StoreError: the folder was written in another format version.
        """
        import mindspore

        spec = read_mindir_spec(folder)
        graph = mindspore.nn.GraphCell(mindspore.load(str(folder / spec.graph_file)))
        return cls(
            _step_of(graph),
            cache_length=spec.cache_length,
            prefill_chunk=spec.prefill_chunk,
            vocabulary=spec.vocabulary,
        )._compiled()

    @classmethod
    def from_decoder(cls, decoder: "Decoder", cache_length: int, prefill_chunk: int) -> Self:
        """A decoder, with or without adapter, sharing its weights; compiled for both lengths."""
        from tasks.models.cached import CachedDecoder

        return cls(
            _step_of(CachedDecoder(decoder, cache_length, prefill_chunk)),
            cache_length=cache_length,
            prefill_chunk=prefill_chunk,
            vocabulary=decoder.spec.vocabulary,
        )._compiled()

    def logits(self, ids: Sequence[int]) -> Logits:
        """Logits (T, V) after each token of a text, from an empty cache.

        Raises:
            InputError: no token, an id outside the vocabulary, or more tokens than the cache holds.
        """
        return np.concatenate(list(self.prefill(ids)))

    def prefill(self, ids: Sequence[int], reuse: bool = False) -> Iterator[Logits]:
        """Fill the cache with a text; gives the logits (n, V) of each chunk's n tokens, in order.

        The cache holds the text once the last chunk was taken. The last chunk is padded; what the padding leaves in the
        cache is at later positions, which no token looks at before they are overwritten.

        Args:
            ids: the text.
            reuse: leave out the first chunks where the cache holds their tokens already; False starts anew.

        Raises:
            InputError: no token, an id outside the vocabulary, or more tokens than the cache holds.
        """
        check_prompt(ids, 0, self.cache_length, self.vocabulary)
        chunk = self.prefill_chunk
        first = self._common(ids[:-1]) // chunk * chunk if reuse else 0
        del self._held[first:]
        for start in range(first, len(ids), chunk):
            part = ids[start : start + chunk]
            padded = np.zeros((1, chunk), np.int32)
            padded[0, : len(part)] = part
            logits = self._step(padded, np.arange(start, start + chunk, dtype=np.int32))[: len(part)]
            self._held += part
            yield logits

    def decode(self, token: int, position: int) -> Logits:
        """Add one token to the cache, at the position after those it holds; gives the logits (V,) after it."""
        del self._held[position:]
        logits: Logits = self._step(np.array([[token]], np.int32), np.array([position], np.int32))[0]
        self._held.append(token)
        return logits

    def generate(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_ids: Collection[int] = (),
        *,
        on_token: Callable[[int], object] | None = None,
        reuse: bool = False,
    ) -> Generated:
        """Go on with a prompt until a stop token or the length.

        Args:
            ids: the prompt.
            max_new_tokens: at least 1.
            seed: the same seed and logits give the same answer.
            stop_ids: tokens that end the answer.
            on_token: called with each token of the answer as soon as it is known; what it raises ends the answer, and
                the generator can be used again.
            reuse: take what the cache holds of the prompt, from the prompts and answers before; the logits may differ
                in rounding from those of a prompt computed anew.

        Raises:
            ConfigError: a setting is out of range.
            InputError: the prompt is empty, holds an id outside the vocabulary, or does not fit the cache together with
                the new tokens.
            StageError: the model's logits are not finite.
        """
        check_settings(temperature, top_p)
        if max_new_tokens < 1:
            raise ConfigError("generate.setting", name="max_new_tokens", wanted="at least 1", value=max_new_tokens)
        check_prompt(ids, max_new_tokens, self.cache_length, self.vocabulary)
        random = np.random.Generator(np.random.Philox(seed))
        began = time.perf_counter()
        for chunk in self.prefill(ids, reuse):
            logits = chunk[-1]
        token = sample(logits, temperature, top_p, random)
        first = time.perf_counter()
        new: list[int] = []
        while not (stopped := token in stop_ids):
            new.append(token)
            if on_token is not None:
                on_token(token)
            if len(new) == max_new_tokens:
                break
            logits = self.decode(token, len(ids) + len(new) - 1)
            token = sample(logits, temperature, top_p, random)
        return Generated(
            ids=tuple(new),
            first_token_seconds=first - began,
            decode_seconds=time.perf_counter() - first,
            stopped=stopped,
        )

    def _common(self, ids: Sequence[int]) -> int:
        """How many of the first tokens the cache holds."""
        pairs = zip(ids, self._held, strict=False)
        return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(self._held)))

    def _compiled(self) -> Self:
        """Call both lengths once, so that no answer's time holds the compilation."""
        list(self.prefill([0]))
        self.decode(0, 1)
        return self


def _step_of(cell: Any) -> Step:
    """A MindSpore Cell as a step between NumPy arrays."""
    import mindspore

    def step(ids: Ids, positions: Ids) -> Logits:
        logits: Logits = cell(mindspore.Tensor(ids), mindspore.Tensor(positions)).asnumpy()
        return logits

    return step
