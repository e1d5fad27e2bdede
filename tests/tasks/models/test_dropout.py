import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tasks.models.dropout import ROW_SEED, KeyedDropout, draw_masks, new_key, odd_numbers

ROWS, WIDTH, SHARE = 300, 200, 0.1


class TwoLayers(nn.Cell):
    """Two dropouts of one input, with a common key."""

    def __init__(self) -> None:
        super().__init__()
        key = new_key()
        self.first = KeyedDropout(SHARE, layer="first", width=WIDTH, key=key)
        self.second = KeyedDropout(SHARE, layer="second", width=WIDTH, key=key)

    def construct(self, x: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        return self.first(x), self.second(x)


@pytest.fixture(scope="module")
def layers():
    return TwoLayers().set_train(True)


@pytest.fixture(scope="module")
def masks(layers):
    """A function from (seed, draw) to what was kept in both layers, two boolean arrays."""
    ones = ms.Tensor(np.ones((ROWS, WIDTH), np.float32))

    def drawn(seed, draw):
        draw_masks(layers, seed, draw)
        return tuple(output.asnumpy() > 0 for output in layers(ones))

    return drawn


def correlation(first, second):
    """How far the common drops of two masks are from independence, in standard deviations."""
    dropped = (~first & ~second).sum() - first.size * SHARE**2
    return abs(dropped) / np.sqrt(first.size * SHARE**2 * (1 - SHARE**2))


def test_the_mask_is_a_function_of_seed_and_draw(masks):
    first = masks(0, 1)
    others = [masks(0, 2), masks(1, 1), masks(2, 0)]
    np.testing.assert_array_equal(masks(0, 1), first)
    for other in others:
        assert correlation(first[0], other[0]) < 4


def test_layers_have_masks_of_their_own(masks):
    first, second = masks(0, 1)
    assert correlation(first, second) < 4


def test_the_named_share_is_dropped_in_all_and_in_every_row_and_column(masks):
    dropped = ~masks(0, 3)[0]
    assert abs(dropped.mean() - SHARE) < 4 * np.sqrt(SHARE * (1 - SHARE) / dropped.size)
    for axis, size in ((0, ROWS), (1, WIDTH)):
        spread = dropped.mean(axis=axis).std() / np.sqrt(SHARE * (1 - SHARE) / size)
        assert 0.8 < spread < 1.2  # as wide as that of independent draws


def test_rows_and_columns_are_independent_of_each_other(masks):
    """The largest singular values of a random matrix without structure are near sqrt(rows) + sqrt(columns)."""
    mask = (masks(0, 4)[0] - (1 - SHARE)) / np.sqrt(SHARE * (1 - SHARE))
    largest = np.linalg.svd(mask, compute_uv=False)[0]
    assert largest < 1.1 * (np.sqrt(ROWS) + np.sqrt(WIDTH))


def test_the_mask_is_the_wrapped_product_of_the_three_factors(masks, layers):
    found = masks(7, 5)[0]
    rows = odd_numbers(ROW_SEED, ROWS).astype(np.int64)[:, None]
    columns = layers.first.columns.asnumpy().astype(np.int64)
    key = int(odd_numbers([7, 5], 1)[0])
    product = ((rows * key % 2**32) * columns + 2**31) % 2**32 - 2**31
    np.testing.assert_array_equal(found, product >= -(2**31) + SHARE * 2**32)


def test_what_is_kept_grows_so_that_the_mean_stays(layers):
    draw_masks(layers, 0, 1)
    output = layers(ms.Tensor(np.full((ROWS, WIDTH), 3.0, np.float32)))[0].asnumpy()
    np.testing.assert_allclose(output[output > 0], 3 / (1 - SHARE), rtol=1e-6)


def test_the_gradient_goes_where_the_input_was_kept(layers, masks):
    kept = masks(0, 6)[0]
    x = ms.Tensor(np.ones((ROWS, WIDTH), np.float32))

    def total(value):
        return layers.first(value).sum()

    np.testing.assert_allclose(ms.grad(total)(x).asnumpy(), kept / (1 - SHARE), rtol=1e-6)


def test_outside_of_training_nothing_is_dropped():
    layers = TwoLayers().set_train(False)
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    for output in layers(ms.Tensor(x)):
        np.testing.assert_array_equal(output.asnumpy(), x)


def test_the_key_is_not_trained(layers):
    assert [parameter.name for parameter in layers.trainable_params()] == []
    assert len(list(layers.get_parameters())) == 1


def test_a_network_without_dropout_has_nothing_to_draw():
    draw_masks(nn.Dense(2, 2), 0, 1)
