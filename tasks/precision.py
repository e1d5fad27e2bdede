"""Which types a training can compute in, by device. Planning uses this module: it imports no MindSpore."""

from typing import Literal

from schemas.config import Precision
from schemas.errors import ConfigError

# bfloat16: MindSpore 2.7.0 has no CPU kernels for its matrix product, its elementwise product and others.
SUPPORTED: dict[str, tuple[Precision, ...]] = {
    "CPU": ("float32", "float16"),
    "Ascend": ("float32", "float16", "bfloat16"),
}


def check_precision(precision: Precision, device: Literal["CPU", "Ascend"]) -> None:
    """Refuse a type that MindSpore can't compute in.

    Raises:
        ConfigError: train.precision_unsupported.
    """
    if precision not in SUPPORTED[device]:
        known = ", ".join(SUPPORTED[device])
        raise ConfigError("train.precision_unsupported", precision=precision, device=device, known=known)
