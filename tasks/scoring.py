"""How well a model says known rows: loss, perplexity and token accuracy, from its logits, in NumPy.

T tokens, V vocabulary. Labels are the token ids themselves (`schemas/tables.py`); the shift by one is made here, once.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.tables import IGNORE_LABEL

LARGEST_EXPONENT = 700.0  # exp of more is no finite float64


@dataclass(frozen=True)
class Score:
    """Sums over label tokens; adding two gives the score of both texts, each token weighing the same.

    Args:
        loss_sum: negative log-likelihood, nats.
        correct: label tokens that were the model's most likely ones.
        tokens: label tokens.
    """

    loss_sum: float = 0.0
    correct: int = 0
    tokens: int = 0

    def __add__(self, other: "Score") -> "Score":
        return Score(self.loss_sum + other.loss_sum, self.correct + other.correct, self.tokens + other.tokens)

    @property
    def loss(self) -> float:
        """Nats per label token."""
        return self.loss_sum / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the loss; kept finite where a broken model's loss is too large for it."""
        return math.exp(min(self.loss, LARGEST_EXPONENT))

    @property
    def accuracy(self) -> float:
        """Share of label tokens that were the model's most likely ones."""
        return self.correct / self.tokens


def score_row(chunks: Iterable[NDArray[np.float32]], labels: NDArray[np.int32]) -> Score:
    """The score of one row.

    Args:
        chunks: logits (n, V) after each token, in order, T in all; the logits after token t are held against label
            t + 1, so those after the last token are not used.
        labels: (T,), token ids where they count, IGNORE_LABEL elsewhere.
    """
    total = Score()
    begin = 1
    for chunk in chunks:
        targets = labels[begin : begin + len(chunk)]
        begin += len(chunk)
        counted = np.flatnonzero(targets != IGNORE_LABEL)
        if counted.size == 0:
            continue
        logits, wanted = chunk[counted].astype(np.float64), targets[counted]
        best = logits.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(logits - best).sum(axis=1)) + best[:, 0]
        losses = log_sums - logits[np.arange(len(wanted)), wanted]
        total += Score(float(losses.sum()), int((logits.argmax(axis=1) == wanted).sum()), len(wanted))
    return total
