"""What makes a training fit into less memory without changing what is trained: a lower type, and recomputation."""

import mindspore as ms

from schemas.config import Precision
from tasks.models.decoder import Decoder

_TYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}


def lower_precision(decoder: Decoder, precision: Precision) -> None:
    """Hold the decoder's matrices and biases in a type, and so compute in it; MindSpore calls this level O2.

    Norms keep their float32 weights and, like softmax and loss, compute in float32. Adapters that are attached later
    are float32, as is their optimizer state.

    Args:
        decoder: loaded, without adapters, not called yet; changed in place.
        precision: the type.
    """
    for parameter in decoder.get_parameters():
        if parameter.ndim == 2 or parameter.name.endswith(".bias"):
            parameter.set_dtype(_TYPES[precision])


def recompute_layers(decoder: Decoder) -> None:
    """Keep only each layer's input for the backward pass, and compute the layer again there.

    Args:
        decoder: not called yet; changed in place.
    """
    for layer in decoder.model.layers:
        layer.recompute()
