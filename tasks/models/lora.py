"""Low-rank adapters on the linear layers of a decoder: the Cell, attaching it, and its weights by PEFT's names.

Adapter parameters are named `<layer>.lora_a` and `<layer>.lora_b`; freezing, counting and saving select by that.

Attach before anything that holds the decoder is compiled: MindSpore 2.7.0 goes on with the old graph of a Cell whose
sub-cells were replaced, without a word. The decoder's own graphs are looked at here; those of Cells around it can't be.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from schemas.errors import InputError
from tasks.models.adapter import Adapter, read_adapter, save_adapter, tensor_names
from tasks.models.decoder import Decoder
from tasks.models.dropout import KEY_NAME, KeyedDropout, new_key
from tasks.models.layers import as_type
from tasks.models.spec import expected_shapes, match_targets

__all__ = ["Adapter", "LoraDense", "adapter_tensors", "attach_adapter", "attach_lora", "read_adapter", "save_adapter"]


class LoraDense(nn.Cell):
    """Dense layer with a frozen weight and a trainable low-rank update.

    Args:
        weight: the frozen weight (out_channels, in_channels), used itself, not copied.
        lora_a: first value of A (R, in_channels); adds R * (in_channels + out_channels) parameters together with B.
        lora_b: first value of B (out_channels, R).
        scale: what the update is multiplied by; alpha / R, so that R can change without a new learning rate.
        dropout: what the update's input goes through first, if anything.
        bias: the frozen bias (out_channels,) of the base layer, if it has one.
    Inputs:
        x: (..., in_channels), of the type of the frozen weight; A and B are float32 and are cast to it.
    Outputs:
        (..., out_channels); equal to the base layer's while B is zero.
    Source: Hu et al. 2021, arXiv 2106.09685, section 4.1.
    """

    def __init__(
        self,
        weight: Parameter,
        lora_a: NDArray[np.float32],
        lora_b: NDArray[np.float32],
        *,
        scale: float,
        dropout: nn.Cell | None = None,
        bias: Parameter | None = None,
    ) -> None:
        super().__init__()
        self.out_channels, self.in_channels = weight.shape
        self.weight = weight
        self.bias = bias
        self.lora_a = Parameter(Tensor(lora_a), name="lora_a")
        self.lora_b = Parameter(Tensor(lora_b), name="lora_b")
        self.scale = scale
        self.dropout = dropout
        self.matmul = ops.MatMul(transpose_b=True)
        self.add_bias = ops.BiasAdd()

    def construct(self, x: Tensor) -> Tensor:
        """See the class."""
        rows = x.reshape(-1, self.in_channels)  # (all, in)
        base = self.matmul(rows, self.weight)  # (all, out)
        if self.dropout is not None:
            rows = self.dropout(rows)
        # The scale goes onto the small product, R wide.
        inner = self.matmul(rows, as_type(self.lora_a, x.dtype)) * self.scale  # (all, R)
        update = self.matmul(inner, as_type(self.lora_b, x.dtype))  # (all, out)
        total = base + update
        if self.bias is not None:
            total = self.add_bias(total, as_type(self.bias, x.dtype))
        return total.reshape((*x.shape[:-1], self.out_channels))


def attach_lora(
    decoder: Decoder, *, rank: int, alpha: float, dropout: float, target_modules: Sequence[str], seed: int
) -> tuple[str, ...]:
    """Give the targeted layers a fresh adapter and freeze everything else.

    A starts uniform in +-1 / sqrt(in), B at zero. Each A is drawn from the seed and the layer's name, so that it
    depends neither on the other layers nor on the process.

    Args:
        decoder: changed in place.
        rank: R.
        alpha: the update is scaled by alpha / rank.
        dropout: share of each update's inputs that is set to zero; in effect after `decoder.set_train(True)`, with the
            masks that `dropout.draw_masks` chooses.
        target_modules: see `spec.match_targets`.
        seed: of the draws.
    Returns:
        The full names of the layers, in model order.
    Raises:
        InputError: a target matches no layer.
        RuntimeError: the decoder has been called before, or has an adapter.
    Source: PEFT 0.17.1, reset_lora_parameters: Kaiming-uniform with a = sqrt(5), as in the authors' code; the paper's
    text has a Gaussian.
    """
    layers = match_targets(target_modules, decoder.spec)
    shapes = expected_shapes(decoder.spec)
    _check_fresh(decoder)
    _freeze(decoder)
    key = new_key()
    for layer in layers:
        out_channels, in_channels = shapes[f"{layer}.weight"]
        a, b = _draw(seed, layer, rank, in_channels), np.zeros((out_channels, rank), np.float32)
        mask = KeyedDropout(dropout, layer=layer, width=in_channels, key=key) if dropout else None
        _replace(decoder, layer, a, b, scale=alpha / rank, dropout=mask)
    if dropout:
        key.name = KEY_NAME  # it belongs to no layer
    return layers


def attach_adapter(decoder: Decoder, adapter: Adapter) -> None:
    """Give a decoder a trained adapter, for inference: nothing is trainable and nothing is dropped.

    Raises:
        InputError: the adapter has a layer that the decoder lacks, or one of other sizes.
        RuntimeError: the decoder has been called before, or has an adapter.
    """
    _check_fresh(decoder)
    shapes = expected_shapes(decoder.spec)
    for layer, (a, b) in adapter.layers.items():
        if shapes.get(f"{layer}.weight") != (b.shape[0], a.shape[1]):
            problem = f"its layer {layer} is ({b.shape[0]}, {a.shape[1]}), the model's {shapes.get(f'{layer}.weight')}"
            raise InputError("lora.unusable", path="for this model", problem=problem)
    for layer, (a, b) in adapter.layers.items():
        _replace(decoder, layer, a, b, scale=adapter.scale, dropout=None)
    _freeze(decoder)
    decoder.set_train(False)


def adapter_tensors(decoder: Decoder) -> dict[str, NDArray[np.float32]]:
    """The adapter's present weights under PEFT's names, in model order: A (R, in) and B (out, R) of each layer."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for layer, cell in decoder.cells_and_names():
        if isinstance(cell, LoraDense):
            a, b = tensor_names(layer)
            tensors |= {a: cell.lora_a.asnumpy().copy(), b: cell.lora_b.asnumpy().copy()}
    return tensors


