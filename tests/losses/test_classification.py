"""The losses of classification heads."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.losses import SigmoidCrossentropy, SparseSigmoidCrossentropy
from tests.compare import assert_close
from tests.refusals import refuses

# Numbers of classes: none, several, one that comes twice.
SPARSE = np.array([[-1, -1, -1], [4, 0, -1], [2, 2, -1], [1, 2, 3]])
DENSE = np.array(
    [[0, 0, 0, 0, 0], [1, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 1, 1, 1, 0]], "float32"
)


def values(loss, labels, predictions):
    return ops.convert_to_numpy(loss(labels, ops.convert_to_tensor(predictions)))


@pytest.mark.parametrize("from_logits", [True, False])
def test_sparse_labels_are_the_dense_ones(from_logits):
    predictions = np.random.default_rng(0).normal(0, 3, (4, 5)).astype("float32")
    if not from_logits:
        predictions = 1 / (1 + np.exp(-predictions))
    options = {"from_logits": from_logits, "reduction": "none"}
    expected = values(SigmoidCrossentropy(**options), DENSE, predictions)
    actual = values(SparseSigmoidCrossentropy(**options), SPARSE, predictions)
    assert_close(actual, expected, 1e-5)


def test_a_number_of_no_class_is_refused_in_arrays_and_nan_in_tensors():
    logits = np.zeros((2, 3), "float32")
    loss = SparseSigmoidCrossentropy(reduction=None)
    labels = np.array([[0, 3], [2, -1]])
    # Tensors may be of a graph, which cannot raise.
    actual = ops.convert_to_numpy(loss(ops.convert_to_tensor(labels), logits))
    assert np.isnan(actual[0])
    assert actual[1] == pytest.approx(3 * np.log(2.0))
    refuses("received: 3", loss, labels, logits)
    loss = SparseSigmoidCrossentropy(from_logits=False)
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert again.get_config() == loss.get_config()
