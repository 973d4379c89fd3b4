"""Towers: masks and modality ids on their way through blocks."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.layers import (
    MLP,
    Attention,
    Block,
    LayerNorm,
    MoEConfig,
    MuMoEConfig,
    TokenMLP,
    TowerSpec,
)
from keras_moe.models import TextBackbone, image_tower
from keras_moe.models.backbones.tower import Tower
from tests.calls import call
from tests.small_models import with_weights

to_numpy = ops.convert_to_numpy
TOKENS = np.random.default_rng(0).normal(size=(3, 6, 8)).astype("float32")
# The last two tokens of the first example are padding.
MASK = np.array([[1, 1, 1, 1, 0, 0], [1] * 6, [1] * 6], "bool")
MOES = {
    "dense": None,
    "moe": MoEConfig(
        moe_layers=[1],
        num_experts=4,
        router={"name": "softmax_token_choice", "noise_std": 0.0},
    ),
    "mumoe": MuMoEConfig(moe_layers=[1], num_experts=4),
    "moepp": MoEConfig(moe_layers="every_1", num_experts=4, zero_experts=1),
}


def model_of(moe, **arguments):
    spec = TowerSpec(
        num_layers=2, num_tokens=6, mlp_dim=8, moe=moe, seed=0, **arguments
    )
    tower = Tower((), spec.blocks(lambda _: Attention(2, 4)), LayerNorm())
    tokens = keras.Input((6, 8), name="tokens")
    mask = keras.Input((6,), dtype="bool", name="mask")
    inputs = {"tokens": tokens, "mask": mask}
    outputs = tower(tokens, mask=mask)
    return with_weights(keras.Model(inputs, outputs._asdict()))


@pytest.mark.parametrize("rematerialize", [False, True])
@pytest.mark.parametrize("kind", MOES)
def test_padding_changes_no_other_token(kind, rematerialize):
    model = model_of(MOES[kind], rematerialize=rematerialize)
    other = TOKENS.copy()
    other[0, 4:] = 100.0
    for training in (False, True):
        results = [
            to_numpy(call(model, inputs, training=training)["tokens"])
            for inputs in (
                {"tokens": TOKENS, "mask": MASK},
                {"tokens": other, "mask": MASK},
                {"tokens": TOKENS, "mask": np.ones_like(MASK)},
            )
        ]
        np.testing.assert_allclose(results[0][MASK], results[1][MASK], atol=1e-5)
        difference = results[2][0, :4] - results[0][0, :4]
        assert np.abs(difference).max() > 1e-3


def test_masks_that_do_not_fit_are_refused():
    block = Block(Attention(2, 4), MLP(8))
    with pytest.raises(ValueError, match=r"mask.shape=\(3, 5\)"):
        block(TOKENS, mask=MASK[:, :5])
    with pytest.raises(ValueError, match=r"mask\.dtype=float32"):
        block(TOKENS, mask=MASK.astype("float32"))
    with pytest.raises(TypeError, match="mask"):
        Block(TokenMLP(4), MLP(8))(TOKENS, mask=MASK)


def test_a_config_without_arguments_is_told_which():
    config = TextBackbone.config_class()
    with pytest.raises(ValueError, match=r"lacks \['image_shape', 'patch_size'\]"):
        image_tower(config, None, lambda spec, index: None)
