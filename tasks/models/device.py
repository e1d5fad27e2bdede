"""The one place that chooses MindSpore's device and mode."""

import logging
from functools import cache
from typing import Literal

import mindspore

log = logging.getLogger("mindtune.models")


@cache  # MindSpore 2.7.0 raises when determinism is set a second time, even to the same value
def use_device(device: Literal["CPU", "Ascend"]) -> None:
    """Prepare this process: graph mode, the device, and kernels that give the same bits for the same inputs.

    Call it before the first tensor is made; more calls for the same device do nothing. On Ascend determinism costs some
    speed: kernels then add in a fixed order.
    """
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device(device)
    mindspore.set_deterministic(True)
    log.debug("MindSpore %s on %s, graph mode", mindspore.__version__, device)
