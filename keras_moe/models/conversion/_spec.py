"""`ConversionSpec`: which model a checkpoint holds, and the rules for its weights."""

import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keras_moe._checks import unfit
from keras_moe.losses.contrastive import TEMPERATURES
from keras_moe.models.conversion._rules import (
    Filled,
    Normalization,
    Reshaped,
    TowerNames,
)
from keras_moe.models.preprocessing.images import ImagePreprocessor
from keras_moe.models.preprocessing.tokenizer import TextTokenizer

CONFIG_NAME, PREPROCESSOR_NAME = "config.json", "preprocessor_config.json"
# Prefixes of classifier weights: those replaced by a new head, and those that a
# backbone does not have.
HEAD = ("predictions/", "pre_logits/", "teacher_")
POOLING = ("pooler/", "pooled_norm/")


class Library(NamedTuple):
    """A publisher of weights, or the library that reads them."""

    name: str
    licence: str


TRANSFORMERS = Library("transformers", "as its model card says (OpenAI's: MIT)")


@dataclass
class ConversionSpec:
    """The model in a checkpoint and the rules for its weights, by path."""

    library: Library
    # Such as "ViT"; and the backbone's class name.
    architecture: str
    backbone: str
    arguments: dict
    rules: dict
    # None for a backbone; and the class's name, if not the backbone's first task.
    task_arguments: dict | None = None
    task: str | None = field(default=None, kw_only=True)
    # Unused tensors, and why.
    ignored: dict = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    # Arguments of `ImagePreprocessor` without the image shape.
    preprocessing: dict | None = None
    tokenizer: TextTokenizer | None = None
    # Published for images of this size, unless it is that of the weights.
    image_size: int | None = None

    def model_arguments(self) -> dict:
        """Returns the arguments of the model that is published with the weights."""
        if self.image_size is None:
            return self.arguments
        shape = (self.image_size, self.image_size, self.arguments["image_shape"][2])
        return {**self.arguments, "image_shape": shape}

    def preprocessors(self) -> dict:
        """Returns a task's arguments with the source's preprocessing, if known."""
        images = None
        if self.preprocessing is not None:
            own = self.model_arguments()
            shape = own.get("image", own)["image_shape"]
            images = ImagePreprocessor(shape, **self.preprocessing)
        if "image" in self.arguments:
            return {"preprocessor": self.tokenizer, "image_preprocessor": images}
        return {"preprocessor": images or self.tokenizer}


# Images

CLIP_IMAGES = Normalization(
    (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
)
# Names and Pillow's codes of interpolations.
_INTERPOLATIONS = {
    "bilinear": "bilinear", 2: "bilinear", "bicubic": "bicubic", 3: "bicubic",
}  # fmt: skip


def normalization(
    channels: int, preprocessor: dict, default: Normalization | None = None
) -> Normalization | None:
    """Returns the normalisation in a preprocessor's config; None for [-1, 1]."""
    applied = default or Normalization((0.5,) * channels, (0.5,) * channels)
    mean, std = preprocessor.get("image_mean"), preprocessor.get("image_std")
    if mean is not None and std is not None:
        applied = Normalization(tuple(mean), tuple(std))
    if not preprocessor.get("do_normalize", True):
        applied = Normalization((0.0,) * channels, (1.0,) * channels)
    if len(applied.mean) != channels or len(applied.std) != channels:
        expected = f"mean and std of {channels} channels"
        raise unfit(expected, mean=list(applied.mean), std=list(applied.std))
    # A white pixel before normalisation.
    white = 255 * preprocessor.get("rescale_factor", 1 / 255)
    if not preprocessor.get("do_rescale", True):
        white = 255
    if not math.isclose(white, 1, rel_tol=1e-6):
        applied = Normalization(*(tuple(x / white for x in part) for part in applied))
    return None if applied.is_default else applied


def interpolation(value: Any) -> tuple[dict, tuple[str, ...]]:
    """Returns arguments of `ImagePreprocessor`, antialiased as in Pillow, and notes."""
    known = _INTERPOLATIONS.get(value, "bicubic")
    notes = ()
    if value not in _INTERPOLATIONS:
        notes = (f"preprocessor: bicubic instead of interpolation={value!r}",)
    return {"interpolation": known, "antialias": True}, notes


# Sizes that follow from names and shapes

# Number of heads of published encoders, by hidden dim.
_HEADS = {
    192: 3, 256: 4, 384: 6, 512: 8, 640: 10, 768: 12, 896: 14, 1024: 16, 1152: 16,
    1280: 16, 1408: 16, 1664: 16,
}  # fmt: skip
# Usual initial value of LayerScale.
_LAYER_SCALE = 1e-5


def usual_heads(hidden_dim: int, where: str) -> int:
    if hidden_dim not in _HEADS:
        expected = f"num_heads=..., which the weights in {where} do not tell"
        raise unfit(expected, f"an encoder of hidden_dim={hidden_dim} without it")
    return _HEADS[hidden_dim]


def required(file, name: str, axes: int) -> tuple:
    """Returns the shape of a required tensor with so many axes."""
    shape = file[name].shape if name in file else None
    if shape is None or len(shape) != axes:
        raise unfit(f"a tensor {name!r} of {axes} axes in {file.path}", shape=shape)
    return shape


def agree(file, config: dict, name: str, **sizes) -> None:
    """Raises ValueError if the weights' sizes differ from the config's."""
    for argument, size in sizes.items():
        if config.get(argument, size) != size:
            raise ValueError(
                f"Expected tensors with {argument}={config[argument]!r} in "
                f"{file.path}, as {name} says; received: {size}"
            )


def numbered(file, prefix: str) -> int:
    """Counts the blocks, named by a prefix and a number from 0."""
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)[./]")
    return len({m[1] for name in file if (m := pattern.match(name))})


