"""KerasHub's own test case, on every backbone and task."""

import importlib
import sys
import types

import keras
import keras_hub
import numpy as np
import pytest

from keras_moe.layers import LogitScale
from keras_moe.models import (
    CLIPBackbone,
    LIMoEBackbone,
    MixerBackbone,
    MixerImageClassifier,
    TextBackbone,
    ViTBackbone,
    ViTImageClassifier,
)
from keras_moe.models.pair_backbone import PairBackbone
from keras_moe.routers import Router


def keras_hub_test_case():
    """KerasHub's class, whose file imports grain for its tests of preprocessors."""
    try:
        importlib.import_module("grain")
    except ImportError:
        sys.modules["grain"] = types.ModuleType("grain")
        try:
            return importlib.import_module("keras_hub.src.tests.test_case").TestCase
        finally:
            # KerasHub's pipelines take whatever they can import for the real one.
            del sys.modules["grain"]
    return importlib.import_module("keras_hub.src.tests.test_case").TestCase


TestCase = keras_hub_test_case()
SIZES = {
    "image_shape": (16, 16, 3),
    "patch_size": 4,
    "hidden_dim": 16,
    "num_layers": 1,
    "mlp_dim": 32,
    "moe": None,
}
MOE = {"moe_layers": [0], "num_experts": 4}
VIT = {**SIZES, "num_heads": 2}
MIXER = {**SIZES, "token_mlp_dim": 8}
BACKBONES = {
    "vit": (ViTBackbone, VIT, 17),
    "vmoe": (ViTBackbone, {**VIT, "moe": MOE}, 17),
    "soft_moe": (
        ViTBackbone,
        {**VIT, "moe": {**MOE, "router": "soft"}, "query_key_norm": True},
        17,
    ),
    "mixer": (MixerBackbone, MIXER, 16),
    "moe_mixer": (MixerBackbone, {**MIXER, "moe": MOE}, 16),
}
TASKS = {ViTBackbone: ViTImageClassifier, MixerBackbone: MixerImageClassifier}


def images():
    values = np.random.default_rng(0).normal(size=(2, 16, 16, 3))
    return keras.ops.convert_to_tensor(values, "float32")


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
        # KerasHub's own asks every weight and layer to have the policy's dtypes.
        # Routers are float32 under every policy, so here all others must have them.
        # Not float16: on CPUs JAX has no attention in it.
        for name in ("mixed_bfloat16", "bfloat16"):
            policy = keras.dtype_policies.get(name)
            model = cls(**{**init_kwargs, "dtype": name})
            outputs, spec = model(input_data), model.compute_output_spec(input_data)
            for output in keras.tree.flatten((outputs, spec)):
                dtype = keras.backend.standardize_dtype(output.dtype)
                # Embeddings of pairs are float32, too.
                is_pair = issubclass(cls, PairBackbone)
                assert dtype == ("float32" if is_pair else policy.compute_dtype)
            for layer in model._flatten_layers(include_self=False):
                if isinstance(layer, keras.layers.InputLayer):
                    continue
                expected = policy
                if isinstance(layer, (LogitScale, Router)):
                    expected = keras.dtype_policies.get("float32")
                assert layer.compute_dtype == expected.compute_dtype, layer.path
                assert layer.variable_dtype == expected.variable_dtype, layer.path


# `TestCase` registers no test of its own here.
del TestCase


@pytest.fixture
def case():
    case = Case()
    case.setUp()
    yield case
    case.tearDown()
    case.doCleanups()


@pytest.mark.parametrize("name", BACKBONES)
def test_backbone(case, name):
    cls, kwargs, num_tokens = BACKBONES[name]
    # Runs `run_backbone_test`, too.
    case.run_vision_backbone_test(
        cls=cls,
        init_kwargs=dict(kwargs),
        input_data=images(),
        expected_output_shape=(2, num_tokens, 16),
        # It asks for the global image data format "channels_first"; a transformer
        # takes images with their channels last. Nor has it maps of several sizes.
        run_data_format_check=False,
    )


@pytest.mark.parametrize("name", BACKBONES)
def test_task(case, name):
    cls, kwargs, _ = BACKBONES[name]
    case.run_task_test(
        cls=TASKS[cls],
        init_kwargs={
            "backbone": cls(**kwargs),
            "num_classes": 3,
            "preprocessor": keras_hub.models.ImageClassifierPreprocessor(
                keras_hub.layers.ImageConverter(image_size=(16, 16), scale=0.5)
            ),
        },
        train_data=(images(), np.array([0, 2])),
        expected_output_shape=(2, 3),
    )


@pytest.mark.parametrize("name", BACKBONES)
def test_saving(case, name):
    cls, kwargs, _ = BACKBONES[name]
    case.run_model_saving_test(cls=cls, init_kwargs=kwargs, input_data=images())
    case.run_model_saving_test(
        cls=TASKS[cls],
        init_kwargs={"backbone": cls(**kwargs), "num_classes": 3},
        input_data=images(),
    )


TEXTS = {
    "vocabulary_size": 20,
    "max_length": 6,
    "hidden_dim": 16,
    "num_layers": 1,
    "num_heads": 2,
    "mlp_dim": 32,
    "projection_dim": 4,
}


def texts():
    token_ids = np.random.default_rng(0).integers(1, 20, (2, 5))
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    arrays = {"token_ids": token_ids, "padding_mask": mask}
    return {k: keras.ops.convert_to_tensor(x, "int32") for k, x in arrays.items()}


@pytest.mark.parametrize("moe", [None, MOE])
def test_text_backbone(case, moe):
    init_kwargs = {**TEXTS, "moe": moe}
    case.run_backbone_test(
        cls=TextBackbone,
        init_kwargs=dict(init_kwargs),
        input_data=texts(),
        expected_output_shape={"tokens": (2, 5, 16), "pooled": (2, 4)},
    )
    case.run_model_saving_test(
        cls=TextBackbone, init_kwargs=init_kwargs, input_data=texts()
    )


IMAGE = {**VIT, "moe": MOE}
TEXT = {name: value for name, value in TEXTS.items() if name != "projection_dim"}
PAIRS = {
    "clip": (CLIPBackbone, {"image": IMAGE, "text": TEXT, "projection_dim": 4}),
    "limoe": (LIMoEBackbone, {**IMAGE, **TEXTS, "moe": MOE}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pair_backbone(case, name):
    cls, init_kwargs = PAIRS[name]
    pairs = {"images": images(), **texts()}
    shorter = {k: x if k == "images" else x[:, :3] for k, x in pairs.items()}
    case.run_backbone_test(
        cls=cls,
        init_kwargs=dict(init_kwargs),
        input_data=pairs,
        expected_output_shape={"image_embeddings": (2, 4), "text_embeddings": (2, 4)},
        variable_length_data=[shorter],
    )
    case.run_model_saving_test(cls=cls, init_kwargs=init_kwargs, input_data=pairs)
