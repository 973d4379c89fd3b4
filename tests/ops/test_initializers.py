import keras
import numpy as np
import pytest
from keras import initializers, ops

from keras_moe.layers import MLP, Attention, PerExpert
from keras_moe.ops._initializers import PathInitializer, initial_values, skip_init
from tests.compare import assert_same, to_numpy

on_jax = keras.backend.backend() == "jax"

SHAPE = (50, 400)
# Mean, standard deviation and largest distance from the mean of 50 x 400 values.
CASES = {
    "uniform": (initializers.RandomUniform(-0.3, 0.7), 0.2, 1 / 12**0.5, 0.5),
    "normal": (initializers.RandomNormal(0.5, 2.0), 0.5, 2.0, np.inf),
    # A normal distribution that is cut at two standard deviations has 0.8796 of it.
    "truncated": (initializers.TruncatedNormal(-0.5, 0.1), -0.5, 0.08796, 0.2),
    # The variance is 2 / (50 + 400), 1 / 50, 2 / 50, and 2 / 400.
    "glorot_uniform": ("glorot_uniform", 0.0, 450**-0.5 * 2**0.5, (6 / 450) ** 0.5),
    "lecun_normal": ("lecun_normal", 0.0, 50**-0.5, 2 / 0.8796 * 50**-0.5),
    "he_normal": ("he_normal", 0.0, 25**-0.5, 2 / 0.8796 * 25**-0.5),
    "untruncated": (
        initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal"),
        *(0.0, 200**-0.5, np.inf),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_distribution_is_that_of_the_initializer(name):
    initializer, mean, stddev, farthest = CASES[name]
    values = to_numpy(PathInitializer(initializer, "a/kernel")(SHAPE))
    count = values.size
    # Five standard errors; that of a standard deviation is largest where it is normal.
    assert abs(values.mean() - mean) < 5 * stddev / count**0.5
    assert abs(values.std() / stddev - 1) < 5 / (2 * count) ** 0.5
    assert np.abs(values - mean).max() <= farthest * (1 + 1e-5)
    assert len(np.unique(values)) > 0.99 * count


@pytest.mark.parametrize("value", ["zeros", "ones", -2.5])
def test_constants(value):
    expected = {"zeros": 0.0, "ones": 1.0}.get(value, value)
    if not isinstance(value, str):
        value = initializers.Constant(value)
    for dtype in ("float32", "bfloat16", "int8"):
        values = PathInitializer(value)((3, 2), dtype)
        assert keras.backend.standardize_dtype(values.dtype) == dtype
        expected_here = int(expected) if dtype == "int8" else expected
        assert_same(ops.cast(values, "float32"), np.full((3, 2), expected_here, "f4"))


class Halved(initializers.RandomNormal):
    """An initializer of the user's own."""

    def __call__(self, shape, dtype=None):
        return super().__call__(shape, dtype) / 2


@pytest.mark.every_backend
def test_other_initializers_have_a_seed_for_each_weight():
    with initial_values(0, "Model"):
        a, again, b = (PathInitializer(Halved(), path) for path in "aab")
        experts = PathInitializer(PerExpert(Halved()), "experts")
    assert_same(a((4,)), again((4,)))
    assert np.abs(to_numpy(a((4,))) - to_numpy(b((4,)))).min() > 0
    values = to_numpy(experts((3, 400)))
    assert len(np.unique(values)) == values.size
    # 0.05 is Keras's default.
    assert abs(values.std() - 0.025) < 0.003
    assert values.shape == tuple(PathInitializer("orthogonal")((3, 400)).shape)
    for shape in ((), (0, 4)):
        assert tuple(PathInitializer("random_normal")(shape).shape) == shape


def test_a_generator_advances_and_functions_are_called():
    generator = keras.random.SeedGenerator(1)
    drawn = PathInitializer(initializers.RandomNormal(seed=generator))
    with skip_init():
        assert np.abs(to_numpy(drawn((4,))) - to_numpy(drawn((4,)))).min() > 0
    called = PathInitializer(lambda shape, dtype=None: ops.full(shape, 3.0, dtype))
    assert_same(called((2,)), np.full(2, 3.0, "float32"))


class Outer(keras.layers.Layer):
    """A layer without `build`, whose inner layers Keras builds without values."""

    def __init__(self):
        super().__init__()
        self.first, self.second = MLP(16), MLP(16)

    def call(self, x):
        return self.second(self.first(x))


def test_a_seed_of_the_users_own_gives_sublayers_their_own_values():
    kernels = []
    # The names of these layers count on.
    for _ in range(2):
        glorot = initializers.GlorotUniform(seed=1)
        layer = Attention(2, 4, kernel_initializer=glorot)
        layer.build((None, 5, 8))
        kernels.append(
            [to_numpy(w).ravel() for w in layer.weights if "kernel" in w.path]
        )
    assert len({tuple(kernel) for kernel in kernels[0]}) == 4
    for first, again in zip(*kernels):
        assert_same(first, again)


@pytest.mark.every_backend
def test_weights_that_keras_makes_later_do_not_start_alike():
    layer = Outer()
    layer(np.ones((2, 3, 16), "float32"))
    kernels = [to_numpy(w) for w in layer.weights if w.name == "kernel"]
    assert len(kernels) == 4
    assert len({tuple(kernel.ravel()) for kernel in kernels}) == 4


def test_a_saved_initializer_keeps_its_distribution():
    first = PathInitializer(PerExpert("he_normal", shared=True), "experts/kernel")
    config = keras.initializers.serialize(first)
    again = keras.initializers.deserialize(config)
    assert (again.path, again.initializer.shared) == ("experts/kernel", True)
    values = to_numpy(again((2, 50, 40)))
    assert_same(values[0], values[1])
    assert abs(values.std() - 0.2) < 0.02


@pytest.mark.skipif(not on_jax, reason="JAX alone traces and compiles here")
@pytest.mark.every_backend
def test_new_shapes_compile_nothing(caplog):
    import jax

    with jax.log_compiles(), caplog.at_level("WARNING"):
        for name, (initializer, *_) in CASES.items():
            PathInitializer(initializer)((len(name), 11, 13))
        assert "Compiling" not in caplog.text
        initializers.RandomNormal()((17, 19))
    assert "Compiling" in caplog.text


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="PyTorch's meta device")
def test_the_meta_device_draws_nothing():
    with keras.device("meta"):
        # A tebibyte.
        value = PathInitializer("he_normal")((1 << 20, 1 << 18))
    assert value.device.type == "meta"
