"""The one place that chooses MindSpore's device and mode."""

import logging
from typing import Literal

import mindspore

log = logging.getLogger("mindtune.models")


def use_device(device: Literal["CPU", "Ascend"]) -> None:
    """Prepare this process: graph mode, the device, and kernels that give the same bits for the same inputs.

    Call it before the first tensor is made. On Ascend determinism costs some speed: kernels then add in a fixed order.
    """
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device(device)
    mindspore.set_deterministic(True)
    log.debug("MindSpore %s on %s, graph mode", mindspore.__version__, device)
