"""Rotary frequencies and the tables of their angles, in NumPy.

Computed in float64, since float32 angles are off by up to 1e-4 at position 2000.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tasks.models.families import DecoderSpec


def rotary_frequencies(spec: DecoderSpec) -> tuple[float, ...]:
    """Radians per position for each of the C/2 pairs, scaled as the model wants it.

    Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2, equation 15. Linear scaling: Chen et al. 2023, arXiv
    2306.15595, equation 4. llama3: apply_scaling in meta-llama/llama-models, models/llama3/model.py.
    """
    plain = spec.rope_theta ** (-np.arange(0, spec.head_size, 2) / spec.head_size)  # (C/2,)
    scaling = spec.rope_scaling
    if scaling is None:
        scaled = plain
    elif scaling.kind == "linear":
        scaled = plain / scaling.factor
    else:
        turns = scaling.original_positions * plain / (2 * math.pi)
        kept = np.clip((turns - scaling.slow) / (scaling.fast - scaling.slow), 0, 1)  # 0: slow, 1: fast
        scaled = plain * (kept + (1 - kept) / scaling.factor)
    return tuple(scaled.tolist())


def rotary_tables(tokens: int, frequencies: Sequence[float]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine of the rotary angles for positions 0 to tokens - 1, each (T, C/2) float32."""
    angles = np.outer(np.arange(tokens), frequencies)  # (T, C/2)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
