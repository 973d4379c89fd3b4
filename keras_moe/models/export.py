"""Exports weights in other libraries' formats, atomically. Axes: D hidden."""

import os
from typing import Any, NamedTuple

import keras
import numpy as np
from safetensors.numpy import save

from keras_moe._checks import check_one_of, unfit
from keras_moe._files import staged_folder, write_bytes, write_json
from keras_moe._types import KerasModel
from keras_moe.models.backbones.clip import CLIPBackbone
from keras_moe.models.backbones.decoder import DecoderBackbone
from keras_moe.models.backbones.text import TextBackbone
from keras_moe.models.backbones.vit import ViTBackbone
from keras_moe.models.conversion import _gpt2, _moepp, _openclip, _timm, _transformers
from keras_moe.models.conversion._rules import Normalization
from keras_moe.models.conversion._spec import ACTIVATIONS, CLIP_IMAGES, CONFIG_NAME
from keras_moe.models.conversion.published_weights import KERNEL, POSITIONS

# What makes the tensors and files of image and text models, and of language models.
_TOWERS = {
    "open_clip": _openclip.openclip_files,
    "timm": _timm.timm_files,
    "transformers": _transformers.transformers_files,
}
_LANGUAGE = {"moe_plus_plus": _moepp.moepp_files, "transformers": _gpt2.gpt2_files}
# Bytes of a file; more are split over several, with an index.
_SHARD = 5 * 10**9
# From this library's activation names to transformers'.
_ACTIVATIONS = {own: name for name, own in reversed(ACTIVATIONS.items())}


def export_weights(model: KerasModel, library: str, folder: str | os.PathLike) -> None:
    """Writes a model so that transformers, OpenCLIP, timm or MoE++'s code can load it.

    `transformers` can load `CLIPModel`, `SiglipModel`, single towers of both, and a
    `ViTBackbone` with LayerScale as `Dinov2Model`, and a dense `DecoderBackbone` with
    GPT-2's parts as `GPT2LMHeadModel`; `open_clip` can load image-text models with its
    own image towers; `timm.create_model("local-dir:FOLDER")` a `ViTBackbone` with
    DINOv3's parts; `moe_plus_plus`, the released code of MoE++'s language models, a
    `DecoderBackbone` with its kind of experts. Weights are float32, in `.safetensors`
    files of up to 5 GB with a config. The tokenizers of GPT-2 and SigLIP 2 are
    exported, too.

    Converted weights round-trip bit for bit. The exception is CLIP's image
    normalisation, which is folded into the patch embedding: kernels that were half
    precision are restored exactly, others up to rounding. Other normalisations stay
    folded in. CLIP has no patch bias, so any other bias is added to the position
    embeddings.

    Args:
        model: `CLIPBackbone`, `ViTBackbone`, `TextBackbone`, `DecoderBackbone`, or a
            task with one.
        library: `"transformers"`, `"open_clip"`, `"timm"` or `"moe_plus_plus"`.
        folder: a new or empty folder, or an earlier export, whose weights and configs
            are replaced once the new files are complete.

    Raises:
        ValueError: if the library has no such model, for example one with experts, or
            the folder holds something else.
        FolderInUse: an OSError, if another process has been exporting to `folder` for
            ten minutes.
        OSError: if a file cannot be written. An earlier export is kept.

    Example:

    >>> import os, tempfile
    >>> from keras_moe import models
    >>> text = models.TextBackbone(
    ...     vocabulary_size=20, max_length=6, hidden_dim=8, num_layers=1, num_heads=2,
    ...     mlp_dim=16, projection_dim=4,
    ... )
    >>> folder = os.path.join(tempfile.mkdtemp(), "text")
    >>> models.export_weights(text, "transformers", folder)
    >>> sorted(os.listdir(folder))
    ['config.json', 'model.safetensors']
    >>> type(models.from_preset(folder)).__name__
    'TextBackbone'
    """
    check_one_of("library", library, tuple({**_TOWERS, **_LANGUAGE}))
    exported = ExportedModel.of(model)
    formats = _LANGUAGE if exported.is_decoder else _TOWERS
    if library not in formats:
        expected = f"library to be one of {tuple(formats)} for {type(model).__name__}"
        raise unfit(expected, library=library)
    tensors, files = formats[library](exported)
    weights_name, config_name = "model.safetensors", CONFIG_NAME
    if library == "open_clip":
        weights_name, config_name = f"open_clip_{weights_name}", _openclip.CONFIG_NAME
    shards = _shards(tensors, weights_name)
    if len(shards) > 1:
        files[f"{weights_name}.index.json"] = {
            "metadata": {"total_size": sum(x.nbytes for x in tensors.values())},
            "weight_map": {k: name for name, part in shards.items() for k in part},
        }
    own = {weights_name, f"{weights_name}.index.json", *files, *shards}
    with staged_folder(
        folder,
        "export",
        # Presets of this library also have this config.
        lambda path: (
            (path / config_name).exists() and not (path / "metadata.json").exists()
        ),
        lambda path: path.name in own,
    ) as staging:
        for name, part in shards.items():
            write_bytes(staging / name, save(part, {"format": "pt"}))
        for name, content in files.items():
            content = content.encode() if isinstance(content, str) else content
            write = write_bytes if isinstance(content, bytes) else write_json
            write(staging / name, content)


