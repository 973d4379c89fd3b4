"""The contrastive losses in chunks are the whole losses.

Axes: B pairs, C chunk size, D embedding.
"""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compare import assert_close
from tests.gradients import gradient_and_outputs
from tests.losses.loss_table import (
    CONTRASTIVE,
    IMAGE_IDS,
    TEXT_IDS,
    contrastive_loss,
    normal,
)

# The logarithm of the scale and the bias, at which no term vanishes.
SCALARS = (np.float32(1.5), np.float32(-0.5))
INPUTS = (normal(0, 6, 4), normal(1, 6, 4), *SCALARS)
WEIGHTS = np.array([1.0, 0.5, 0.0, 2.0, 1.0, 0.0], "float32")
OPTIONS = {
    "plain": {},
    "weights": {"sample_weight": WEIGHTS},
    "bfloat16": {"similarity_dtype": "bfloat16"},
    "positives": {"image_ids": IMAGE_IDS, "text_ids": TEXT_IDS},
    "all": {
        "image_ids": IMAGE_IDS,
        "sample_weight": WEIGHTS,
        "similarity_dtype": "bfloat16",
    },
}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def value_and_gradients(name, inputs, **options):
    def program(*inputs):
        value = contrastive_loss(name, *inputs, **options)
        return value, (value,)

    gradients, (value,) = gradient_and_outputs(program, *inputs)
    return [value, *gradients]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CONTRASTIVE)
def test_chunks_are_the_whole(name, options):
    options = OPTIONS[options]
    expected = value_and_gradients(name, INPUTS, **options)
    # The last chunk has two texts.
    values = value_and_gradients(name, INPUTS, **options, chunk_size=4)
    assert_close(values, expected, **CLOSE)
    assert all(np.abs(x).max() > 1e-3 for x in expected[:4])


@pytest.mark.parametrize("name", CONTRASTIVE)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_chunk_size_and_batch(name, data):
    batch = data.draw(st.integers(1, 9), "batch")
    seed = data.draw(st.integers(0, 99), "seed")
    options = {"chunk_size": data.draw(st.integers(1, 11), "chunk_size")}
    ids = st.lists(st.integers(0, 3), min_size=batch, max_size=batch)
    for key in ("image_ids", "text_ids"):
        if data.draw(st.booleans(), key):
            options[key] = np.array(data.draw(ids), "int32")
    weights = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=batch, max_size=batch)
    options["sample_weight"] = np.array(data.draw(weights), "float32")
    inputs = (normal(seed, batch, 3), normal(seed + 1, batch, 3), *SCALARS)
    values = value_and_gradients(name, inputs, **options)
    options.pop("chunk_size")
    assert_close(values, value_and_gradients(name, inputs, **options), **CLOSE)


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_a_large_scale_overflows_nowhere(name):
    # exp(200) is no float32; a logit of 200 is one up to 2e-5.
    inputs = (*INPUTS[:2], np.float32(np.log(200)), np.float32(-10))
    expected = value_and_gradients(name, inputs)
    assert all(np.all(np.isfinite(x)) for x in expected)
    values = value_and_gradients(name, inputs, chunk_size=4)
    assert_close(values, expected, 1e-4, 1e-3)


@pytest.mark.every_backend
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="shapes are known elsewhere"
)
def test_a_batch_of_unknown_size():
    import tensorflow as tf

    spec = tf.TensorSpec((None, 4))

    @tf.function(input_signature=(spec, spec))
    def traced(images, texts):
        with tf.GradientTape() as tape:
            tape.watch((images, texts))
            value = contrastive_loss("softmax", images, texts, *SCALARS, chunk_size=4)
        return value, *tape.gradient(value, (images, texts))

    expected = value_and_gradients("softmax", INPUTS)[:3]
    assert_close(traced(*INPUTS[:2]), expected, **CLOSE)
    assert traced(*(x[:0] for x in INPUTS[:2]))[0].numpy() == 0
