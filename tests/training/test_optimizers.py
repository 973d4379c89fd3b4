"""Optimizers and schedules: groups, accumulation, averages, cooldowns, Adafactor."""

import contextlib
import math

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_moe import training
from keras_moe.models import abstract
from keras_moe.training.optimizers import OPTIMIZERS, group_factors, layer_factors
from tests.compare import assert_close, assert_same, to_numpy
from tests.refusals import refuses


def weights(value=1.0):
    """A kernel and a bias of a layer each for "one" and "two"."""
    made = []
    for scope in ("one", "two"):
        with keras.name_scope(scope):
            for name, shape in (("kernel", (2, 3)), ("bias", (3,))):
                made.append(keras.Variable(np.full(shape, value, "float32"), name=name))
    return made


def apply(optimizer, variables, gradient=0.0):
    optimizer.apply([keras.ops.full(v.shape, gradient) for v in variables], variables)
    return [float(to_numpy(v).ravel()[0]) for v in variables]


GROUPS = [
    {"match": "two/kernel", "learning_rate": 0.1, "weight_decay": 3.0},
    {"match": "two/.*", "learning_rate": 0.0},
    {"match": "kernels", "weight_decay": 0.5},
]


# Which weights

ALL = {"experts", "router", "head", "kernels", "rest"}


@pytest.mark.parametrize(("preset", "arguments", "names"), [
    ("vmoe_b16_every2_e8", {}, ALL),
    ("soft_moe_s16", {}, ALL),
    ("moepp_vit_s16", {}, ALL),
    ("mumoe_vit_s16_cp", {}, ALL),
    ("mixer_s16", {"router": "soft", "moe_layers": "every_2"}, {"experts"}),
    ("vit_s16", {"head": {"num_experts": 4}}, {"head", "kernels", "rest"}),
])  # fmt: skip
def test_names_of_groups(preset, arguments, names):
    model = abstract(preset, num_classes=3, **arguments)
    paths = [weight.path for weight in model.trainable_variables]

    def of(name):
        factors = group_factors([{"match": name, "learning_rate": 9.0}], paths)
        pairs = zip(paths, factors, strict=True)
        return {path for path, x in pairs if x.learning_rate == 9.0}

    groups = {name: of(name) for name in names}
    for name, words in {
        "experts": ("experts/", "moe/hidden/", "moe/output/"),
        "router": ("router/", "moe/gate/"),
        "head": ("predictions/", "head/"),
        "kernels": ("kernel",),
        "rest": ("",),
    }.items():
        if name in groups:
            assert groups[name] == {p for p in paths if any(w in p for w in words)}
    if "router" in groups:
        assert not groups["experts"] & groups["router"]


# Their settings


def test_groups_decay_and_are_clipped_together():
    optimizer = training.optimizer_class("sgd")(0.1, weight_decay=0.5, groups=GROUPS)
    # 1 - rate * group's rate * decay * group's decay.
    expected = [1 - 0.1 * 0.5 * 0.5, 1 - 0.1 * 0.5, 1 - 0.01 * 0.5 * 3.0, 1.0]
    np.testing.assert_allclose(apply(optimizer, weights()), expected, rtol=1e-6)
    # 18 gradients of 1 have a norm of sqrt(18).
    optimizer = training.optimizer_class("sgd")(1.0, groups=GROUPS, global_clipnorm=0.5)
    moved = np.subtract(1.0, apply(optimizer, weights(), gradient=1.0))
    step = 0.5 / np.sqrt(18)
    np.testing.assert_allclose(moved, [step, step, 0.1 * step, 0.0], rtol=1e-4)


def test_decay_relative_to_the_peak():
    # At step 0 of 10 the rate is at its peak of 0.2, at step 5 half of it.
    optimizer = training.optimizer_class("adamw")(
        schedule_of("linear", 0.2, 10),
        weight_decay=0.01,
        peak_learning_rate=0.2,
        groups=GROUPS,
    )
    variables = weights()
    optimizer.build(variables)
    first = [1 - 0.01 * 0.5, 1 - 0.01, 1 - 0.01 * 3.0, 1.0]
    np.testing.assert_allclose(apply(optimizer, variables), first, rtol=1e-6)
    optimizer.iterations.assign(5)
    second = [1 - 0.01 * 0.5 / 2, 1 - 0.01 / 2, 1 - 0.01 * 3.0 / 2, 1.0]
    actual = np.divide(apply(optimizer, variables), first)
    np.testing.assert_allclose(actual, second, rtol=1e-6)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_groups_of_every_optimizer_are_that_optimizer(name):
    """Each group moves as it does with an optimizer of its own."""
    make = training.optimizer_class(name)
    options = {} if name == "vitg_adafactor" else {"weight_decay": 0.5}
    together, alone = weights(0.5), weights(0.5)
    grouped = make(0.1, groups=GROUPS, **options)
    singles = [
        make(0.1 * rate, **({"weight_decay": 0.5 * decay} if options else {}))
        for rate, decay in ((1.0, 0.5), (1.0, 1.0), (0.1, 3.0))
    ]
    for step in range(3):
        apply(grouped, together, gradient=0.3 + step)
        for single, variable in zip(singles, alone, strict=False):
            apply(single, [variable], gradient=0.3 + step)
    assert_close(together, alone, rtol=1e-05)
    # And the last group stays.
    assert (to_numpy(together[3]) == 0.5).all()
    assert (to_numpy(together[0]) != 0.5).all()