def _shards(tensors, weights_name):
    groups, size = [{}], 0
    for name, value in tensors.items():
        if groups[-1] and size + value.nbytes > _SHARD:
            groups.append({})
            size = 0
        groups[-1][name] = value
        size += value.nbytes
    if len(groups) == 1:
        return {weights_name: tensors}
    stem, count = weights_name.removesuffix(".safetensors"), len(groups)
    return {
        f"{stem}-{number:05d}-of-{count:05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


# What other libraries' towers have, unless a format says otherwise.
_PLAIN = {
    "norm": "layer",
    "final_norm": True,
    "embedding_norm": False,
    "position_embedding": "learned",
    "query_key_norm": False,
    "head_dim": None,
    "num_key_value_heads": None,
    "attention_sinks": False,
    "key_bias": True,
    "register_tokens": 0,
    "max_patches": None,
}


class ExportedTower(NamedTuple):
    """A tower to export: config, weight values by path, and image settings."""

    config: dict
    values: dict[str, np.ndarray]
    pooling: str | None = None
    projection_dim: int | None = None
    images: Normalization = Normalization((0.5,), (0.5,))

    def check(self, kind: str, **wanted: object) -> None:
        """Raises ValueError unless the arguments are those that a format needs."""
        if self.config["moe"] is not None:
            expected = f"a dense tower for {kind}, which has no experts"
            raise unfit(expected, moe=self.config["moe"])
        if self.config["activation"] not in _ACTIVATIONS:
            expected = f"an activation of {sorted(_ACTIVATIONS)} for {kind}"
            raise unfit(expected, activation=self.config["activation"])
        values = {**self.config, "image_pooling": self.pooling}
        # Those of the format come first.
        for name, value in {**wanted, **_PLAIN, **wanted}.items():
            if name not in values:
                continue
            if values[name] != value:
                raise unfit(f"{name}={value!r} for {kind}", f"{name}={values[name]!r}")

    def square(self, name: str, kind: str) -> int:
        value = self.config[name]
        height, width = (value, value) if isinstance(value, int) else value[:2]
        if height != width:
            raise ValueError(f"Expected squares for {kind}; received: {name}={value}")
        return height

    @property
    def activation(self) -> str:
        return _ACTIVATIONS[self.config["activation"]]

    def without_patch_bias(self) -> tuple[dict[str, np.ndarray], Normalization]:
        """Returns the weights without a patch bias, which CLIP does not have."""
        values = dict(self.values)
        bias, kernel = values.pop("patch_embedding/bias"), values[KERNEL]
        if not bias.any():
            return values, self.images
        if self.images.is_default and kernel.shape[2] == len(CLIP_IMAGES.mean):
            divisor = 2.0 * np.array(CLIP_IMAGES.std, "float32")[:, None]
            original = _dividend(kernel, divisor)
            mean, std = (np.array(x, "float64") for x in CLIP_IMAGES)
            sums = original.sum(axis=(0, 1), dtype="float64")
            if np.allclose(((0.5 - mean) / std) @ sums, bias, rtol=1e-4, atol=1e-6):
                values[KERNEL] = original
                return values, CLIP_IMAGES
        positions = values[POSITIONS].copy()
        positions[:, int(self.config["class_token"]) :] += bias
        values[POSITIONS] = positions
        return values, self.images


def _dividend(quotient, divisor):
    """Returns the float32 with the fewest digits that gives this quotient."""
    nearest = quotient * divisor
    best, score = nearest, np.full(nearest.shape, -1, "int64")
    for steps in (0, 1, -1):
        candidate = nearest.view("int32") + np.int32(steps)
        value = candidate.view("float32")
        # The lowest set bit.
        digits = (candidate & -candidate).astype("int64")
        is_better = (value / divisor == quotient) & (digits > score)
        best = np.where(is_better, value, best)
        score = np.where(is_better, digits, score)
    return np.where(quotient == 0, quotient, best)


class ExportedModel(NamedTuple):
    """The towers to export, and an image-text model's logit scale and bias."""

    towers: dict[str, ExportedTower]
    logits: dict[str, np.ndarray]
    preprocessor: Any = None
    tokenizer: Any = None
    is_decoder: bool = False

    @classmethod
    def of(cls, model: KerasModel) -> "ExportedModel":
        """Splits a model into its towers."""
        backbone: Any = getattr(model, "backbone", model)
        texts = (TextBackbone, DecoderBackbone)
        if not isinstance(backbone, (CLIPBackbone, ViTBackbone, *texts)):
            raise ValueError(
                "Expected a CLIPBackbone, ViTBackbone, TextBackbone, DecoderBackbone, "
                f"or a task around one; received: {type(backbone).__name__}"
            )
        values, config = _values(model), backbone.get_config()
        preprocessor = getattr(model, "image_preprocessor", None)
        tokenizer = getattr(model, "preprocessor", None)
        if isinstance(backbone, CLIPBackbone):
            towers = _pair_towers(config, values, preprocessor)
            return cls(towers, _below(values, "logit_scale/"), preprocessor, tokenizer)
        if isinstance(backbone, texts):
            is_decoder = isinstance(backbone, DecoderBackbone)
            text = ExportedTower(config, values)
            return cls({"text": text}, {}, None, tokenizer, is_decoder)
        pooling = size = None
        if model is not backbone:
            head = model.get_config()
            pooling, size = head["pooling"], head["num_classes"]
            preprocessor = getattr(model, "preprocessor", None)
        images = _images(config, preprocessor)
        tower = ExportedTower(config, values, pooling, size, images)
        return cls({"image": tower}, {}, preprocessor)


def _values(model):
    return {
        weight.path: np.array(
            keras.ops.convert_to_numpy(keras.ops.cast(weight.value, "float32"))
        )
        for weight in model.weights
        if "seed_generator" not in weight.path
    }


def _below(values, prefix):
    return {
        path.removeprefix(prefix): value
        for path, value in values.items()
        if path.startswith(prefix)
    }


def _pair_towers(config, values, preprocessor):
    pooling = config["image_pooling"]
    if pooling is None:
        pooling = "class_token" if config["image"]["class_token"] else "average"
    image = {
        path.replace("projection/", "predictions/"): value
        for path, value in _below(values, "image/").items()
    }
    text = dict(config["text"])
    if config["projection_dim"] is not None:
        text.update({k: config[k] for k in ("projection_dim", "projection_bias")})
    return {
        "image": ExportedTower(
            config["image"],
            image,
            pooling,
            config["projection_dim"],
            _images(config["image"], preprocessor),
        ),
        "text": ExportedTower(text, _below(values, "text/")),
    }


def _images(config, preprocessor):
    parts = ((0.5,), (0.5,))
    if preprocessor is not None:
        parts = preprocessor.mean, preprocessor.std
    channels = config["image_shape"][2]
    # A single number applies to all channels.
    return Normalization(*(tuple(x) * (channels // len(x)) for x in parts))
