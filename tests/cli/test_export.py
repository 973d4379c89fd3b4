"""Programs that `keras-moe export` writes; see also `test_exporting.py`."""

import os

import keras
import pytest

from keras_moe import models
from tests.compare import assert_close
from tests.small_models import ONE_BLOCK, images, vit, with_weights

BACKEND = keras.backend.backend()
SHAPE = (16, 8, 2)


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "preset"
    model = models.ViTImageClassifier(vit(**ONE_BLOCK), 3)
    with_weights(model).save_to_preset(folder)
    return folder


def served(path, inputs):
    """What a program makes of inputs, without this library."""
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        return session.run(["logits"], {"images": inputs})[0]
    if path.suffix == ".pt2":
        import torch

        program = torch.export.load(path).module()
        return program(torch.tensor(inputs)).detach().numpy()
    import tensorflow as tf

    if path.suffix == ".tflite":
        run = tf.lite.Interpreter(str(path)).get_signature_runner()
        return run(images=inputs)["output_0"]
    return tf.saved_model.load(path).serve(inputs).numpy()


WRITTEN = {
    "jax": ["folder"],
    "tensorflow": ["model.tflite", "folder"],
    "torch": ["model.onnx", "model.pt2"],
}


@pytest.mark.every_backend
@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
@pytest.mark.parametrize("name", WRITTEN[BACKEND])
def test_programs_serve_any_batch(preset, done, name, tmp_path):
    path = tmp_path / name
    options = () if path.suffix else ("--format", "saved_model")
    assert "ViTImageClassifier" in done("export", preset, path, *options)
    model = models.from_preset(str(preset))
    for size in (1, 3):
        inputs = images(size, *SHAPE)
        assert_close(served(path, inputs), model.predict(inputs, verbose=0), 1e-4, 1e-5)
    assert os.listdir(tmp_path) == [name]


def test_weights_for_another_library(done, tmp_path):
    folder = tmp_path / "dense"
    config = {"image_shape": (8, 8, 3), "embedding_norm": True, "activation": "gelu"}
    vit(moe_layers=None, **config, class_token=True).save_to_preset(folder)
    done("export", folder, tmp_path / "hf", "--format", "transformers")
    assert sorted(os.listdir(tmp_path / "hf")) == [
        *("config.json", "model.safetensors", "preprocessor_config.json")
    ]
    inputs = images(1, 8, 8, 3)
    one, other = (models.from_preset(str(x)) for x in (folder, tmp_path / "hf"))
    outputs = [
        x.predict(inputs, verbose=0) for x in (one, getattr(other, "backbone", other))
    ]
    assert_close(*outputs, 1e-5, 1e-5)


@pytest.mark.parametrize(("arguments", "message"), [
    (("model",), "--format, or a file that ends with .onnx or .pt2 or .tflite"),
    (("x", "--format", "timm", "--batch-size", 2), "--batch-size for a program"),
    (("x", "--format", "timm"), "dense"),
])  # fmt: skip
def test_what_is_refused(preset, mistake, tmp_path, arguments, message):
    output, *options = arguments
    assert message in mistake("export", preset, tmp_path / output, *options)
    assert not list(tmp_path.iterdir())


@pytest.mark.every_backend
def test_another_backend_is_named(mistake, tmp_path):
    name, other = {
        "jax": ("model.onnx", "torch"),
        "tensorflow": ("model.pt2", "torch"),
        "torch": ("model.tflite", "tensorflow"),
    }[BACKEND]
    # Before the model is looked for.
    message = mistake("export", "no_such_preset", tmp_path / name)
    assert f"Expected KERAS_BACKEND={other} for" in message