def test_layer_decay_by_hand():
    """In each tower, embeddings have the lowest rate, and what follows blocks none."""
    paths = {
        "image/patch_embedding/kernel": 1 / 8,
        "image/block_0/moe/router/kernel": 1 / 4,
        "image/block_1/attention/query/kernel": 1 / 2,
        "image/final_norm/gamma": 1,
        "text/text_positions/embedding": 1 / 4,
        "text/block_0/mlp/hidden/bias": 1 / 2,
        "text/token_embedding/reverse_embeddings": 1,
        "logit_scale/log_scale": 1,
    }
    variables = [keras.Variable(1.0, name=path.replace("/", "_")) for path in paths]
    for variable, path in zip(variables, paths):
        variable._path = path
    sgd = training.optimizer_class("sgd")
    groups = [{"match": "router", "learning_rate": 4.0}]
    optimizer = sgd(1.0, layer_decay=0.5, groups=groups)
    expected = [1 - rate for rate in paths.values()]
    expected[1] = 0.0
    assert apply(optimizer, variables, 1.0) == expected
    assert sgd.from_config(optimizer.get_config()).layer_decay == 0.5
    # The names that real models have.
    for preset in ("vmoe_s32", "mixer_s16", "clip_b32"):
        model = abstract(preset, num_layers=2)
        rates = [x.path for x in model.trainable_variables]
        rates = dict(zip(rates, layer_factors(0.5, rates)))
        assert {rates[path] for path in rates if "embedding" in path} == {1 / 8}
        assert {rates[path] for path in rates if "block_1/" in path} == {1 / 2}


def test_without_groups_it_is_keras():
    mine, theirs = weights(0.5), weights(0.5)
    options = {"learning_rate": 0.1, "weight_decay": 0.3, "global_clipnorm": 1.0}
    grouped = training.optimizer_class("adamw")(**options)
    plain = keras.optimizers.AdamW(**options)
    for step in range(3):
        apply(grouped, mine, gradient=0.3 + step)
        apply(plain, theirs, gradient=0.3 + step)
    assert_same(mine, theirs)
    if keras.backend.backend() == "torch":
        # All weights in one call, as Keras's own.
        assert hasattr(grouped, "_parallel_update_step")


# Accumulation, and averages


def regression(optimizer, hidden=5):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(hidden, activation="tanh", name="one")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="two")(hidden))
    model.compile(optimizer, loss="mse")
    return model


def data(count=24):
    draw = np.random.default_rng(0)
    return draw.normal(size=(count, 4)), draw.normal(size=(count, 2))


