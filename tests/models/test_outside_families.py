"""A family and a router from outside have all that the package's own have."""

import importlib

import keras
import numpy as np
import pytest

from keras_moe import distribution, models
from keras_moe.layers import MoEConfig
from tests.small_models import images, with_weights

pytestmark = pytest.mark.usefixtures("op_by_op")
NAME = "neighbours_tiny"


@pytest.fixture(scope="module", autouse=True)
def outside():
    """The module of a user, whose names are registered for these tests alone."""
    return importlib.import_module("tests.models.outside")


def test_a_preset_trains_with_any_router(tmp_path, outside):
    for router in ("soft", "sinkhorn_expert_choice", "sharp_token_choice"):
        keras.utils.set_random_seed(0)
        model = models.from_preset(NAME, num_classes=3, num_experts=4, router=router)
        assert type(model) is outside.NeighbourClassifier
        assert type(model.backbone) is outside.NeighbourBackbone
        labels = np.array([0, 1, 2])
        model.compile(keras.optimizers.Adam(1e-2))
        losses = model.fit(images(), labels, epochs=8, verbose=0).history["loss"]
        assert losses[-1] < losses[0]
        model.save_to_preset(tmp_path / router)
        again = models.from_preset(str(tmp_path / router))
        assert type(again) is outside.NeighbourClassifier
        np.testing.assert_allclose(
            again.predict(images(), verbose=0),
            model.predict(images(), verbose=0),
            atol=1e-5,
        )


def test_it_is_described_and_laid_out():
    overrides = {"num_experts": 4, "num_layers": 3}
    model = models.from_preset(NAME, num_classes=3, **overrides)
    described = models.describe(NAME, num_classes=3, **overrides)
    weights = model.trainable_weights
    assert described.parameters == sum(int(np.prod(w.shape)) for w in weights)
    assert [part.kind[:3] for part in described.parts[1:4]] == ["den", "MoE", "den"]
    assert described.gflops > 0
    layouts = distribution.layouts(NAME, 4, expert_parallel=4, **overrides)
    assert any("experts" in rule for rule in layouts.weights)
    assert NAME in models.list_presets()


def test_a_router_of_ones_own_works_in_every_preset(outside):
    sharp = outside.SharpRouter
    for router in ("sharp_token_choice", sharp, sharp(4)):
        moe = MoEConfig(moe_layers=[1], num_experts=4, router=router)
        for preset in ("vmoe_digits", NAME):
            backbone = models.from_preset(preset, moe=moe, load_weights=False)
            layer = backbone.get_layer("block_1").feed_forward
            assert type(layer.router) is sharp
            again = type(backbone).from_config(backbone.get_config())
            assert again.moe == backbone.moe
    by_name = models.from_preset(
        "vmoe_digits", router="sharp_token_choice", load_weights=False
    )
    router = by_name.get_layer("block_1").feed_forward.router
    assert router.num_selected_experts == 1


def test_its_weights_keep_public_paths():
    backbone = with_weights(models.from_preset(NAME, num_experts=4))
    paths = {weight.path for weight in backbone.weights}
    assert {"block_1/moe/router/kernel", "block_0/mix/mix/kernel"} <= paths
    with pytest.raises(ValueError, match=r"num_expert=3 \(nearest: num_experts"):
        models.from_preset(NAME, num_expert=3)
