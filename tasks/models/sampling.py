"""Drawing a token from logits, in NumPy float64: temperature first, then top-p. No MindSpore."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError, StageError

ROUNDING = 1e-12  # a sum of probabilities reaches top_p although rounding left it this much short


def check_settings(temperature: float, top_p: float) -> None:
    """Refuse settings that give no distribution to draw from.

    Raises:
        ConfigError: temperature is below 0 or not finite; top_p is not above 0 and at most 1.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError("generate.setting", name="temperature", wanted="a number from 0 on", value=temperature)
    if not 0 < top_p <= 1:
        raise ConfigError("generate.setting", name="top_p", wanted="above 0 and at most 1", value=top_p)


def sample(logits: NDArray[Any], temperature: float, top_p: float, random: np.random.Generator) -> int:
    """Draw one token.

    The logits are divided by the temperature first; then the smallest set of most likely tokens whose probabilities sum
    up to top_p is kept, at least one. Tokens of equal probability are kept in the order of their ids.

    Args:
        logits: (V,), any float type; -inf forbids a token.
        temperature: 0 takes the most likely token, the first of equal ones.
        top_p: 1 keeps all tokens.
        random: gives one uniform number a call, none when the temperature is 0.
    Raises:
        ConfigError: see `check_settings`.
        StageError: a logit is NaN or +inf, or all are -inf.
    """
    check_settings(temperature, top_p)
    scores = np.asarray(logits, dtype=np.float64)
    best = scores.max()
    if not math.isfinite(best):  # the largest is NaN if any is
        raise StageError("generate.not_finite", value=best)
    if temperature == 0:
        return int(scores.argmax())
    with np.errstate(over="ignore"):  # a tiny temperature makes -inf of the others, and exp(-inf) is right: 0
        weights = np.exp((scores - best) / temperature)
    probabilities = weights / weights.sum()
    if top_p == 1:
        return _draw(np.cumsum(probabilities), random)
    order = np.argsort(-probabilities, kind="stable")
    sums = np.cumsum(probabilities[order])
    kept = int(np.searchsorted(sums, top_p * (1 - ROUNDING))) + 1
    return int(order[_draw(sums[:kept], random)])


def _draw(sums: NDArray[np.float64], random: np.random.Generator) -> int:
    """An index, with probability in proportion to its share of the running sums; never one of share 0."""
    point = random.random() * sums[-1]
    return int(np.searchsorted(sums, min(point, np.nextafter(sums[-1], 0)), side="right"))
