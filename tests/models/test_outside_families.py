"""Families, routers and tasks from outside have all that the package's own have."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_moe import distribution, models
from keras_moe.layers import MoEConfig
from keras_moe.models import MoETask, ViTBackbone
from tests.compare import assert_same
from tests.small_models import SMALL, assert_same_outputs, images

pytestmark = pytest.mark.usefixtures("op_by_op", "outside")
NAME = "neighbours_tiny"


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
        assert_same_outputs(again, model, images(), atol=1e-5)


def test_it_is_described_and_laid_out_by_public_paths():
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
    paths = {weight.path for weight in model.backbone.weights}
    assert {"block_1/moe/router/kernel", "block_0/mix/mix/kernel"} <= paths
    with pytest.raises(ValueError, match=r"num_expert=3 \(nearest: num_experts"):
        models.from_preset(NAME, num_expert=3)


def test_a_router_of_ones_own_works_in_every_preset(outside):
    sharp = outside.SharpRouter
    for router in ("sharp_token_choice", sharp, sharp(4)):
        moe = MoEConfig(moe_layers=[1], num_experts=4, router=router)
        for preset in ("vmoe_digits", NAME):
            options = {"task": "backbone", "load_weights": False}
            backbone = models.from_preset(preset, moe=moe, **options)
            layer = backbone.get_layer("block_1").feed_forward
            assert type(layer.router) is sharp
            if isinstance(router, str):
                assert layer.router.num_selected_experts == 1
            again = type(backbone).from_config(backbone.get_config())
            assert again.moe == backbone.moe


PHOTOS = images(3, *SMALL["image_shape"])
TOKEN_IDS = np.array([[1, 2], [3, 0], [4, 1]], "int32")


@keras.saving.register_keras_serializable("tests")
class Matching(MoETask, keras_hub.models.Task):
    """Whether an image and two words match, as one number."""

    backbone_cls = ViTBackbone
    task_name = "matching"

    def __init__(self, backbone, vocabulary_size=5, preprocessor=None, **kwargs):
        self.backbone, self.preprocessor = backbone, preprocessor
        self.embedding = keras.layers.Embedding(
            vocabulary_size, backbone.hidden_dim, name="words"
        )
        token_ids = keras.Input((2,), name="token_ids", dtype="int32")
        of_image = keras.ops.mean(backbone(backbone.input), 1)
        of_text = keras.ops.mean(self.embedding(token_ids), 1)
        super().__init__(
            {"images": backbone.input, "token_ids": token_ids},
            keras.ops.sum(of_image * of_text, -1),
            {"image": of_image, "text": of_text},
            backbone.routing,
            **kwargs,
        )
        self.vocabulary_size = vocabulary_size

    def default_loss(self):
        return keras.losses.BinaryCrossentropy(from_logits=True)

    def get_config(self):
        return {**super().get_config(), "vocabulary_size": self.vocabulary_size}


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    return Matching(ViTBackbone.from_config(SMALL))


def inputs(**changes):
    return {"images": PHOTOS, "token_ids": TOKEN_IDS, **changes}


def test_it_trains_with_its_loss_and_has_features_of_both(model):
    history = model.copy().fit(inputs(), np.array([1, 0, 1]), verbose=0).history
    assert np.isfinite(history["loss"]).all()
    features = keras.Model(model.input, model.features).predict(inputs(), verbose=0)
    assert {k: v.shape for k, v in features.items()} == {
        "image": (3, SMALL["hidden_dim"]),
        "text": (3, SMALL["hidden_dim"]),
    }
    assert set(model.routing) == set(model.backbone.routing)


def test_each_input_is_checked_by_its_name(model):
    with pytest.raises(ValueError, match=r"Expected token_ids of shape \(batch, 2\)"):
        model.predict(inputs(token_ids=np.zeros((3, 4), "int32")))
    with pytest.raises(ValueError, match=r"Expected images of shape \(batch, "):
        model.fit(inputs(images=np.zeros((3, 4, 4, 3))), np.zeros(3))
    with pytest.raises(ValueError, match="at least one"):
        model.evaluate(inputs(token_ids=TOKEN_IDS[:0]), np.zeros(3))
    with pytest.warns(UserWarning, match="127.5"):
        model.copy().predict(inputs(images=np.full(PHOTOS.shape, 255, "uint8")))
    nothing = {name: value[:0] for name, value in inputs().items()}
    assert model.predict(nothing).shape == (0,)


def test_presets_keep_it_whole(model, tmp_path):
    expected = model.predict(inputs(), verbose=0)
    model.save_to_preset(tmp_path / "matching")
    again = models.from_preset(str(tmp_path / "matching"))
    assert type(again) is Matching
    assert_same(again.predict(inputs(), verbose=0), expected)
    model.save(tmp_path / "matching.keras")
    again = keras.saving.load_model(tmp_path / "matching.keras")
    assert_same(again.predict(inputs(), verbose=0), expected)
    described = models.describe(model).parameters
    assert described == models.describe(model.backbone).parameters