def square_grid(num_positions: int, class_token: bool, where: str) -> int:
    """Returns the side of the patch grid of a position table."""
    num_patches = num_positions - class_token
    grid = round(num_patches**0.5)
    if grid * grid != num_patches:
        expected = f"position embeddings of a square of patches in {where}"
        raise unfit(expected, f"{num_patches} patches")
    return grid


def check_patch_size(overrides: dict, size: int) -> None:
    """Raises ValueError for another size of patches, which a matrix cannot have."""
    if (other := overrides.get("patch_size", size)) != size:
        raise unfit(f"patch_size={size}, that of the weights", patch_size=other)


def patch_arguments(kernel_shape: tuple) -> dict:
    """Returns patch size and hidden dim of a kernel (height, width, channels, D)."""
    height, width, _, dim = kernel_shape
    size = height if height == width else (height, width)
    return {"patch_size": size, "hidden_dim": dim}


def mixer_arguments(
    kernel_shape: tuple, grid: int, num_layers: int, mlp_dims: tuple, activation: str
) -> dict:
    """Returns a `MixerBackbone`'s arguments; `mlp_dims` are of tokens and channels."""
    height, width, channels, _ = kernel_shape
    return {
        "image_shape": (grid * height, grid * width, channels),
        **patch_arguments(kernel_shape),
        "num_layers": num_layers,
        "token_mlp_dim": mlp_dims[0],
        "mlp_dim": mlp_dims[1],
        "activation": activation,
        "layer_norm_epsilon": 1e-6,
    }


# Image-text models

# From activation names in transformers' and OpenCLIP's configs to this library's.
ACTIVATIONS = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    # In transformers, timm and GPT-2.
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
}
# What GPT-2 has among the arguments of a `DecoderBackbone`.
GPT2 = {"positions": "learned", "norm": "layer", "use_bias": True, "gated_mlp": False}
LOGIT_NAMES = ("logit_scale", "logit_bias")
_REASONS = {
    "image": "of the image tower",
    "text": "of the text tower",
    "logits": "of the logits of pairs",
}
POSITION_IDS = "the numbers 0, 1, 2, ..."


def activation_of(name: str | None, file: Any, overrides: dict) -> Any:
    if "activation" in overrides:
        return overrides["activation"]
    if name not in ACTIVATIONS:
        raise ValueError(
            "Expected activation='quick_gelu' (OpenAI's weights) or 'gelu' (most of "
            f"OpenCLIP's), which {file.path} does not tell; received: {name!r}"
        )
    return ACTIVATIONS[name]


def ignored(file: Any, **prefixes: tuple[str, ...]) -> dict[str, str]:
    """Returns the tensors of the `image` tower, the `text` tower or the `logits`."""
    return {
        name: _REASONS[part]
        for part, starts in prefixes.items()
        for name in file
        if name.startswith(starts)
    }


