import mindspore as ms
import numpy as np

from tasks.models.device import use_device


def test_cells_run_in_graph_mode_on_the_device_named():
    use_device("CPU")
    assert ms.get_context("mode") == ms.GRAPH_MODE
    assert ms.get_context("device_target") == "CPU"
    assert ms.get_context("deterministic") == "ON"


def test_choosing_the_same_device_again_is_allowed_after_it_was_used():
    ms.ops.add(ms.Tensor(np.ones(2)), 1.0).asnumpy()
    use_device("CPU")
