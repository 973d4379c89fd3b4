"""Exports from PyTorch, and the errors of formats that cannot hold a model."""

import importlib.util

import keras
import numpy as np
import pytest

from keras_moe.models import (
    MixerBackbone,
    MixerImageClassifier,
    ViTBackbone,
    ViTImageClassifier,
)
from tests.small_models import SMALL

on_torch = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="a format of PyTorch"
)
MIXER = {k: v for k, v in SMALL.items() if k != "num_heads"}
ANY_BATCH = {
    "dense": lambda: ViTBackbone.from_config({**SMALL, "moe_layers": None}),
    "vmoe": lambda: ViTBackbone.from_config(SMALL),
    "soft": lambda: ViTBackbone.from_config({**SMALL, "router": "soft"}),
    "mixer_classifier": lambda: MixerImageClassifier(
        MixerBackbone.from_config({**MIXER, "token_mlp_dim": 8}), 3, head_bias=1.0
    ),
}
ONE_BATCH = {
    "expert_choice": {"router": "softmax_expert_choice"},
    "limited": {"eval_capacity_factor": 2.0},
}


def images(batch):
    shape = (batch, *SMALL["image_shape"])
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def run(program, batch):
    import torch

    return program(torch.tensor(images(batch))).detach().numpy()


@on_torch
@pytest.mark.parametrize("name", ANY_BATCH)
def test_pytorch_programs_serve_any_batch(name, tmp_path):
    import torch

    model = ANY_BATCH[name]()
    path = tmp_path / "model.pt2"
    batch = torch.export.Dim("batch", min=1, max=64)
    model.export(path, format="torch", verbose=False, dynamic_shapes={0: batch})
    program = torch.export.load(path).module()
    for size in (1, 3):
        expected = model.predict(images(size), verbose=0)
        np.testing.assert_allclose(run(program, size), expected, rtol=1e-4, atol=1e-5)


@on_torch
@pytest.mark.parametrize("name", ONE_BATCH)
def test_pytorch_programs_of_one_batch(name, tmp_path):
    import torch

    model = ViTBackbone.from_config({**SMALL, **ONE_BATCH[name]})
    path = tmp_path / "model.pt2"
    signature = [keras.InputSpec(shape=(3, *SMALL["image_shape"]), dtype="float32")]
    model.export(path, format="torch", verbose=False, input_signature=signature)
    expected = model.predict(images(3), verbose=0)
    program = torch.export.load(path).module()
    np.testing.assert_allclose(run(program, 3), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="dynamic_shapes"):
        model.export(path, format="torch", dynamic_shapes={0: torch.export.Dim("b")})


@on_torch
@pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is not None, reason="Keras tries it"
)
def test_saved_models_are_refused_with_what_works(tmp_path):
    model = ANY_BATCH["dense"]()
    for arguments in ({}, {"format": "tf_saved_model"}):
        with pytest.raises(ValueError, match=r"'torch' or 'onnx'.*KERAS_BACKEND=jax"):
            model.export(tmp_path / "model", **arguments)
    assert not (tmp_path / "model").exists()


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="others can")
def test_groups_of_images_want_one_size_of_batch(tmp_path):
    with pytest.raises(ValueError, match=r"one size of batch.*input_signature=None"):
        ViTBackbone.from_config({**SMALL, "evaluation": "official"}).export(
            tmp_path / "model"
        )
    assert not (tmp_path / "model").exists()


@on_torch
def test_onnx_refuses_what_pytorch_cannot_translate(tmp_path):
    path = tmp_path / "model.onnx"
    for kwargs in ({}, ONE_BATCH["expert_choice"]):
        with pytest.raises(ValueError, match="router="):
            ViTBackbone.from_config({**SMALL, **kwargs}).export(path, format="onnx")
    soft = {**SMALL, "router": "soft"}
    with pytest.raises(ValueError, match="dtype='mixed_bfloat16'"):
        ViTBackbone.from_config({**soft, "dtype": "mixed_bfloat16"}).export(
            path, format="onnx"
        )
    signature = [keras.InputSpec(shape=(None, *SMALL["image_shape"]))]
    with pytest.raises(ValueError, match=r"shapes=\[\(None"):
        ViTBackbone.from_config(soft).export(
            path, format="onnx", input_signature=signature
        )
    assert not path.exists()


@on_torch
@pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("onnx", "onnxscript", "onnxruntime")
    ),
    reason="needs onnx, onnxscript and onnxruntime",
)
@pytest.mark.parametrize("name", ["dense", "soft", "mixer"])
def test_onnx_of_models_that_sort_nothing(name, tmp_path):
    import onnxruntime

    model = (
        MixerBackbone.from_config({**{**MIXER, "moe_layers": None}, "token_mlp_dim": 8})
        if name == "mixer"
        else ANY_BATCH[name]()
    )
    path = str(tmp_path / "model.onnx")
    signature = [keras.InputSpec(shape=(3, *SMALL["image_shape"]), dtype="float32")]
    for batch, values in ((1, None), (3, signature)):
        model.export(path, format="onnx", verbose=False, input_signature=values)
        session = onnxruntime.InferenceSession(path)
        (outputs,) = session.run(None, {session.get_inputs()[0].name: images(batch)})
        expected = model.predict(images(batch), verbose=0)
        np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="SavedModels come from the other two"
)
def test_a_classifier_is_exported_too(tmp_path):
    import tensorflow as tf

    model = ViTImageClassifier(ViTBackbone.from_config(SMALL), 3, head_bias=1.0)
    model.export(tmp_path / "model", format="tf_saved_model", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "model")
    for size in (1, 3):
        np.testing.assert_allclose(
            loaded.serve(images(size)).numpy(),
            model.predict(images(size), verbose=0),
            rtol=1e-4,
            atol=1e-5,
        )
