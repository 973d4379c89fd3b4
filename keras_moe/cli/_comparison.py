"""Comparison of a converted model with the source's own model, on one image."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_moe import models
from keras_moe.models.conversion import hub_model, image_normalization, open_folder

# Largest difference between two frameworks on one image, over the outputs' size; the
# second in half precision.
TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
UNCOMPARED = "not compared with the source's model"


class Uncompared(Exception):
    """The reason why the source's own model cannot be asked."""


def fixed_inputs(model: keras.Model) -> Any:
    """One example, always the same: an image in [-1, 1], a text, or a pair of both."""
    generator = np.random.default_rng(0)
    inputs = model.input if isinstance(model.input, dict) else {"images": model.input}
    example = {}
    if "images" in inputs:
        shape = (1, *inputs["images"].shape[1:])
        example["images"] = generator.uniform(-1, 1, shape).astype("float32")
    if not isinstance(model.input, dict):
        return example["images"]
    backbone = getattr(model, "backbone", model)
    config = backbone.get_config()
    shape = (1, backbone.max_length)
    token_ids = generator.integers(0, backbone.vocabulary_size, shape)
    end = config.get("text", config).get("end_of_text_id")
    if end is not None:
        token_ids[:, -1] = end
    return {
        **example,
        "token_ids": token_ids.astype("int32"),
        "padding_mask": np.ones(shape, "bool"),
    }


def verify(source: str, scheme: str, model: keras.Model, changed: bool) -> str:
    """Compares with the source's own model, where that is possible."""
    if changed:
        return f"{UNCOMPARED}: arguments were overridden"
    images = fixed_inputs(model)
    if isinstance(images, dict):
        return f"{UNCOMPARED}: this program compares images alone"
    expected = None
    if scheme.endswith("(KerasHub)"):
        expected = keras_hub_outputs(source, images)
    elif scheme.endswith("(timm)"):
        if not all(map(importlib.util.find_spec, ("timm", "torch"))):
            return f"{UNCOMPARED}: timm is not installed here"
        try:
            expected = timm_outputs(source, images)
        except Uncompared as error:
            return f"{UNCOMPARED}: {error}"
    if expected is None:
        return f"{UNCOMPARED}: this program has no way to run it"
    outputs = model.predict(images, verbose=0)
    if outputs.shape != expected.shape:
        return f"{UNCOMPARED}, which has another head"
    difference = np.abs(outputs - expected).max() / max(np.abs(expected).max(), 1e-6)
    half = "16" in model.compute_dtype
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    if not difference < tolerance:
        raise ValueError(
            f"Expected the source's outputs within {tolerance} of their size; "
            f"received: {difference:.2g}"
        )
    return f"outputs equal the source's own model within {difference:.1g} of their size"


def timm_outputs(source: str, images: np.ndarray) -> np.ndarray:
    """The outputs of timm's model, run in another process on files without pickles."""
    if not os.path.isdir(source) and not source.startswith("hf://"):
        raise Uncompared("a file without its folder does not tell timm's architecture")
    file, config = open_folder(source)
    with file:
        files = sorted({file[name].file for name in file})
    if "architecture" not in config:
        raise Uncompared("no config tells timm's architecture")
    cfg = config.get("pretrained_cfg", {})
    sizes = {k: cfg[k] for k in ("input_size", "fixed_input_size") if k in cfg}
    arguments = {k: config[k] for k in ("num_classes", "global_pool") if k in config}
    arguments.update(config.get("model_args", {}), pretrained_cfg_overlay=sizes)
    mean, std = image_normalization(config, images.shape[-1]) or (0.5, 0.5)
    pixels = ((images + 1) / 2 - np.array(mean)) / np.array(std)
    request = {
        "architecture": config["architecture"],
        "arguments": arguments,
        "files": [os.path.abspath(path) for path in files],
    }
    program = Path(__file__).with_name("timm_outputs.py")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        np.save(folder / "images.npy", pixels.transpose(0, 3, 1, 2).astype("float32"))
        command = [sys.executable, str(program), str(folder)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            status = f"status {result.returncode}"
            reason = [status, *result.stderr.strip().splitlines()][-1]
            raise Uncompared(f"timm failed with {reason}")
        return np.load(folder / "outputs.npy", allow_pickle=False)


def keras_hub_outputs(source: str, images: np.ndarray) -> np.ndarray | None:
    """The outputs of KerasHub's model: the classifier's, if the preset has one."""
    other = hub_model(source)
    if hasattr(other, "get_vision_embeddings"):
        outputs = other.get_vision_embeddings(images)
    elif isinstance(other.input, dict):
        outputs = other({"images": images})
    else:
        # Not `predict`: a task's preprocessor would change the images.
        outputs = other(images)
    return keras.ops.convert_to_numpy(outputs)


def compare_saved(preset: str, model: keras.Model) -> None:
    """Reads the preset again: it must be the model that was saved."""
    inputs = fixed_inputs(model)
    loaded = models.from_preset(str(preset))
    outputs = (
        keras.tree.flatten(x.predict(inputs, verbose=0)) for x in (loaded, model)
    )
    if not all(np.allclose(x, y, atol=1e-5) for x, y in zip(*outputs)):
        raise ValueError(f"Expected the saved model back from {preset}; it differs")