def image_tower_arguments(
    file: Any,
    names: TowerNames,
    overrides: dict,
    axes: int = 2,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | None = None,
    **settings: Any,
) -> dict:
    """Infers arguments from tensors; `axes` is the rank of the position embeddings."""
    if patch_size is None:
        kernel = required(file, f"{names.patches}weight", 4)
        hidden_dim, channels, height, width = kernel
    else:
        hidden_dim, pixels = required(file, f"{names.patches}weight", 2)
        height = width = patch_size
        channels, rest = divmod(pixels, patch_size**2)
        if rest:
            expected = f"a patch_size whose square divides {pixels} pixels"
            raise unfit(expected, patch_size=patch_size)
    class_token, own = names.class_token in file, {}
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if size is None:
        rows = required(file, names.positions, axes)[-2]
        grid = square_grid(rows, class_token, f"{names.positions!r} in {file.path}")
        size = (grid * height, grid * width)
    if names.registers and names.registers in file:
        own["register_tokens"] = required(file, names.registers, 3)[1]
    return {
        "image_shape": (*size, channels),
        **own,
        **patch_arguments((height, width, channels, hidden_dim)),
        **_block_arguments(file, names, hidden_dim, overrides, **settings),
        "class_token": class_token,
        "embedding_norm": f"{names.embedding_norm}weight" in file,
        "position_interpolation": "bicubic",
    }


def text_tower_arguments(
    file: Any, names: TowerNames, overrides: dict, **settings: Any
) -> dict:
    vocabulary_size, hidden_dim = required(file, names.tokens, 2)
    return {
        "vocabulary_size": vocabulary_size,
        "max_length": required(file, names.positions, 2)[0],
        "hidden_dim": hidden_dim,
        **_block_arguments(file, names, hidden_dim, overrides, **settings),
    }


def _block_arguments(
    file: Any,
    names: TowerNames,
    hidden_dim: int,
    overrides: dict,
    *,
    num_heads: int | None,
    activation: str | None,
    epsilon: float,
    layer_scale: float | None = None,
) -> dict:
    block, own = f"{names.blocks}0.", {}
    mlp_dim = required(file, f"{block}{names.block.mlp[0]}weight", 2)[0]
    if names.block.gate and f"{block}{names.block.gate}weight" in file:
        own["gated_mlp"] = True
        # One matrix may hold the gate and the hidden layer.
        mlp_dim //= 1 + (names.block.gate == names.block.mlp[0])
    keys = names.block.queries[1:2]
    if keys and f"{block}{keys[0]}bias" not in file:
        own["key_bias"] = False
    if names.block.scales[0] and f"{block}{names.block.scales[0]}" in file:
        own["layer_scale_initial_value"] = float(layer_scale or _LAYER_SCALE)
    num_heads = num_heads or overrides.get("num_heads")
    return {
        "num_layers": numbered(file, names.blocks),
        "mlp_dim": mlp_dim,
        **own,
        "num_heads": num_heads or usual_heads(hidden_dim, file.path),
        "activation": activation_of(activation, file, overrides),
        "layer_norm_epsilon": epsilon,
    }


def towers_spec(
    file: Any, config: dict, overrides: dict, tower: str | None, makers: dict
) -> ConversionSpec | None:
    """Returns the spec of a CLIP or SigLIP, or of one tower; None without towers."""
    if not makers:
        return None
    if tower is not None and tower not in makers:
        expected = f"weights with the {tower} tower of a CLIP or SigLIP"
        raise unfit(expected, f"only the {' and '.join(makers)} tower in {file.path}")
    if tower is not None and len(makers) > 1:
        return makers[tower](file, config, overrides)
    if len(makers) == 1:
        ((tower, make_spec),) = makers.items()
        spec = make_spec(file, config, overrides)
        other, parts = "image", {"vision_config", "vision_cfg"}
        if tower == "image":
            other, parts = "text", {"text_config", "text_cfg"}
        if parts & config.get("model_cfg", config).keys():
            spec.notes += (
                f"the {other} tower is missing: the model is the {tower} tower only",
            )
        return spec
    specs = {
        name: make_spec(file, config, {**overrides, **(overrides.get(name) or {})})
        for name, make_spec in makers.items()
    }
    return pair_spec(file, **specs)


