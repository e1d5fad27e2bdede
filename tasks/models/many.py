"""One small function over many weights, in a form that compiles fast."""

from collections.abc import Callable
from typing import Any

from mindspore import ops


def on_each(function: Callable[..., Any], *kinds: str) -> Any:
    """A function in the form that `ops.HyperMap` applies to each weight of a tuple.

    In graph mode a Python loop over the weights would do the same, but an update of 70 weights then compiles for 4 s
    instead of 0.6 (mindspore 2.7.0).

    Args:
        function: of tensors and numbers.
        kinds: `Tensor` or `Number`, for each of its arguments.
    """
    mapped = ops.MultitypeFuncGraph(function.__name__)
    mapped.register(*kinds)(function)
    return mapped
