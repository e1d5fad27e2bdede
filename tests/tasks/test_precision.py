import pytest

from schemas.errors import ConfigError
from tasks.precision import check_precision


@pytest.mark.parametrize(
    ("precision", "device"),
    [("float32", "CPU"), ("float16", "CPU"), ("float32", "Ascend"), ("float16", "Ascend"), ("bfloat16", "Ascend")],
)
def test_types_that_a_device_computes_in(precision, device):
    check_precision(precision, device)


def test_bfloat16_on_a_cpu_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="bfloat16, but MindSpore can't compute in it on a CPU") as caught:
        check_precision("bfloat16", "CPU")
    assert "float32, float16" in caught.value.message
    assert "--device ascend" in caught.value.hint
