"""Exported programs, and the errors of formats that cannot hold a model."""

import functools
import importlib.util
import os

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.routers import SparsityConstrainedAffinity
from tests.compare import assert_close
from tests.pair_models import MOE, ONE, PAIRS, TEXT, TEXTS, one_block
from tests.refusals import refuses
from tests.small_models import (
    ONE_BLOCK,
    SMALL,
    classifier,
    images,
    mixer,
    vit,
    with_weights,
)

BACKEND = keras.backend.backend()
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="a format of PyTorch")
not_on_torch = pytest.mark.skipif(BACKEND == "torch", reason="needs TensorFlow")


ANY_BATCH = {
    "dense": lambda: vit(moe_layers=None),
    "vmoe": lambda: vit(),
    "soft": lambda: vit(**ONE_BLOCK, router="soft"),
    "expert choice": lambda: vit(**ONE_BLOCK, router="softmax_expert_choice"),
    "classifier": lambda: with_weights(classifier()),
    "mixer classifier": lambda: models.MixerImageClassifier(mixer(), 3, head_bias=1.0),
    "dense mixer": lambda: mixer(moe_layers=None),
    "text": lambda: models.TextBackbone.from_config({**TEXT, **MOE, **ONE}),
    "clip": lambda: models.ContrastiveModel(one_block("clip")),
    "limoe": lambda: models.ContrastiveModel(one_block("limoe")),
}


def inputs_of(name, batch):
    if name in ("clip", "limoe", "text"):
        # Programs of PyTorch have texts of the maximum length.
        padded = {key: np.pad(ids, ((0, 0), (0, 1))) for key, ids in TEXTS.items()}
        inputs = padded if name == "text" else {**PAIRS, **padded}
        return {key: value[:batch] for key, value in inputs.items()}
    return images(batch, *SMALL["image_shape"])


def compare(actual, expected, tolerance=1e-5):
    if not isinstance(expected, dict):
        actual, expected = {"": actual}, {"": expected}
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        received = keras.ops.convert_to_numpy(actual[name])
        assert_close(received, value, 1e-4, tolerance)


def signature(batch):
    return [keras.InputSpec(shape=(batch, *SMALL["image_shape"]), dtype="float32")]


# Models, and every affinity and every side that chooses, once.
if BACKEND == "jax":
    SAVED = ["classifier", "limoe", "softmax_token_choice"]
    SAVED += ["sparsity_constrained_expert_choice"]
else:
    SAVED = ["text", "clip", "soft", "sinkhorn_expert_choice"]
    SAVED += ["sparsity_constrained_token_choice"]


@not_on_torch
@pytest.mark.every_backend
@pytest.mark.parametrize("name", SAVED)
def test_saved_models_serve_any_batch(name, tmp_path):
    import tensorflow as tf

    options = {}
    if name.startswith("sparsity") and BACKEND == "jax":
        # Newton's linear solver is not among what TensorFlow can run for JAX.
        options = {"affinity": SparsityConstrainedAffinity(solver="adam")}
    routed = functools.partial(vit, **ONE_BLOCK, router=name, **options)
    model = ANY_BATCH.get(name, routed)()
    model.export(tmp_path / "model", format="tf_saved_model", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "model")
    for size in (1, 3):
        inputs = inputs_of(name, size)
        expected = model.predict(inputs, verbose=0)
        compare(loaded.serve(inputs), expected)
    if name == "text" and BACKEND == "tensorflow":
        # No token sees those behind it.
        outputs = loaded.serve({key: value[:, :4] for key, value in inputs.items()})
        compare(outputs["tokens"], expected["tokens"][:, :4])
    if name in ("clip", "limoe"):
        model.backbone.encoder("text").export(tmp_path / "text", verbose=False)
        # The loaded program has to live as long as its function.
        loaded = tf.saved_model.load(tmp_path / "text")
        compare(loaded.serve(inputs_of("text", 3)), expected["text_embeddings"])


@pytest.mark.skipif(BACKEND != "jax", reason="others can")
@pytest.mark.every_backend
@pytest.mark.parametrize(("config", "message"), [
    ({"evaluation": "official"}, r"one size of batch.*input_signature=None"),
    ({"router": "sparsity_constrained_token_choice"}, r"'adam'.*solver='newton'"),
])  # fmt: skip
def test_what_tensorflow_cannot_read_is_refused(config, message, tmp_path):
    refuses(message, vit(**ONE_BLOCK, **config).export, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "tensorflow", reason="a format of TensorFlow")