def pair_spec(
    file: Any,
    image: ConversionSpec,
    text: ConversionSpec,
    log_scale: str | None = LOGIT_NAMES[0],
    bias: str | None = LOGIT_NAMES[1],
) -> ConversionSpec:
    task = dict(image.task_arguments or {})
    pooling = task.pop("pooling", None)
    size = task.pop("num_classes", image.arguments["hidden_dim"])
    if task:
        raise ValueError(
            f"Expected an image tower of {file.path} whose pooled vector is projected "
            f"directly; received: {task}"
        )
    rules = {}
    for path, rule in image.rules.items():
        rules["image/" + path.replace("predictions/", "projection/")] = rule
    rules.update({f"text/{path}": rule for path, rule in text.rules.items()})
    image_arguments, text_arguments = dict(image.arguments), dict(text.arguments)
    shared = {"projection_dim": None}
    identity = Filled("identity")
    if rules.get("image/projection/kernel", identity) == identity:
        for name in ("kernel", "bias"):
            rules.pop(f"image/projection/{name}", None)
    else:
        shared = _projections(rules, text_arguments, size)
    for path, name in (("log_scale", log_scale), ("bias", bias)):
        if name is not None and name in file:
            rules[f"logit_scale/{path}"] = Reshaped(name, shape=file[name].shape)
    text_arguments.pop("dtype", None)
    if "dtype" in image_arguments:
        shared["dtype"] = image_arguments.pop("dtype")
    used = {name for rule in rules.values() for name in rule.names}
    left = {**image.ignored, **text.ignored}
    return ConversionSpec(
        image.library,
        image.architecture,
        "CLIPBackbone",
        {
            "image": image_arguments,
            "text": text_arguments,
            "image_pooling": pooling if pooling == "map" else None,
            "temperature": TEMPERATURES["siglip" if bias in file else "clip"]._asdict(),
            **shared,
        },
        rules,
        task_arguments={},
        ignored={name: reason for name, reason in left.items() if name not in used},
        notes=tuple(dict.fromkeys((*image.notes, *text.notes))),
        preprocessing=image.preprocessing,
    )


def _projections(rules, text_arguments, size):
    """Returns the projection arguments of the pair, replacing the towers'."""
    text_arguments.pop("projection_dim", None)
    text_arguments.pop("projection_bias", None)
    biases = [f"{tower}/projection/bias" for tower in ("image", "text")]
    has_bias = any(not isinstance(rules.get(x, Filled()), Filled) for x in biases)
    for path in biases:
        # If only one tower has a bias, the other gets 0.
        rule = rules.pop(path, Filled())
        if has_bias:
            rules[path] = rule
    return {"projection_dim": size, "projection_bias": has_bias}


# Configs of transformers, read and written


def check_sizes(file: Any, config: dict, arguments: dict) -> None:
    """Raises ValueError if the config is that of another model."""
    sizes = {
        "hidden_size": arguments["hidden_dim"],
        "num_hidden_layers": arguments["num_layers"],
    }
    agree(file, config, CONFIG_NAME, **sizes)


def preprocessor_settings(
    preprocessor: dict, crops: bool
) -> tuple[dict, tuple[str, ...]]:
    """Returns arguments of `ImagePreprocessor`, and notes; `crops` is a default."""
    arguments, notes = interpolation(preprocessor.get("resample", 3))
    size = preprocessor.get("size")
    squashes = not crops
    if size:
        squashes = isinstance(size, dict) and "height" in size
    size, crop = edge(size), edge(preprocessor.get("crop_size"))
    share = None if squashes else 1.0
    if share and size and crop and preprocessor.get("do_center_crop", crops):
        share = min(crop / size, 1.0)
    return {**arguments, "center_crop": share}, notes


def edge(size: Any) -> int | None:
    """Returns the shorter edge from any of transformers' size formats."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height")
    return size if isinstance(size, int) else None


def tower_config(tower: Any) -> dict:
    config = tower.config
    return {
        "hidden_size": config["hidden_dim"],
        "num_hidden_layers": config["num_layers"],
        "num_attention_heads": config["num_heads"],
        "hidden_act": tower.activation,
        "layer_norm_eps": config["layer_norm_epsilon"],
    }


def image_config(tower: Any, kind: str) -> dict:
    """Returns the entries of an image tower's config that CLIP and DINOv2 share."""
    return {
        **tower_config(tower),
        "image_size": tower.square("image_shape", kind),
        "patch_size": tower.square("patch_size", kind),
        "num_channels": tower.config["image_shape"][2],
    }


def preprocessor_config(
    preprocessor: Any,
    side: int | None,
    image_range: Normalization,
    name: str,
    crop: float | None,
) -> dict:
    """Returns a `preprocessor_config.json`; `crop` is a default."""
    crop = getattr(preprocessor, "center_crop", crop)
    kind = getattr(preprocessor, "interpolation", "bicubic")
    content = {
        "image_processor_type": f"{name}ImageProcessor",
        "do_resize": True,
        "resample": {"bilinear": 2, "bicubic": 3}[kind],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(image_range.mean),
        "image_std": list(image_range.std),
    }
    if side is None:
        return content
    if crop is None:
        size = {"height": side, "width": side}
        return {**content, "do_center_crop": False, "size": size}
    return {
        **content,
        "size": {"shortest_edge": round(side / crop)},
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
    }
