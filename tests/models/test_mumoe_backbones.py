"""muMoE in backbones, and dense models upcycled to it."""

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.analysis import expert_load
from keras_moe.training import upcycle
from tests.compare import assert_close, to_numpy
from tests.pair_models import IMAGE
from tests.small_models import images

SMALL = {**IMAGE, "mlp_dim": 12, "seed": 0}
del SMALL["num_heads"]
VIT = {**SMALL, "num_heads": 2, "moe_layers": [1], "num_experts": (4, 2)}
VIT |= {"factorization": "tr", "rank": (2, 2, 2, 6)}
MIXER_SIZES = {**SMALL, "token_mlp_dim": 6, "moe_layers": "every_1", "num_experts": 4}
MIXER = {**MIXER_SIZES, "rank": 7, "token_mixer": "mumoe"}
MODELS = {
    "vit": lambda **kw: models.ViTImageClassifier(
        models.ViTBackbone.from_config({"router": "mumoe", **{**VIT, **kw}}), 3
    ),
    "mixer": lambda **kw: models.MixerImageClassifier(
        models.MixerBackbone.from_config({"router": "mumoe", **{**MIXER, **kw}}), 3
    ),
}


IMAGES, LABELS = images(6, 8, 8, 3), np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("name", MODELS)
def test_trains_and_keeps_statistics(name):
    model = MODELS[name](rematerialize=name == "vit")
    gates = [v for v in model.variables if "moving_variance" in v.path]
    assert len(gates) == (2 if name == "vit" else 4)
    history = model.fit(IMAGES, LABELS, batch_size=6, epochs=3, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    # The gates begin at zero, so that each step takes the variance down at first.
    for variance in gates:
        assert to_numpy(variance).max() < 0.8
    # At inference an image is by itself.
    alone = model.predict(IMAGES[2:3], verbose=0)
    together = model.predict(IMAGES, verbose=0)
    assert_close(alone, together[2:3], 1e-4, 1e-6)
    records = keras.Model(model.input, model.routing).predict(IMAGES, verbose=0)
    for record in records.values():
        assert_close(record.gates.sum(axis=-1), 1.0, 1e-5)
    if name == "mixer":
        blocks = ["block_0", "block_1"]
        assert sorted(records) == sorted(
            [*blocks, *(f"{b}/token_mixer" for b in blocks)]
        )
        # The records are of 4 patches, and of 8 channels.
        assert records["block_1"].gates.shape == (6, 4, 4)
        assert records["block_1/token_mixer"].gates.shape == (6, 8, 4)
        assert expert_load(records["block_1/token_mixer"], 0.01).sum() > 0
    backbone = model.backbone
    assert backbone.expert_types == ((8 if name == "vit" else 4), 0, 0, 0)
    trained = sum(int(np.prod(v.shape)) for v in backbone.trainable_variables)
    assert models.describe(backbone).parameters == trained


CASES = {
    "cp": (4, {"rank": 13}),
    "cp, levels, softmax": ((3, 2), {"rank": 20, "gate_activation": "softmax"}),
    "tr": (4, {"factorization": "tr", "rank": (3, 2, 7)}),
    "tr, levels": ((4, 2), {"factorization": "tr", "rank": (2, 3, 2, 7)}),
    "tucker": (4, {"factorization": "tucker", "rank": (2, 9, 9)}),
    "whole": (4, {"factorization": None}),
}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backbone", [models.ViTBackbone, models.MixerBackbone])
def test_upcycling_preserves_the_function_where_the_ranks_hold_it(case, backbone):
    num_experts, options = CASES[case]
    own = {"num_heads": 2} if backbone is models.ViTBackbone else {"token_mlp_dim": 6}
    dense = backbone(**SMALL, **own)
    for variable in dense.variables:
        if variable.path.endswith(("kernel", "bias")):
            shape = variable.shape
            variable.assign(np.random.default_rng(len(shape)).normal(size=shape) / 4)
    model, report = upcycle(
        dense, num_experts, moe_layers=[1], router="mumoe", **options
    )
    assert report.preserved
    assert report.largest_difference < 1e-4
    assert list(model.routing) == ["block_1"]
    # An expert's matrix is the dense layer's, its last row the bias.
    experts = model.get_layer("block_1").feed_forward.hidden
    place = (1, 1) if len(experts.num_experts) == 2 else 1
    layer = dense.get_layer("block_1").feed_forward.hidden
    matrix = to_numpy(experts.expert_weights([place]))[0]
    assert_close(matrix[:-1], layer.kernel, atol=1e-5)
    assert_close(matrix[-1], layer.bias, atol=1e-5)


@pytest.mark.parametrize(("preset", "network", "mlps"), [
    ("mixer_s16", 18_528_264, 17_604_128),
    ("mumoe_mixer_s16_cp", 18_630_616, 17_706_480),
    ("mumoe_mixer_s16_tr", 18_290_792, 17_366_656),
])  # fmt: skip
def test_counts_of_the_papers_mixers(preset, network, mlps):
    """Tables 3, 4 and 9: 18.5M, 18.6M and 18.3M, of which MLPs 17.7M and 17.4M."""
    actual = models.describe(preset, num_classes=1000)
    assert actual.parameters == network
    blocks = [part for part in actual.parts if part.name.startswith("block_")]
    norms = 4 * 512
    assert sum(part.parameters - norms for part in blocks) == mlps


def test_upcycling_with_less_rank_says_how_near():
    dense = models.MixerBackbone.from_config({**SMALL, "token_mlp_dim": 6})
    actual = []
    for rank in (2, 5, 8):
        _, report = upcycle(dense, 4, moe_layers=[1], router="mumoe", rank=rank)
        assert report.preserved == (rank >= 9)
        actual.append(report.largest_difference)
    assert actual[0] > actual[1] > actual[2]
