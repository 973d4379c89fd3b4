"""Public classes can be loaded when saved, or are refused: abstract or unregistered."""

import copy
import importlib
import inspect
import pickle

import keras
import numpy as np
import pytest

from keras_moe import layers, losses, models, routers
from tests.refusals import refuses
from tests.small_models import SMALL

ROOMS = ("losses", "routers", "layers", "models", "data", "training", "evaluation")
ROOMS += ("analysis", "distribution", "report", "ops")


def saveable_classes():
    """All public classes of which a config is made."""
    for room in ROOMS:
        module = importlib.import_module(f"keras_moe.{room}")
        for name in module.__all__:
            cls = getattr(module, name)
            if inspect.isclass(cls) and hasattr(cls, "get_config"):
                yield cls


# Base classes, by how they would be made.
ABSTRACT = {
    losses.ContrastiveLoss: (lambda cls: cls(), "SoftmaxContrastiveLoss"),
    routers.Affinity: (lambda cls: cls(), "SoftmaxAffinity"),
    routers.Router: (lambda cls: cls(4), "TokenChoiceRouter"),
    routers.SparseRouter: (lambda cls: cls(4), "TokenChoiceRouter"),
    models.MoEBackbone: (lambda cls: cls(), "ViTBackbone"),
    models.ImageBackbone: (lambda cls: cls(), "ViTBackbone"),
    models.MoETask: (
        lambda cls: cls(keras.Input((1,)), None, None, {}),
        "ViTImageClassifier",
    ),
    models.ImageClassifier: (lambda cls: cls(backbone(), 3), "ViTImageClassifier"),
}


def backbone(cls=models.ViTBackbone, **kwargs):
    return cls.from_config({**SMALL, **kwargs})


def test_every_class_that_can_be_made_is_registered():
    found = set(saveable_classes())
    assert len(found) > 40
    for cls in found:
        name = keras.saving.get_registered_name(cls)
        is_registered = keras.saving.get_registered_object(name) is cls
        assert is_registered != (cls in ABSTRACT), cls


@pytest.mark.parametrize("cls", ABSTRACT)
def test_base_classes_are_refused(cls):
    make, example = ABSTRACT[cls]
    message = f"extends {cls.__name__}, such as {example}; received: {cls.__name__} it"
    refuses(message, make, cls)


def test_the_refusal_names_the_class_for_the_backbone(outside):
    sizes = {"image_shape": (16, 8, 3), "patch_size": 4, "hidden_dim": 8, "mlp_dim": 16}
    for each, example in (
        (models.MixerBackbone(**sizes, num_layers=1), "MixerImageClassifier"),
        (outside.NeighbourBackbone(**sizes), "NeighbourClassifier"),
        (backbone(Unregistered), "ViTImageClassifier"),
    ):
        refuses(example, models.ImageClassifier, each, 3)


class Unregistered(models.ViTBackbone):
    pass


class UnregisteredTask(models.ViTImageClassifier):
    pass


class UnregisteredHead(layers.MuMoE):
    pass


class UnregisteredLayer(keras.layers.Layer):
    def call(self, inputs):
        return inputs


def unsaveable():
    yield "UnregisteredTask", UnregisteredTask(backbone(), 3)
    yield "Unregistered", backbone(Unregistered)
    yield "Unregistered", models.ViTImageClassifier(backbone(Unregistered), 3)
    head = UnregisteredHead(3, num_experts=2, rank=2)
    yield "UnregisteredHead", models.ViTImageClassifier(backbone(), 3, head=head)
    layer = UnregisteredLayer()
    yield (
        "UnregisteredLayer",
        models.ViTImageClassifier(backbone(), 3, preprocessor=layer),
    )


def test_saving_an_unregistered_class_is_refused(tmp_path):
    file, folder = tmp_path / "model.keras", tmp_path / "preset"
    file.write_text("the good one")
    for name, model in unsaveable():
        for save in (
            lambda: model.save(file),  # noqa: B023
            lambda: model.save_to_preset(folder),  # noqa: B023
            lambda: keras.saving.save_model(model, tmp_path / "x.keras"),  # noqa: B023
            lambda: pickle.dumps(model),  # noqa: B023
            lambda: copy.deepcopy(model),  # noqa: B023
        ):
            refuses(f"register_.*; received: .*with {name},", save)
        assert file.read_text() == "the good one"
        assert not folder.exists()
        # Weights need no class.
        model.save_weights(tmp_path / "all.weights.h5")
        model.load_weights(tmp_path / "all.weights.h5")


def test_a_class_with_a_name_is_saved(tmp_path):
    model = UnregisteredTask(backbone(), 3)
    model.optimizer.build(model.trainable_variables)
    with keras.saving.custom_object_scope({"UnregisteredTask": UnregisteredTask}):
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded) is UnregisteredTask
    assert all(
        np.array_equal(a, b) for a, b in zip(model.get_weights(), loaded.get_weights())
    )
