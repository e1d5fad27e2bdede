"""From a checkpoint folder to a decoder with its weights, every tensor accounted for."""

from pathlib import Path

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from schemas.errors import InputError
from tasks.models.decoder import Decoder
from tasks.models.headers import TensorHeader, read_headers, read_tensor
from tasks.models.spec import EMBEDDING, HEAD, check_tensors, read_spec


def read_tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """All tensors of a checkpoint by name, as float32 (float16 and bfloat16 widened).

    Raises:
        InputError: there are no weights, a file is damaged, or a tensor is of a type that is not read.
    """
    return {name: read_tensor(header) for name, header in read_headers(folder).items()}


def load_decoder(folder: Path) -> Decoder:
    """The decoder of a checkpoint folder, for inference (`set_train` turns adapters' dropout on).

    Weights are read one after the other and shared with MindSpore without a copy: memory holds them once.

    Raises:
        InputError: as `spec.read_spec` and `spec.check_tensors`; or lm_head.weight differs from the embedding that the
            head is tied to by config.json.
    """
    spec = read_spec(folder)
    check_tensors(folder, spec)
    headers = read_headers(folder)
    if spec.tied_head and HEAD in headers:
        _check_tied(folder, headers)
    decoder = Decoder(spec)
    for name, parameter in decoder.parameters_and_names():
        parameter.set_data(Tensor.from_numpy(read_tensor(headers[name])))
    decoder.set_train(False)
    return decoder


def _check_tied(folder: Path, headers: dict[str, TensorHeader]) -> None:
    if not np.array_equal(read_tensor(headers[HEAD]), read_tensor(headers[EMBEDDING])):
        surplus = f"{HEAD} (tie_word_embeddings is true, but it differs from {EMBEDDING})"
        raise InputError("model.tensors", path=folder, missing="none", left_over=surplus, shapes="none")
