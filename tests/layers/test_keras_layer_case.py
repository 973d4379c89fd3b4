"""Keras's own layer test, on every public layer of `layers` and `routers`."""

import keras
import numpy as np
import pytest
from keras import tree
from keras.src import testing

from keras_moe.layers import ZeroComputationExperts
from tests.layers.test_every_layer import MAKERS, B, D, E, N

SHAPES = {"Experts": (B, E, 5, D), "PatchEmbedding": (B, 8, 8, 3)}
# Layers that take layers as arguments.
WITH_PARTS = (
    "EncoderBlock",
    "MoE",
    "MoE of several kinds",
    "MoEEncoderBlock",
    "TokenMuMoE",
)


class Case(testing.TestCase):
    """Not collected by its own name: a test makes it and calls what it has."""

    __test__ = False

    def runTest(self):
        pass


@pytest.fixture
def case():
    case = Case()
    case.setUp()
    yield case
    case.doCleanups()


def spec(outputs):
    shapes = tree.map_structure(lambda x: tuple(x.shape), outputs)
    dtypes = tree.map_structure(
        lambda x: keras.backend.standardize_dtype(x.dtype), outputs
    )
    return shapes, dtypes


@pytest.mark.parametrize("name", MAKERS)
def test_layer(case, name):
    make = MAKERS[name]
    cls = type(make())
    config = make().get_config()
    config.pop("name")
    shape = SHAPES.get(name, (B, N, D))
    expected_shape, expected_dtype = spec(make()(np.zeros(shape, "float32")))
    case.run_layer_test(
        cls,
        # Layers in it are configs: Keras makes the layer many times from them.
        init_kwargs=config,
        input_shape=shape,
        expected_output_shape=expected_shape,
        expected_output_dtype=expected_dtype,
        # Auxiliary losses are added while training only.
        expected_num_losses=0,
        supports_masking=make().supports_masking,
        # It changes the dtype of the layer alone, and the parts keep theirs.
        run_mixed_precision_check=name not in WITH_PARTS,
    )


def test_zero_computation_experts(case):
    case.run_layer_test(
        ZeroComputationExperts,
        init_kwargs={"zero_experts": 1, "copy_experts": 2, "constant_experts": 3},
        input_shape={"tokens_shape": (B, N, D), "weights_shape": (B, N, 6)},
        expected_output_shape=(B, N, D),
        expected_output_dtype="float32",
        expected_num_trainable_weights=2,
        expected_num_losses=0,
        supports_masking=False,
        # Keras's model for it passes one input on; an MoE layer trains them.
        run_training_check=False,
    )
