import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.layers import PerExpert

to_numpy = ops.convert_to_numpy


@pytest.mark.parametrize("seed", [None, 3, "generator"])
def test_each_expert_has_values_of_its_own(seed):
    if seed == "generator":
        seed = keras.random.SeedGenerator(3)
    kernels = to_numpy(
        PerExpert(keras.initializers.GlorotUniform(seed))((5, 8, 16), dtype="float32")
    )
    assert len(np.unique(kernels)) == kernels.size
    limit = np.sqrt(6 / (8 + 16))
    assert 0.9 * limit < np.abs(kernels).max() <= limit


def test_a_seed_repeats_and_another_does_not():
    make = [PerExpert(keras.initializers.RandomNormal(seed=s)) for s in (1, 1, 9)]
    a, b, c = (to_numpy(initializer((3, 4))) for initializer in make)
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).min() > 0


def test_shared_and_constant_values():
    shared = to_numpy(PerExpert("glorot_uniform", shared=True)((3, 4, 4)))
    np.testing.assert_array_equal(shared[0], shared[2])
    np.testing.assert_array_equal(to_numpy(PerExpert("ones")((3, 2))), np.ones((3, 2)))


def test_the_config_makes_it_again():
    initializer = PerExpert(keras.initializers.RandomNormal(0.5, seed=2), shared=True)
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(initializer)
    )
    np.testing.assert_array_equal(
        to_numpy(again((2, 3))), to_numpy(initializer((2, 3)))
    )
