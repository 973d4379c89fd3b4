"""Models that compute their blocks again for the gradient."""

import keras
import numpy as np
import pytest

from keras_moe.models import MixerBackbone, ViTBackbone, ViTImageClassifier
from tests.small_models import ONE_BLOCK, SMALL


def fitted(rematerialize):
    """The losses and variables of a short training."""
    keras.utils.set_random_seed(0)
    backbone = ViTBackbone.from_config(
        {
            **SMALL,
            **ONE_BLOCK,
            "dropout_rate": 0.1,
            "attention_dropout": 0.1,
            "expert_dropout": 0.1,
            "stochastic_depth": 0.5,
            "auxiliary_losses": {"importance": 1.0, "load": 1.0},
            "seed": 3,
            "rematerialize": rematerialize,
        }
    )
    model = ViTImageClassifier(backbone, 3)
    model.compile(optimizer=keras.optimizers.SGD(0.05))
    shape = (8, *SMALL["image_shape"])
    images = np.random.default_rng(0).normal(size=shape).astype("float32")
    history = model.fit(
        images, np.arange(8) % 3, batch_size=4, epochs=2, shuffle=False, verbose=0
    )
    weights = [keras.ops.convert_to_numpy(weight) for weight in model.variables]
    return history.history["loss"], weights


def test_training_with_auxiliary_losses_is_the_plain_one():
    (plain_losses, plain_weights), (losses, weights) = (
        fitted(rematerialize) for rematerialize in (False, True)
    )
    # The task's is log(3) at first: the auxiliary losses are in it.
    assert plain_losses[0] > 1.15
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
    for a, b in zip(plain_weights, weights):
        np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-5)


def test_the_argument_reaches_every_block_and_round_trips():
    mixer = {name: size for name, size in SMALL.items() if name != "num_heads"}
    for backbone in (
        ViTBackbone.from_config({**SMALL, "rematerialize": True}),
        MixerBackbone.from_config({**mixer, "token_mlp_dim": 8, "rematerialize": True}),
    ):
        again = type(backbone).from_config(backbone.get_config())
        for model in (backbone, again):
            blocks = [model.get_layer(f"block_{index}") for index in range(2)]
            assert [block.rematerialize for block in blocks] == [True, True]
    block = ViTBackbone.from_config(SMALL).get_layer("block_0")
    assert block.rematerialize is False
    with pytest.raises(ValueError, match="rematerialize='full'"):
        ViTBackbone.from_config({**SMALL, "rematerialize": "full"})
