"""Exports from PyTorch, and the errors of formats that cannot hold a model."""

import importlib.util

import keras
import numpy as np
import pytest

from keras_moe.models import (
    CLIPBackbone,
    ContrastiveModel,
    LIMoEBackbone,
    MixerBackbone,
    MixerImageClassifier,
    TextBackbone,
    ViTBackbone,
    ViTImageClassifier,
)
from keras_moe.models.exporting import export_signature
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


def texts(**moe):
    """A small backbone of texts, with three texts of the largest length."""
    model = TextBackbone(
        vocabulary_size=20, max_length=5, hidden_dim=4, num_layers=1, num_heads=1,
        mlp_dim=4, moe={"moe_layers": [0], "num_experts": 2, **moe},
    )  # fmt: skip
    token_ids = np.array([[1, 7, 3, 19, 0], [1, 5, 6, 8, 19], [2, 19, 0, 0, 0]])
    token_ids = token_ids.astype("int32")
    return model, {"token_ids": token_ids, "padding_mask": token_ids != 0}


@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="SavedModels come from the other two"
)
def test_texts_are_exported_as_saved_models(tmp_path):
    import tensorflow as tf

    model, inputs = texts()
    model.export(tmp_path / "model", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "model")
    expected = model.predict(inputs, verbose=0)
    for rows in (slice(1), slice(3)):
        outputs = loaded.serve({name: value[rows] for name, value in inputs.items()})
        assert outputs.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(outputs[name], value[rows], rtol=1e-4, atol=1e-5)
    if keras.backend.backend() == "tensorflow":
        # No token sees those behind it.
        outputs = loaded.serve({name: value[:, :4] for name, value in inputs.items()})
        np.testing.assert_allclose(
            outputs["tokens"], expected["tokens"][:, :4], rtol=1e-4, atol=1e-5
        )


def pair(kind):
    """A small model of pairs, with two pairs of the longest text."""
    sizes = {"hidden_dim": 4, "num_layers": 1, "num_heads": 1, "mlp_dim": 4}
    image = {"image_shape": (4, 4, 1), "patch_size": 2, **sizes}
    text = {"vocabulary_size": 20, "max_length": 3, **sizes}
    moe = {"moe_layers": [0], "num_experts": 2}
    if kind == "clip":
        backbone = CLIPBackbone(
            image={**image, "moe": moe}, text=text, projection_dim=2
        )
    else:
        backbone = LIMoEBackbone(**{**image, **text}, projection_dim=2, moe=moe)
    token_ids = np.array([[1, 7, 19], [3, 19, 0]], "int32")
    texts = {"token_ids": token_ids, "padding_mask": token_ids != 0}
    photos = np.random.default_rng(0).normal(size=(2, 4, 4, 1)).astype("float32")
    return ContrastiveModel(backbone), {"images": photos, **texts}


@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="SavedModels come from the other two"
)
@pytest.mark.parametrize("kind", ["clip", "limoe"])
def test_pairs_and_each_modality_are_exported_as_saved_models(kind, tmp_path):
    import tensorflow as tf

    model, inputs = pair(kind)
    expected = model.predict(inputs, verbose=0)
    model.export(tmp_path / "pair", verbose=False)
    # The loaded program has to live as long as its function.
    loaded = tf.saved_model.load(tmp_path / "pair")
    outputs = loaded.serve(inputs)
    for name, value in expected.items():
        np.testing.assert_allclose(outputs[name], value, rtol=1e-4, atol=1e-5)
    model.backbone.encoder("text").export(tmp_path / "text", verbose=False)
    texts = {name: inputs[name] for name in ("token_ids", "padding_mask")}
    loaded = tf.saved_model.load(tmp_path / "text")
    np.testing.assert_allclose(
        loaded.serve(texts), expected["text_embeddings"], rtol=1e-4, atol=1e-5
    )


@on_torch
@pytest.mark.parametrize("kind", ["clip", "limoe"])
def test_pairs_are_exported_as_pytorch_programs(kind, tmp_path):
    import torch

    model, inputs = pair(kind)
    path = tmp_path / "pair.pt2"
    model.export(path, format="torch", verbose=False)
    program = torch.export.load(path).module()
    one = {name: torch.tensor(value[:1]) for name, value in inputs.items()}
    outputs = program(one)
    for name, value in model.predict(inputs, verbose=0).items():
        received = outputs[name].detach().numpy()
        np.testing.assert_allclose(received, value[:1], rtol=1e-4, atol=1e-5)


@on_torch
def test_texts_are_exported_with_the_largest_length():
    model, inputs = texts(router="soft")
    for format, batch in (("torch", None), ("onnx", 1)):
        (signature,) = export_signature(model, format, None)
        shapes = {name: spec.shape for name, spec in signature.items()}
        assert shapes == dict.fromkeys(inputs, (batch, 5))
