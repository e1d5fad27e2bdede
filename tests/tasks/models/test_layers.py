import mindspore as ms
import numpy as np

from tasks.models.layers import MASKED, RMSNorm, causal_mask


def test_the_mask_hides_later_tokens_only():
    np.testing.assert_array_equal(causal_mask(3) == 0, [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    assert set(causal_mask(3)[~np.tri(3, dtype=bool)]) == {np.float32(MASKED)}


def test_with_a_window_the_mask_hides_what_is_too_far_back_as_well():
    np.testing.assert_array_equal(causal_mask(4, 2) == 0, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(causal_mask(4, 4), causal_mask(4))


def test_a_masked_score_gets_exactly_no_weight_even_beside_huge_scores():
    scores = np.array([[-1e8, 1e8 + MASKED]], np.float32)
    weights = ms.ops.softmax(ms.Tensor(scores), -1).asnumpy()
    np.testing.assert_array_equal(weights, [[1, 0]])


def test_the_norm_of_a_zero_vector_is_zero_and_scale_does_not_matter():
    norm = RMSNorm(6, 1e-6)
    weight = np.arange(1, 7, dtype=np.float32)
    norm.weight.set_data(ms.Tensor(weight))
    x = np.array([[0, 0, 0, 0, 0, 0], [3, -3, 3, -3, 3, 3], [30, -30, 30, -30, 30, 30]], np.float32)
    normed = norm(ms.Tensor(x)).asnumpy()
    np.testing.assert_array_equal(normed[0], 0)
    np.testing.assert_allclose(normed[1], [1, -2, 3, -4, 5, 6], rtol=1e-6)
    np.testing.assert_allclose(normed[2], normed[1], rtol=1e-6)
