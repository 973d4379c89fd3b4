"""KerasHub's own test case, on every backbone and task."""

import importlib

import keras
import keras_hub
import numpy as np
import pytest

from keras_moe import models
from keras_moe.models.backbones._pairs import PairBackbone

TestCase = importlib.import_module("keras_hub.src.tests.test_case").TestCase
SIZES = {"hidden_dim": 16, "num_layers": 1, "mlp_dim": 32}
IMAGE = {"image_shape": (16, 16, 3), "patch_size": 4, **SIZES}
MOE = {"moe_layers": [0], "num_experts": 4}
VIT = {**IMAGE, "num_heads": 2}
MIXER = {**IMAGE, "token_mlp_dim": 8}
TEXT = {"vocabulary_size": 20, "max_length": 6, **SIZES, "num_heads": 2}
SOFT = {"moe": {**MOE, "router": "soft"}, "query_key_norm": True}
# Classes, arguments and shapes of outputs.
IMAGE_BACKBONES = {
    "vit": (models.ViTBackbone, {**VIT, "moe": None}, (2, 17, 16)),
    "vmoe": (models.ViTBackbone, {**VIT, "moe": MOE}, (2, 17, 16)),
    "soft_moe": (models.ViTBackbone, {**VIT, **SOFT}, (2, 17, 16)),
    "mixer": (models.MixerBackbone, {**MIXER, "moe": None}, (2, 16, 16)),
    "moe_mixer": (models.MixerBackbone, {**MIXER, "moe": MOE}, (2, 16, 16)),
}
TASKS = {
    models.ViTBackbone: models.ViTImageClassifier,
    models.MixerBackbone: models.MixerImageClassifier,
}
PROJECTED = {"projection_dim": 4}
TOWERS = {"image": {**VIT, "moe": MOE}, "text": TEXT}
TOKENS = {"tokens": (2, 5, 16), "pooled": (2, 4)}
PAIRS = {"image_embeddings": (2, 4), "text_embeddings": (2, 4)}
TEXT_BACKBONES = {
    "text": (models.TextBackbone, {**TEXT, **PROJECTED, "moe": None}, TOKENS),
    "moe_text": (models.TextBackbone, {**TEXT, **PROJECTED, "moe": MOE}, TOKENS),
    "clip": (models.CLIPBackbone, {**TOWERS, **PROJECTED}, PAIRS),
    "limoe": (models.LIMoEBackbone, {**VIT, **TEXT, **PROJECTED, "moe": MOE}, PAIRS),
}


def images():
    values = np.random.default_rng(0).normal(size=(2, 16, 16, 3))
    return keras.ops.convert_to_tensor(values, "float32")


def texts():
    token_ids = np.random.default_rng(0).integers(1, 20, (2, 5))
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    arrays = {"token_ids": token_ids, "padding_mask": mask}
    return {k: keras.ops.convert_to_tensor(x, "int32") for k, x in arrays.items()}


class Case(TestCase):
    """Not collected by its own name: a test makes it and calls what it has."""

    __test__ = False

    def runTest(self):
        pass

    def run_precision_test(self, cls, init_kwargs, input_data):
        is_dense = "moe" in init_kwargs and init_kwargs["moe"] is None
        if is_dense and not issubclass(cls, PairBackbone):
            super().run_precision_test(cls, init_kwargs, input_data)
            return
        # KerasHub's own asks every layer to have the policy's dtypes, but routers are
        # float32: `test_layers_have_the_policy_of_their_model` has all others.
        for name in ("mixed_bfloat16", "bfloat16"):
            model = cls(**{**init_kwargs, "dtype": name})
            expected = "float32" if issubclass(cls, PairBackbone) else "bfloat16"
            outputs, spec = model(input_data), model.compute_output_spec(input_data)
            for output in keras.tree.flatten((outputs, spec)):
                assert keras.backend.standardize_dtype(output.dtype) == expected


# `TestCase` registers no test of its own here.
del TestCase


@pytest.fixture
def case():
    case = Case()
    case.setUp()
    yield case
    case.tearDown()
    case.doCleanups()


@pytest.mark.parametrize("name", IMAGE_BACKBONES)
def test_image_backbone_and_task(case, name):
    cls, kwargs, shape = IMAGE_BACKBONES[name]
    # Runs `run_backbone_test`, too. It asks for the global image data format
    # "channels_first"; a transformer takes images with their channels last.
    case.run_vision_backbone_test(
        cls=cls,
        init_kwargs=dict(kwargs),
        input_data=images(),
        expected_output_shape=shape,
        run_data_format_check=False,
    )
    converter = keras_hub.layers.ImageConverter(image_size=(16, 16), scale=0.5)
    preprocessor = keras_hub.models.ImageClassifierPreprocessor(converter)
    task = {"backbone": cls(**kwargs), "num_classes": 3}
    case.run_task_test(
        cls=TASKS[cls],
        init_kwargs={**task, "preprocessor": preprocessor},
        train_data=(images(), np.array([0, 2])),
        expected_output_shape=(2, 3),
    )
    for saved, arguments in ((cls, kwargs), (TASKS[cls], task)):
        case.run_model_saving_test(
            cls=saved, init_kwargs=arguments, input_data=images()
        )


@pytest.mark.parametrize("name", TEXT_BACKBONES)
def test_backbones_of_texts_and_pairs(case, name):
    cls, kwargs, shape = TEXT_BACKBONES[name]
    inputs, others = texts(), {}
    if cls is not models.TextBackbone:
        inputs["images"] = images()
        shorter = {k: x if k == "images" else x[:, :3] for k, x in inputs.items()}
        others["variable_length_data"] = [shorter]
    case.run_backbone_test(
        cls=cls,
        init_kwargs=dict(kwargs),
        input_data=inputs,
        expected_output_shape=shape,
        **others,
    )
    case.run_model_saving_test(cls=cls, init_kwargs=kwargs, input_data=inputs)
