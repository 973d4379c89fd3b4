"""The contrastive losses: golden data, hand computation, positives and padding."""

import json
import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_moe import losses
from tests import golden
from tests.compare import assert_close, assert_same
from tests.gradients import gradient_and_outputs
from tests.losses.loss_table import (
    CONTRASTIVE,
    IMAGE_IDS,
    TEXT_IDS,
    contrastive_loss,
    normal,
    numbers,
)


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


def expected_loss(name, images, texts, log_scale, bias, positive=None, weights=None):
    """The loss in float64, straight from the definitions."""
    images, texts = (
        x.astype("float64") / np.linalg.norm(x, axis=-1, keepdims=True)
        for x in (images, texts)
    )
    weights = np.ones(len(images)) if weights is None else np.asarray(weights)
    positive = np.eye(len(images), dtype=bool) if positive is None else positive
    real = weights > 0
    images, texts, weights = images[real], texts[real], weights[real]
    positive = positive[np.ix_(real, real)]
    logits = math.exp(log_scale) * images @ texts.T
    if name == "sigmoid":
        logits = logits + bias
        per_pair = -log_sigmoid(np.where(positive, logits, -logits)).sum(axis=1)
    else:
        per_pair = 0.0
        for one in (logits, logits.T):
            log_p = one - np.log(np.exp(one).sum(axis=1, keepdims=True))
            per_pair += -0.5 * (log_p * positive).sum(axis=1) / positive.sum(axis=1)
    return np.average(per_pair, weights=weights)


@pytest.mark.every_backend
@pytest.mark.parametrize("name", CONTRASTIVE)
@pytest.mark.parametrize("case", golden.cases("15_contrastive/*"))
def test_golden(case, name):
    arrays, _ = golden.load(case)
    names = ("zimg", "ztxt", "log_scale", "bias")
    directions = ("image_to_text", "text_to_image") if name == "softmax" else ()

    def program(*inputs):
        value = contrastive_loss(name, *inputs)
        others = [
            losses.softmax_contrastive_loss(
                *inputs[:2], ops.exp(inputs[2]), direction=x
            )
            for x in directions
        ]
        return value, (value, *others)

    inputs = [arrays[f"inputs/{x}"].astype("float32") for x in names]
    gradients, values = gradient_and_outputs(program, *inputs)
    stored = {"softmax": "clip", "sigmoid": "sigmoid"}[name]
    expected = [arrays[f"outputs/{stored}_{x}"] for x in ("loss", *directions)]
    assert_close(values, expected, 1e-5)
    for input_name, value in zip(names, gradients):
        reference = arrays.get(f"grads/{stored}_loss/{input_name}", 0.0)
        assert_close(value, reference, 1e-5, 2e-6)


def positive_of(image_ids=None, text_ids=None):
    positive = np.eye(6, dtype=bool)
    for ids in (image_ids, text_ids):
        if ids is not None:
            positive |= ids[:, None] == ids
    return positive


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_equal_ids_are_positives_and_weights_count(name):
    inputs = (normal(0, 6, 4), normal(1, 6, 4), 1.0, -0.5)
    weights = np.array([1.0, 0.5, 0.0, 2.0, 1.0, 0.0], "float32")
    both = {"image_ids": IMAGE_IDS, "text_ids": TEXT_IDS}
    cases = [{"image_ids": IMAGE_IDS}, {"text_ids": TEXT_IDS}, both, {}]
    values = numbers(
        lambda *x: ops.stack(
            [
                contrastive_loss(name, *x, **ids, sample_weight=sample_weight)
                for ids in cases
                for sample_weight in (None, weights)
            ]
        ),
        *(np.asarray(x, "float32") for x in inputs),
    )
    expected = [
        expected_loss(name, *inputs, positive_of(**ids), sample_weight)
        for ids in cases
        for sample_weight in (None, weights)
    ]
    assert_close(values, expected, 1e-5)
    # Each case asks for something else.
    assert len({round(x, 4) for x in expected}) == 8


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_padding_changes_nothing_whatever_it_holds(name):
    images, texts = normal(0, 5, 4), normal(1, 5, 4)
    images[3], texts[3] = np.nan, np.inf
    images[4] = texts[4] = 0.0
    weights = np.array([1.0, 1.0, 1.0, 0.0, 0.0], "float32")
    scalars = (np.float32(1.0), np.float32(-0.5))

    def program(images, texts, *scalars):
        value = contrastive_loss(name, images, texts, *scalars, sample_weight=weights)
        return value, (value,)

    gradients, (value,) = gradient_and_outputs(program, images, texts, *scalars)
    expected = expected_loss(name, images[:3], texts[:3], *scalars)
    assert_close(value, expected, 1e-5)
    for gradient in gradients[:2]:
        assert_same(gradient[3:], 0.0)
        assert np.abs(gradient[:3]).min() > 0
    assert np.all(np.isfinite(gradients[2]))


