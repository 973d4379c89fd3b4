"""JAX's trainer keeps the state of each step with the model, where nobody tracks it."""

import keras
import numpy as np
import pytest

from keras_moe.models import ViTBackbone, ViTImageClassifier
from tests.small_models import SMALL, images

X = images(6, *SMALL["image_shape"])
Y = np.array([0, 1, 2, 0, 1, 2], "int32")


class Weights(keras.callbacks.Callback):
    """Reads weights in the middle of an epoch, as an evaluation does."""

    def __init__(self):
        super().__init__()
        self.kinds, self.values = set(), []

    def on_train_batch_end(self, batch, logs=None):
        if keras.backend.backend() == "jax":
            self.kinds |= {type(x) for x in self.model._jax_state.values()}
            self.model.jax_state_sync()
        kernel = self.model.get_layer("predictions").kernel
        self.values.append(keras.ops.convert_to_numpy(kernel))


@pytest.mark.every_backend
def test_training_is_that_of_a_plain_model():
    config = {**SMALL, "moe_layers": None, "num_layers": 1, "seed": 0}
    classifier = ViTImageClassifier(ViTBackbone.from_config(config), 3)
    weights, losses, values = classifier.get_weights(), [], []
    for model in (classifier, keras.Model(classifier.input, classifier.output)):
        model.set_weights(weights)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        callback = Weights()
        history = model.fit(
            X, Y, 2, epochs=2, shuffle=False, verbose=0, callbacks=[callback]
        )
        losses.append(history.history["loss"])
        values.append(callback.values)
        if model is classifier and keras.backend.backend() == "jax":
            assert callback.kinds == {list}
    # TensorFlow compiles two programs, which may sum in another order.
    tolerance = 1e-6 if keras.backend.backend() == "tensorflow" else 0
    np.testing.assert_allclose(*losses, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(*values, rtol=tolerance, atol=tolerance)
    assert len(np.unique(np.array(values[0])[:, 0, 0])) == 6
