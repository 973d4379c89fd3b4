"""Unit embeddings, and the scale and bias of their logits."""

import math

import keras
import numpy as np
import pytest

from keras_moe.layers import LogitScale
from tests.compare import assert_close
from tests.gradients import gradient_and_outputs

EMBEDDINGS = np.array([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]], "float32")


def numbers(x):
    return keras.ops.convert_to_numpy(x)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "bfloat16"])
def test_units_and_logits_are_float32_under_every_policy(policy):
    layer = LogitScale(4.0, 100.0, -1.0, dtype=policy)
    units = layer({"a": EMBEDDINGS.astype("float32"), "b": EMBEDDINGS[:1]})
    expected = np.array([[0.6, 0.8], [0.0, 1.0], [0.0, 0.0]])
    assert_close(numbers(units["a"]), expected, 1e-6)
    logits = layer.logits(units["a"], units["b"])
    assert_close(numbers(logits), [[3.0], [2.2], [-1.0]], 1e-6)
    assert {weight.dtype for weight in layer.weights} == {"float32"}
    assert [weight.path for weight in layer.weights] == [
        f"{layer.name}/log_scale",
        f"{layer.name}/bias",
    ]


def test_the_gradient_of_zeros_is_finite():
    def program(embeddings):
        value = keras.ops.sum(LogitScale()(embeddings))
        return value, (value,)

    (gradient,), _ = gradient_and_outputs(program, EMBEDDINGS)
    # By hand: (1 - u sum(u)) / norm.
    assert_close(gradient[0], [0.2 * 0.16, -0.2 * 0.12], atol=1e-6)
    assert np.isfinite(gradient).all()


def test_the_bound_and_the_config():
    layer = LogitScale(4.0, 5.0, 0.5, name="scale", trainable=False)
    layer.build((None, 2))
    assert float(layer.log_scale.constraint(np.float32(9.0))) == pytest.approx(
        math.log(5.0)
    )
    again = LogitScale.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    plain = LogitScale()
    plain.build((None, 2))
    assert [weight.name for weight in plain.weights] == ["log_scale"]
    assert list(plain.parameters()) == ["logit_scale"]
