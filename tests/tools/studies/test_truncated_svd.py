"""Truncated kernels of MLPs."""

import numpy as np
import pytest

from tests.compare import assert_same, to_numpy
from tests.small_models import ONE_BLOCK, classifier, images, with_weights
from tools.studies.truncated_svd import truncated_svd

LABELS = np.arange(24) % 3
pytestmark = pytest.mark.usefixtures("op_by_op")


def model_of_one_block():
    config = {**ONE_BLOCK, "router": "softmax_token_choice"}
    return with_weights(classifier({"pooling": "average"}, **config))


def test_truncated_svd_evaluates_the_best_approximation():
    model = model_of_one_block()
    model.compile(loss="sparse_categorical_crossentropy")
    inputs = images(24, 16, 8, 2)
    before = [to_numpy(w).copy() for w in model.weights]
    actual = truncated_svd(model, inputs, LABELS, [0.25, 1.0], metric="loss")
    assert_same(model.weights, before)
    assert {name.split("/")[-1] for name in actual.kernels} == {
        "hidden_kernel",
        "output_kernel",
    }
    np.testing.assert_allclose(actual.scores[1], actual.full, rtol=1e-4)
    experts = model.backbone.get_layer("block_0").feed_forward.experts
    for kernel in (experts.hidden_kernel, experts.output_kernel):
        value = to_numpy(kernel).copy()
        for matrix in value:
            left, singular, right = np.linalg.svd(matrix, full_matrices=False)
            singular[len(singular) // 4 :] = 0.0
            matrix[:] = left @ np.diag(singular) @ right
        kernel.assign(value)
    loss = model.evaluate(inputs, LABELS, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(actual.scores[0], loss, rtol=1e-4)
    assert abs(actual.scores[0] - actual.full) > 1e-3
