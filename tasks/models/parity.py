"""A cached model held against the whole forward pass: prompts in chunks, and one token at a time. No MindSpore."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.reports import ParityPoint
from tasks.models.generation import Generator, Logits

COMPARED = 256  # positions of one text that are compared, at most
DECODED = 64  # tokens at the end of a text that are also fed one at a time, at most


def compared_positions(length: int) -> list[int]:
    """The positions of a text that are compared: all of a short one; of a long one its end and an even choice."""
    spread = np.linspace(0, length - 1, COMPARED).round().astype(int).tolist()
    return sorted({*spread, *range(max(0, length - DECODED), length)})


def measure_parity(
    generator: Generator, ids: Sequence[int], lengths: Sequence[int], wanted: Mapping[int, Logits]
) -> tuple[ParityPoint, ...]:
    """Compare the beginnings of one text; what stands after a position does not change its logits.

    Args:
        generator: the cached model.
        ids: a text of the largest length.
        lengths: tokens of the beginnings.
        wanted: logits (V,) of the whole forward pass by position, at the `compared_positions` of every length.
    """
    points = []
    for length in lengths:
        text = ids[:length]
        positions = compared_positions(length)
        ends = range(max(0, length - DECODED), length)
        points.append(
            ParityPoint(
                length=length,
                max_relative_difference=relative_difference(
                    _prefilled(generator, text, positions), np.stack([wanted[position] for position in positions])
                ),
                decode_relative_difference=relative_difference(
                    _decoded(generator, text, ends), np.stack([wanted[position] for position in ends])
                ),
            )
        )
    return tuple(points)


def relative_difference(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Largest difference of two arrays of logits, relative to the largest wanted one; NaN where either holds NaN."""
    return float(np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max())


def _prefilled(generator: Generator, ids: Sequence[int], positions: Sequence[int]) -> Logits:
    """Logits (N, V) at some positions of a text that goes through in chunks."""
    chosen: list[Logits] = []
    start = 0
    for chunk in generator.prefill(ids):
        chosen.append(chunk[[position - start for position in positions if start <= position < start + len(chunk)]])
        start += len(chunk)
    return np.concatenate(chosen)


def _decoded(generator: Generator, ids: Sequence[int], positions: range) -> Logits:
    """Logits (N, V) at the last positions of a text whose beginning goes through in chunks, its end token by token."""
    if positions.start:
        for _ in generator.prefill(ids[: positions.start]):
            pass  # only what it leaves in the cache is wanted
    return np.stack([generator.decode(ids[position], position) for position in positions])