@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
@pytest.mark.parametrize("name", ["classifier", "expert choice", "limoe"])
def test_phones_need_no_other_operations(name, tmp_path):
    import tensorflow as tf

    model, path = ANY_BATCH[name](), tmp_path / "model.tflite"
    model.export(path, format="litert", verbose=False)
    builtin = tf.lite.experimental.OpResolverType.BUILTIN
    interpreter = tf.lite.Interpreter(str(path), experimental_op_resolver_type=builtin)
    assert not [x for x in interpreter._get_ops_details() if "Flex" in x["op_name"]]
    run = interpreter.get_signature_runner()
    for size in (1, 3):
        inputs = inputs_of(name, size)
        expected = model.predict(inputs, verbose=0)
        if not isinstance(inputs, dict):
            inputs, expected = {"images": inputs}, {"output_0": expected}
        compare(run(**inputs), expected)


def torch_program(path):
    import torch

    program = torch.export.load(path).module()

    def run(inputs):
        outputs = program(keras.tree.map_structure(torch.tensor, inputs))
        return keras.tree.map_structure(lambda x: x.detach(), outputs)

    return run


@on_torch
@pytest.mark.parametrize("name", ["vmoe", "soft", "expert choice", "clip", "limoe"])
def test_pytorch_programs_serve_any_batch(name, tmp_path):
    import torch

    model, path = ANY_BATCH[name](), tmp_path / "model.pt2"
    # Those of pairs have the batch of an example.
    is_pair = name in ("clip", "limoe")
    sizes = {0: torch.export.Dim("batch", min=1, max=64)}
    options = {} if is_pair else {"dynamic_shapes": sizes}
    model.export(path, format="torch", verbose=False, **options)
    program = torch_program(path)
    for size in (1,) if is_pair else (1, 3):
        inputs = inputs_of(name, size)
        compare(program(inputs), model.predict(inputs, verbose=0))


@on_torch
@pytest.mark.parametrize("config", [
    {"router": "softmax_expert_choice"}, {"eval_capacity_factor": 2.0},
])  # fmt: skip
def test_pytorch_programs_of_one_batch(config, tmp_path):
    import torch

    model, path = vit(**config, evaluation="official"), tmp_path / "model.pt2"
    options = {"format": "torch", "verbose": False}
    model.export(path, **options, input_signature=signature(3))
    inputs = inputs_of("vmoe", 3)
    compare(torch_program(path)(inputs), model.predict(inputs, verbose=0))
    with pytest.raises(ValueError, match="one size of batch"):
        model.export(path, **options, dynamic_shapes={0: torch.export.Dim("b")})


LIMITED = {"evaluation": "batch_invariant", "eval_capacity_factor": 0.5}
ONNX = {
    "vmoe": ANY_BATCH["classifier"],
    "int8": lambda: quantized(with_weights(classifier(**ONE_BLOCK))),
    "capacity": lambda: vit(**ONE_BLOCK, **LIMITED, priority="max_gate"),
    "expert choice": ANY_BATCH["expert choice"],
    "soft": ANY_BATCH["soft"],
    "limoe": ANY_BATCH["limoe"],
    "moepp": lambda: preset("moepp_digits", num_layers=2),
    "mumoe": lambda: preset("mumoe_digits", num_layers=1),
}


def quantized(model):
    model.quantize("int8")
    return model


def preset(name, **config):
    return with_weights(models.from_preset(name, load_weights=False, **config))


