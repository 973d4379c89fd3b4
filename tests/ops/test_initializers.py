import keras
import numpy as np
import pytest
from keras import initializers, ops

from keras_moe.ops.initializers import FastInitializer, host_values
from keras_moe.ops.kernels.random_jax import BLOCK
from tests.compare import assert_close

to_numpy = ops.convert_to_numpy
on_jax = keras.backend.backend() == "jax"

CASES = {
    "zeros": initializers.Zeros(),
    "ones": initializers.Ones(),
    "constant": initializers.Constant(-2.5),
    "uniform": initializers.RandomUniform(-0.3, 0.7, seed=1),
    "normal": initializers.RandomNormal(0.5, 2.0, seed=2**32 - 1),
    "truncated": initializers.TruncatedNormal(-0.5, 0.1, seed=0),
    "glorot_uniform": initializers.GlorotUniform(seed=3),
    "lecun_normal": initializers.LecunNormal(seed=4),
    "he_normal": initializers.HeNormal(seed=5),
    "untruncated": initializers.VarianceScaling(
        2.0, "fan_out", "untruncated_normal", seed=6, input_axes=[0], output_axes=[1]
    ),
}


@pytest.mark.every_backend
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_initializer(name):
    # A part of a block, and more than one.
    for shape in ((3, 5, 7), (2, BLOCK // 2 + 3)):
        drawn, expected = FastInitializer(CASES[name])(shape), CASES[name](shape)
        # XLA fuses a product and a sum, rounded once, where its options say so.
        assert_close(drawn, expected, 3e-7, 3e-7)
        assert (host_values(CASES[name], shape) is not None) == on_jax


@pytest.mark.every_backend
def test_values_of_a_scalar_and_of_nothing():
    for shape in ((), (0, 4)):
        assert tuple(FastInitializer(CASES["normal"])(shape).shape) == shape


class Halved(initializers.RandomNormal):
    def __call__(self, shape, dtype=None):
        return super().__call__(shape, dtype) / 2


@pytest.mark.every_backend
def test_other_initializers_dtypes_and_seeds_are_called_themselves():
    assert host_values(Halved(seed=1), (2,)) is None
    assert host_values(CASES["normal"], (2,), "bfloat16") is None
    drawn = FastInitializer(CASES["normal"])((4,), "bfloat16")
    assert keras.backend.standardize_dtype(drawn.dtype) == "bfloat16"
    generator = keras.random.SeedGenerator(1)
    drawn = FastInitializer(initializers.RandomNormal(seed=generator))
    assert np.abs(to_numpy(drawn((4,))) - to_numpy(drawn((4,)))).min() > 0
    assert_close(
        2 * to_numpy(FastInitializer(Halved(seed=1))((4,))),
        initializers.RandomNormal(seed=1)((4,)),
    )


@pytest.mark.skipif(not on_jax, reason="JAX alone traces and compiles here")
@pytest.mark.every_backend
def test_a_traced_function_draws_and_new_shapes_compile_nothing(caplog):
    import jax

    expected = to_numpy(CASES["uniform"]((2, 3)))
    traced = jax.jit(lambda: FastInitializer(CASES["uniform"])((2, 3)))()
    assert_close(traced, expected, 3e-7, 3e-7)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for name, initializer in CASES.items():
            FastInitializer(initializer)((len(name), 11, 13))
        assert "Compiling" not in caplog.text
        CASES["uniform"]((17, 19))
    assert "Compiling" in caplog.text


@pytest.mark.every_backend
@pytest.mark.skipif(not on_jax, reason="a setting of JAX")
def test_other_counters_of_jax_are_left_to_it():
    import jax

    with jax.threefry_partitionable(False):
        assert host_values(CASES["normal"], (3, 5)) is None
        assert host_values(CASES["zeros"], (3, 5)) is not None
