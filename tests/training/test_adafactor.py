"""Adafactor with ViT-G's modifications, against its equations."""

import contextlib

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_moe.training import ViTGAdafactor

to_numpy = keras.ops.convert_to_numpy


def reference(weight, gradients, axes, first_dtype, rate=0.1, momentum=0.9):
    """The formula of the docstring, in float64 but for the first moment."""
    weight, first, by_row, by_column = weight.astype("float64"), 0.0, 0.0, 0.0
    for step, g in enumerate(gradients, 1):
        g = g.astype("float64")
        beta = min(0.999, 1 - step**-0.8)
        squares = g**2 + 1e-30
        if axes is None:
            by_row = beta * by_row + (1 - beta) * squares
            update = g / np.sqrt(by_row)
        else:
            rows, columns = axes
            by_row = beta * by_row + (1 - beta) * squares.mean(columns, keepdims=True)
            by_column = beta * by_column + (1 - beta) * squares.mean(
                rows, keepdims=True
            )
            estimate = by_row * by_column / by_row.mean(rows, keepdims=True)
            update = g / np.sqrt(estimate)
        update = momentum * first + (1 - momentum) * update
        first = update.astype(first_dtype).astype("float64")
        weight = weight - rate * update
    return weight


# Path, shape, and the axes that are factored: rows and columns.
CASES = [
    ("dense/kernel", (32, 40), (0, 1)),
    ("dense/kernel", (40, 32), (1, 0)),
    ("dense/kernel", (31, 40), None),
    ("attention/query/kernel", (40, 2, 33), (2, 0)),
    ("dense/bias", (40,), None),
    ("router/scale", (), None),
    # With as many experts as hidden units each is still factored by itself.
    ("block_1/moe/experts/hidden_kernel", (64, 32, 36), (1, 2)),
    ("block_1/moe/experts/hidden_bias", (64, 36), None),
    ("zero_computation_experts/kernel", (64, 32, 36), (2, 0)),
]


def variable(path, value):
    *scopes, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        made = keras.Variable(value, name=name)
    assert made.path == path
    return made


TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", list(TYPES))
def test_five_updates_of_every_kind_of_weight(dtype):
    draw = np.random.default_rng(0)
    weights = [draw.normal(size=shape).astype("float32") for _, shape, _ in CASES]
    gradients = [
        [
            draw.normal(size=w.shape).astype("float32") * 10.0 ** -(i % 3)
            for w in weights
        ]
        for i in range(5)
    ]
    variables = [variable(path, w) for (path, _, _), w in zip(CASES, weights)]
    optimizer = ViTGAdafactor(0.1, momentum_dtype=dtype)
    for step in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in step], variables)
    for i, (path, _, axes) in enumerate(CASES):
        expected = reference(
            weights[i], [step[i] for step in gradients], axes, TYPES[dtype]
        )
        error = np.abs(to_numpy(variables[i]) - expected)
        # Values that float32 and float64 round to different sides in bfloat16 are 2^-8
        # of a first moment apart, which is about 1 at most, times the rate.
        assert error.max() < (1e-5 if dtype == "float32" else 0.1 / 2**8), path
        assert np.mean(error < 1e-5) > 0.99, path
        states = optimizer.second_moments(variables[i])
        assert len(states) == (1 if axes is None else 2)


def test_the_first_update_by_hand():
    # g = outer(a, b) is the product of its own means: u = sign(g), and the first
    # moment, not debiased, is a tenth of it.
    a, b = np.linspace(-2, 3, 32), np.linspace(0.5, 9, 32)
    gradient = np.outer(a, b).astype("float32")
    weight = variable("kernel", np.ones((32, 32), "float32"))
    optimizer = ViTGAdafactor(0.5, weight_decay=0.02, peak_learning_rate=0.5)
    optimizer.apply([keras.ops.convert_to_tensor(gradient)], [weight])
    # At the peak rate the decay is the whole weight decay.
    expected = 1 - 0.02 - 0.5 * 0.1 * np.sign(gradient)
    np.testing.assert_allclose(to_numpy(weight), expected, rtol=1e-5)
    rows, columns = map(to_numpy, optimizer.second_moments(weight))
    np.testing.assert_allclose(rows[:, 0], a**2 * (b**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(columns[0], b**2 * (a**2).mean(), rtol=1e-5)


def test_large_gradients_are_not_clipped():
    # 1 / sqrt(1 - beta) is the largest update: after many small gradients at the cap
    # of 0.999 a large one gives sqrt(1000), which the published Adafactor would cut
    # to 1.
    weight = variable("bias", np.zeros(3, "float32"))
    optimizer = ViTGAdafactor(1.0, momentum=0.0)
    optimizer.build([weight])
    optimizer.iterations.assign(10**6)
    optimizer.apply([keras.ops.full((3,), 1e3)], [weight])
    np.testing.assert_allclose(to_numpy(weight), -np.sqrt(1000), rtol=1e-4)


def test_memory_beside_adam():
    shapes = {"experts/hidden_kernel": (8, 64, 256), "experts/hidden_bias": (8, 256)}
    weights = [variable(p, np.zeros(s, "float32")) for p, s in shapes.items()]

    def bytes_of(optimizer):
        optimizer.build(weights)
        sizes = {"float32": 4, "bfloat16": 2}
        return sum(
            int(np.prod(state.shape)) * sizes[state.dtype]
            for state in optimizer.variables
            if state.dtype in sizes and len(state.shape) > 0
        )

    elements = 8 * 64 * 256 + 8 * 256
    assert bytes_of(keras.optimizers.Adam(0.1)) == 8 * elements
    second = 4 * 8 * (64 + 256) + 4 * 8 * 256
    assert bytes_of(ViTGAdafactor(0.1)) == 2 * elements + second
    assert bytes_of(ViTGAdafactor(0.1, momentum=0.0)) == second


def test_state_is_saved_with_the_model(tmp_path):
    def images():
        return np.random.default_rng(0).normal(size=(8, 40)).astype("float32")

    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(33)])
    optimizer = ViTGAdafactor(
        0.01, weight_decay=0.1, groups=[{"match": ".*bias", "learning_rate": 2.0}]
    )
    model.compile(optimizer, loss="mse")
    model.fit(images(), np.ones((8, 33)), epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == optimizer.get_config()
    for one, other in zip(
        model.optimizer.variables, again.optimizer.variables, strict=True
    ):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(
            to_numpy(keras.ops.cast(one, "float32")),
            to_numpy(keras.ops.cast(other, "float32")),
        )
    for each in (model, again):
        each.fit(images(), np.ones((8, 33)), shuffle=False, verbose=0)
    for one, other in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))


@pytest.mark.parametrize(
    "argument",
    [
        {"min_dim_size_to_factor": 0},
        {"beta_2_exponent": 0.0},
        {"beta_2_cap": 1.0},
        {"epsilon": 0.0},
        {"momentum": -0.1},
        {"peak_learning_rate": 0.0},
    ],
)
def test_arguments_out_of_range_are_refused(argument):
    ((name, value),) = argument.items()
    with pytest.raises(ValueError, match=f"Expected .*; received: {name}={value}"):
        ViTGAdafactor(**argument)