@pytest.mark.parametrize("name", ["adamw", "muon", "vitg_adafactor"])
def test_accumulated_batches_are_one_batch(name):
    def trained(batch_size, **options):
        # Rises for 2 updates, and falls until the sixth.
        schedule = schedule_of("linear", 0.1, 6, warmup_steps=2)
        optimizer = training.optimizer_class(name)(
            schedule, weight_decay=0.1, global_clipnorm=0.5, use_ema=True,
            groups=[{"match": "two/.*", "learning_rate": 0.5}], ema_momentum=0.7,
            **options,
        )  # fmt: skip
        model = regression(optimizer)
        model.fit(*data(), batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        averages = [to_numpy(v) for v in optimizer._model_variables_moving_average]
        # `fit` leaves the averages in the model.
        assert_same(model.weights, averages)
        return int(optimizer.iterations), averages

    whole, parts = trained(8), trained(2, gradient_accumulation_steps=4)
    assert whole[0] == parts[0] == 6
    assert_close(whole[1], parts[1], atol=2e-05)


@pytest.mark.every_backend
@pytest.mark.parametrize("name", ["adamw", "muon", "vitg_adafactor"])
def test_a_compiled_model_keeps_its_state_and_groups(name, tmp_path):
    optimizer = training.optimizer_class(name)(
        0.01, weight_decay=0.5, groups=[{"match": "two/.*", "weight_decay": 0.0}]
    )
    # Both factors of a kernel of 40 columns are saved, too.
    model = regression(optimizer, hidden=40)
    model.fit(*data(), shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == optimizer.get_config()
    assert_same(again.optimizer.variables, optimizer.variables)
    types = [[x.dtype for x in each.variables] for each in (optimizer, again.optimizer)]
    assert types[0] == types[1]
    for each in (model, again):
        each.fit(*data(), shuffle=False, verbose=0)
    assert_same(model.weights, again.weights)


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
    scales = [10.0 ** -(i % 3) for i in range(5)]
    gradients = [
        [draw.normal(size=w.shape).astype("float32") * scale for w in weights]
        for scale in scales
    ]
    variables = [variable(path, w) for (path, _, _), w in zip(CASES, weights)]
    optimizer = training.ViTGAdafactor(0.1, momentum_dtype=dtype)
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
    optimizer = training.ViTGAdafactor(0.5, weight_decay=0.02, peak_learning_rate=0.5)
    optimizer.apply([keras.ops.convert_to_tensor(gradient)], [weight])
    # At the peak rate the decay is the whole weight decay.
    expected = 1 - 0.02 - 0.5 * 0.1 * np.sign(gradient)
    np.testing.assert_allclose(to_numpy(weight), expected, rtol=1e-5)
    rows, columns = map(to_numpy, optimizer.second_moments(weight))
    np.testing.assert_allclose(rows[:, 0], a**2 * (b**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(columns[0], b**2 * (a**2).mean(), rtol=1e-5)


def test_the_state_takes_two_bytes_a_weight():
    kernel = variable("experts/hidden_kernel", np.zeros((8, 64, 256), "float32"))
    optimizer = training.ViTGAdafactor(0.1)
    optimizer.build([kernel])
    shapes = [tuple(state.shape) for state in optimizer.second_moments(kernel)]
    assert shapes == [(8, 64, 1), (8, 1, 256)]
    (first,) = optimizer._first_moments
    assert (first.dtype, first.shape) == ("bfloat16", kernel.shape)
    optimizer = training.ViTGAdafactor(0.1, momentum=0.0)
    optimizer.build([kernel])
    assert optimizer._first_moments == []


# Schedules with a cooldown


def schedule_of(decay, peak, steps, **settings):
    return training.ScheduleConfig(
        learning_rate=peak, steps=steps, decay=decay, **settings
    ).new_schedule(steps_per_epoch=1)


def rates(schedule, steps):
    return [float(schedule(step)) for step in steps]


@pytest.mark.parametrize(("decay", "steps", "settings", "expected"), [
    # 20 + 10 (n^2 - 1) steps make the rate an n-th: 50 a half, 100 a third. From there,
    # at 0.2, the cooldown falls on a line.
    ("rsqrt", 200, {"warmup_steps": 20, "timescale": 10, "cooldown_steps": 100},
     {0: 0.0, 1: 0.03, 19: 0.57, 20: 0.6, 30: 0.6 / math.sqrt(2), 50: 0.3,
      100: 0.2, 101: 0.198, 150: 0.1, 199: 0.002, 200: 0.0, 300: 0.0}),
    ("constant", 100,
     {"warmup_steps": 10, "cooldown_steps": 20, "final_learning_rate": 0.2},
     {0: 0.0, 5: 0.3, 10: 0.6, 79: 0.6, 80: 0.6, 90: 0.4, 100: 0.2, 130: 0.2}),
])  # fmt: skip
def test_schedules_by_hand(decay, steps, settings, expected):
    schedule = schedule_of(decay, 0.6, steps, **settings)
    actual = rates(schedule, expected)
    np.testing.assert_allclose(actual, list(expected.values()), atol=1e-7)
    again = type(schedule).from_config(schedule.get_config())
    assert rates(again, expected) == actual


def test_steps_as_shares_of_the_run():
    schedule = training.ScheduleConfig(
        learning_rate=0.6, epochs=5, warmup_steps=0.1, cooldown_steps=0.2,
        decay="constant", final_learning_rate=0.2,
    )  # fmt: skip
    by_number = schedule.replace(warmup_steps=10, cooldown_steps=20)
    steps = range(0, 120, 5)
    np.testing.assert_array_equal(
        rates(schedule.new_schedule(20), steps),
        rates(by_number.new_schedule(20), steps),
    )
    refuses("warmup_steps=1.5", schedule.replace, warmup_steps=1.5)


def test_long_runs_keep_their_digits():
    # 4M steps are exact in float32.
    steps = {"warmup_steps": 10_000, "timescale": 10_000, "cooldown_steps": 50_000}
    schedule = training.WarmupCooldown(1e-3, 4_000_000, **steps)
    expected = 1e-3 / math.sqrt(1 + (3_949_999 - 10_000) / 10_000)
    assert float(schedule(3_949_999)) == pytest.approx(expected, rel=1e-5)
    assert float(schedule(3_999_999)) == pytest.approx(
        1e-3 / math.sqrt(395) / 50_000, rel=1e-3
    )