def _draw(seed: int, layer: str, rank: int, in_channels: int) -> NDArray[np.float32]:
    name = np.frombuffer(hashlib.sha256(layer.encode()).digest(), np.uint32)
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *name.tolist()])))
    bound = 1 / math.sqrt(in_channels)
    return random.uniform(-bound, bound, (rank, in_channels)).astype(np.float32)


def _replace(
    decoder: Decoder,
    layer: str,
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    *,
    scale: float,
    dropout: nn.Cell | None,
) -> None:
    parent_name, leaf = layer.rsplit(".", 1)
    parent = dict(decoder.cells_and_names())[parent_name]
    linear = getattr(parent, leaf)
    cell = LoraDense(linear.weight, a, b, scale=scale, dropout=dropout, bias=getattr(linear, "bias", None))
    setattr(parent, leaf, cell)
    # Setting a sub-cell prefixes its parameters with `leaf` only; their names must be the full ones, as for the others.
    for name, parameter in cell.parameters_and_names():
        parameter.name = f"{layer}.{name}"


def _check_fresh(decoder: Decoder) -> None:
    if decoder.compile_cache:
        raise RuntimeError("The decoder has been compiled already: its graph would go on without the adapter.")
    if any(isinstance(cell, LoraDense) for _, cell in decoder.cells_and_names()):
        raise RuntimeError("The decoder has an adapter already; load it anew for another one.")


def _freeze(decoder: Decoder) -> None:
    for parameter in decoder.get_parameters():
        parameter.requires_grad = False