def onnx_outputs(path, inputs):
    """What ONNX Runtime makes of the inputs, in the model's structure."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    sizes = {x.shape[0] for x in (*session.get_inputs(), *session.get_outputs())}
    assert sizes in ({"batch"}, {3})
    names = [x.name for x in session.get_inputs()]
    if not isinstance(inputs, dict):
        inputs = {names[0]: inputs}
    assert names == sorted(inputs)
    outputs = session.run(None, inputs)
    names = [x.name for x in session.get_outputs()]
    assert names[0] in ("logits", "tokens", "image_embeddings")
    return dict(zip(names, outputs)) if len(outputs) > 1 else outputs[0]


@on_torch
@pytest.mark.parametrize("name", ONNX)
def test_onnx_serves_any_batch(name, tmp_path):
    model, path = ONNX[name](), tmp_path / "model.onnx"
    model.export(path, format="onnx", verbose=False)
    for batch in (1, 3):
        if name == "limoe":
            inputs = inputs_of(name, batch)
        else:
            inputs = images(batch, *model.input.shape[1:])
        expected = model.predict(inputs, verbose=0)
        compare(onnx_outputs(path, inputs), expected)
    assert os.listdir(tmp_path) == ["model.onnx"]


@on_torch
def test_onnx_of_groups_of_images(tmp_path):
    model = vit(**ONE_BLOCK, evaluation="official")
    path = tmp_path / "new" / "model.onnx"
    message = r"\[keras.InputSpec\('float32', \(8, .*input_signature=None"
    refuses(message, model.export, path, format="onnx")
    model.train()
    model.export(path, format="onnx", verbose=False, input_signature=signature(3))
    assert model.training
    inputs = inputs_of("vmoe", 3)
    compare(onnx_outputs(path, inputs), model.predict(inputs, verbose=0))


@pytest.mark.parametrize("shapes", [
    [(None, 3, *SMALL["image_shape"][1:])],
    [],
    [(None, *SMALL["image_shape"])] * 2,
    {"pictures": (None, *SMALL["image_shape"])},
])  # fmt: skip
def test_signatures_of_other_inputs_are_refused(shapes, tmp_path):
    model = vit(**ONE_BLOCK)
    if isinstance(shapes, dict):
        given = [{name: keras.InputSpec(shape=x) for name, x in shapes.items()}]
    else:
        given = [keras.InputSpec("float32", shape) for shape in shapes]
    message = r"model's inputs, \(None, .*received: inpu"
    for format in {"onnx", "torch", "tf_saved_model"} - {*OTHERS[BACKEND]}:
        options = {"format": format, "input_signature": given}
        refuses(message, model.export, tmp_path / "x", **options)
    assert not list(tmp_path.iterdir())
    for format in ("onnx", "torch"):
        refuses("received a folder: filepath=", model.export, tmp_path, format=format)


OTHERS = {
    "jax": {"onnx": "torch", "torch": "torch", "litert": "tensorflow"},
    "tensorflow": {"onnx": "torch", "torch": "torch"},
    "torch": {"litert": "tensorflow", "tf_saved_model": "jax or tensorflow"},
}


@pytest.mark.every_backend
@pytest.mark.parametrize("format", OTHERS[BACKEND])
def test_other_backends_are_named(format, tmp_path):
    model, other = ANY_BATCH["dense"](), OTHERS[BACKEND][format]
    message = (
        rf"KERAS_BACKEND={other} for.*{BACKEND} writes; received: format='{format}"
    )
    refuses(message, model.export, tmp_path / "model", format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.every_backend
def test_an_older_export_is_replaced_or_stays(tmp_path):
    model = ANY_BATCH["dense"]()
    if BACKEND != "torch":
        folder = tmp_path / "model"
        model.export(folder, verbose=False)
        (folder / "notes.txt").write_text("mine")
        model.export(folder, verbose=False)
        assert (folder / "notes.txt").read_text() == "mine"
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "notes.txt").write_text("mine")
        refuses("an older SavedModel", model.export, tmp_path / "other")
    files = {"torch": "model.pt2", "tensorflow": "model.tflite"}
    if BACKEND in files:
        path = tmp_path / files[BACKEND]
        path.write_text("old")
        format = "torch" if BACKEND == "torch" else "litert"
        refuses("unknown", model.export, path, format=format, unknown=1)
        assert path.read_text() == "old"
        refuses(path.suffix, model.export, tmp_path / "model.x", format=format)
    assert not [x for x in tmp_path.iterdir() if x.name.startswith(".")]


@on_torch
@pytest.mark.parametrize(("config", "message"), [
    ({"router": "sparsity_constrained_token_choice"}, "number of steps is fixed"),
    ({"dtype": "mixed_bfloat16"}, "dtype='mixed_bfloat16'"),
])  # fmt: skip
def test_onnx_refuses_what_it_does_not_hold(config, message, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_text("an earlier model")
    model = vit(**ONE_BLOCK, **config)
    refuses(message, model.export, path, format="onnx")
    if "router" in config:
        with pytest.raises(ValueError, match="format='torch'"):
            model.export(path, format="torch", input_signature=signature(3))
    assert path.read_text() == "an earlier model"


@on_torch
def test_onnx_names_what_is_not_installed(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    missing = {"onnxscript": None}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda x: missing.get(x, find_spec(x) or True)
    )
    with pytest.raises(ImportError, match=r"\[onnx\]"):
        ANY_BATCH["dense"]().export(tmp_path / "model.onnx", format="onnx")
