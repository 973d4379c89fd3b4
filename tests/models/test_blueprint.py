"""One blueprint for every source."""

import json

import keras
import pytest

from keras_moe import models
from tests import golden
from tests.published import hub_vit
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("op_by_op")

PUBLISHED = str(golden.FOLDER / "07_checkpoints" / "vit_classic.npz")
SIZES = {
    "image_shape": [8, 8, 3], "patch_size": 4, "hidden_dim": 8, "num_layers": 2,
    "num_heads": 2, "mlp_dim": 16,
}  # fmt: skip
KINDS = ("built-in", "from outside", "backbone", "task", "published", "KerasHub")
OUTSIDE = {
    "description": "A ViT of the tests", "backbone": models.ViTBackbone,
    "task": "ViTImageClassifier", "config": SIZES,
    "task_config": {"dropout": 0.25},
    "class_names": ["no", "yes"],
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    models.register_presets({"vit_of_tests": OUTSIDE})
    folder = tmp_path_factory.mktemp("sources")
    model = models.from_preset("vit_of_tests", num_classes=2, pooling="average")
    model.save_to_preset(folder / "task")
    model.backbone.save_to_preset(folder / "backbone")
    names = ("vmoe_digits", "vit_of_tests", str(folder / "backbone"))
    return dict(zip(KINDS, (*names, str(folder / "task"), PUBLISHED, hub_vit())))


@pytest.mark.parametrize("kind", KINDS)
def test_activation_is_the_backbones_in_every_source(sources, kind):
    overrides = {"num_classes": 3, "activation": "gelu", "output_activation": "softmax"}
    with models.resolve(sources[kind], overrides) as blueprint:
        assert blueprint.config["activation"] == "gelu"
        assert blueprint.task is models.ViTImageClassifier
        assert blueprint.task_config["output_activation"] == "softmax"
        assert blueprint.task_config["num_classes"] == 3
    for model in (
        models.from_preset(sources[kind], **overrides),
        models.ViTImageClassifier.from_preset(sources[kind], **overrides),
    ):
        assert type(model) is models.ViTImageClassifier
        assert model.backbone.get_config()["activation"] == "gelu"
        assert model.output_activation == "softmax"


@pytest.mark.parametrize("kind", KINDS)
def test_described_is_what_is_built(sources, kind):
    new = {"num_classes": 5, "image_shape": (16, 8, 3), "representation_dim": 4}
    for overrides in ({}, new):
        options = {"load_weights": not overrides}
        with models.resolve(sources[kind], overrides, **options) as blueprint:
            description = blueprint.describe()
            blocks = blueprint.unbuilt_blocks()
            model = blueprint.build()
        assert description.parameters == model.count_params()
        backbone = getattr(model, "backbone", model)
        assert [x.name for x in blocks] == [
            x.name for x in backbone.layers if x.name.startswith("block")
        ]
        assert not any(layer.built for layer in blocks)
        again = models.describe(sources[kind], **options, **overrides)
        assert again.to_dict() == description.to_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("overrides", "options", "message"), [
    ({"num_laers": 2}, {}, r"num_laers=2 \(nearest: num_layers"),
    ({"num_classes": 3, "poling": "map"}, {}, r"poling='map' \(nearest: pooling"),
    ({}, {"task": "image_clasifier"}, "task='image_clasifier'"),
    ({"pooling": "map"}, {"task": "backbone"}, "pooling='map'"),
    ({}, {"cls": models.MixerImageClassifier}, "a MixerBackbone for .*a ViTBackbone"),
])  # fmt: skip
def test_every_source_refuses_alike(sources, kind, overrides, options, message):
    refuses(message, models.resolve, sources[kind], overrides, **options)


def test_a_model_is_a_source(sources):
    model = models.from_preset(sources["task"])
    blueprint = models.resolve(model)
    assert blueprint.name == model.name
    assert blueprint.describe().parameters == model.count_params()
    again = blueprint.build()
    assert type(again) is type(model)
    configs = (json.loads(json.dumps(x.get_config())) for x in (again, model))
    assert next(configs) == next(configs)
    refuses("num_classes", models.resolve, model, {"num_classes": 3})
    # Its weights are not in the blueprint: a copy is `model.copy()`.
    refuses("name of a preset", models.from_preset, model)
    refuses(r"MixerBackbone.*received: Sequential", models.resolve, keras.Sequential())


def test_a_preset_brings_its_head(sources):
    model = models.from_preset(sources["from outside"], num_classes=2)
    assert model.dropout == 0.25
    assert model.preprocessor.class_names == ("no", "yes")
    other = models.from_preset(sources["from outside"], num_classes=3, dropout=0.5)
    assert other.dropout == 0.5
    assert other.preprocessor.class_names is None
    assert models.list_presets()["vit_of_tests"] == "A ViT of the tests"
    assert "vit_of_tests" in models.ViTImageClassifier.presets
    assert "vit_of_tests" not in models.MixerBackbone.presets