@pytest.mark.parametrize("name", CONTRASTIVE)
@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_without_a_pair_that_counts_the_loss_is_0(name, batch, chunk_size):
    options = {"sample_weight": np.zeros(batch, "float32"), "chunk_size": chunk_size}

    def program(*inputs):
        value = contrastive_loss(name, *inputs, **options)
        return value, (value,)

    inputs = (normal(0, batch, 4), normal(1, batch, 4), np.float32(1), np.float32(2))
    gradients, (value,) = gradient_and_outputs(program, *inputs)
    assert value == 0
    for gradient in gradients:
        assert_same(gradient, 0.0)


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_bfloat16_rounds_the_unit_vectors_alone(name):
    images, texts = normal(0, 6, 8), normal(1, 6, 8)
    scalars = (np.float32(1.0), np.float32(-0.5))

    def program(images, texts, *scalars):
        value = contrastive_loss(
            name, images, texts, *scalars, similarity_dtype="bfloat16"
        )
        return value, (value,)

    gradients, (value,) = gradient_and_outputs(program, images, texts, *scalars)

    def rounded(x):
        x = x / np.linalg.norm(x, axis=-1, keepdims=True)
        return ops.convert_to_numpy(ops.cast(ops.cast(x, "bfloat16"), "float32"))

    # Rounded vectors are no unit vectors: the reference divides them once more.
    norms = [np.linalg.norm(rounded(x), axis=-1) for x in (images, texts)]
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (images, texts)]
    logits = math.e * rounded(images) @ rounded(texts).T
    if name == "sigmoid":
        signed = np.where(np.eye(6, dtype=bool), 1, -1) * (logits - 0.5)
        expected = -log_sigmoid(signed).sum() / 6
    else:
        both = [x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (logits, logits.T)]
        expected = -np.mean([np.diag(x).mean() for x in both])
    assert_close(value, expected, 1e-5)
    assert abs(value - expected_loss(name, images, texts, *scalars)) > 1e-6
    assert np.abs(np.concatenate(norms) - 1).max() > 1e-4
    assert np.abs(gradients[0]).max() > 1e-3
    # Gradients are float32: orthogonal to the embedding up to the rounding alone.
    assert np.abs(np.sum(gradients[0] * unit[0], axis=-1)).max() < 1e-6


@pytest.mark.parametrize("loss", [
    losses.SoftmaxContrastiveLoss(
        "image_to_text", multi_positive=True, chunk_size=3, name="a",
        similarity_dtype="bfloat16",
    ),
    losses.SigmoidContrastiveLoss(True, 3, "bfloat16", "b"),
])  # fmt: skip
def test_config_round_trip(loss):
    defaults = type(loss)().get_config()
    config = loss.get_config()
    assert all(config[name] != defaults[name] for name in config)
    stored = json.loads(json.dumps(keras.losses.serialize(loss)))
    again = keras.losses.deserialize(stored)
    assert type(again) is type(loss)
    assert again.get_config() == config


def test_a_loss_hands_on_its_options():
    images, texts = normal(0, 6, 4), normal(1, 6, 4)
    outputs = {"image_embeddings": images, "text_embeddings": texts}
    outputs.update(logit_scale=3.0, logit_bias=-1.0)
    ids = {"image_ids": IMAGE_IDS, "text_ids": TEXT_IDS}
    options = {"chunk_size": 4, "similarity_dtype": "bfloat16"}
    value = losses.SoftmaxContrastiveLoss(
        "text_to_image", multi_positive=True, **options
    )(ids, outputs)
    expected = losses.softmax_contrastive_loss(
        images, texts, 3.0, direction="text_to_image", **ids, **options
    )
    assert float(value) == float(expected)
    value = losses.SigmoidContrastiveLoss(True, 4, "bfloat16").call(ids, outputs)
    expected = losses.sigmoid_contrastive_loss(
        images, texts, 3.0, -1.0, **ids, **options
    )
    assert float(value) == float(expected)
    # Without `multi_positive` ids are not read.
    value = losses.SigmoidContrastiveLoss()(ids, outputs)
    assert float(value) == float(
        losses.sigmoid_contrastive_loss(images, texts, 3.0, -1.0)
    )


def test_temperatures_as_published():
    clip, siglip = losses.TEMPERATURES["clip"], losses.TEMPERATURES["siglip"]
    assert round(1 / clip.scale, 4) == 0.07
    assert (clip.largest_scale, clip.bias) == (100, None)
    assert losses.TEMPERATURES["clip_up"] == clip
    assert (siglip.log_scale, siglip.bias) == (math.log(10), -10)
    assert losses.TEMPERATURES["limoe"].scale == 10
    bound = losses.LogScaleBound(50.0)
    again = keras.constraints.deserialize(keras.constraints.serialize(bound))
    assert again.get_config() == {"largest_scale": 50.0}
    assert float(again(ops.convert_to_tensor(1.0))) == 1.0
    assert float(again(ops.convert_to_tensor(9.0))) == pytest.approx(math.log(50))


# The logarithm of the scale and the bias, at which no term vanishes.
SCALARS = (np.float32(1.5), np.float32(-0.5))
INPUTS = (normal(0, 6, 4), normal(1, 6, 4), *SCALARS)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def value_and_gradients(name, inputs, **options):
    def program(*inputs):
        value = contrastive_loss(name, *inputs, **options)
        return value, (value,)

    gradients, (value,) = gradient_and_outputs(program, *inputs)
    return [value, *gradients]


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
    options["similarity_dtype"] = data.draw(st.sampled_from(["float32", "bfloat16"]))
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
