"""Converts timm's ViTs and MLP-Mixers."""

import re
from pathlib import Path
from typing import Any

from keras_moe._checks import check_one_of, unfit
from keras_moe.models.conversion._rules import (
    BlockNames,
    Direct,
    Normalization,
    Positions,
    block_rules,
    linear,
    norm,
    patches,
    without_projection,
)
from keras_moe.models.conversion._spec import (
    ConversionSpec,
    Library,
    agree,
    interpolation,
    layer_scale_argument,
    mixer_arguments,
    normalization,
    numbered,
    patch_arguments,
    required,
    square_grid,
    usual_heads,
)

_TIMM = Library("timm", "as its model card says (mostly Apache-2.0)")
# Supported arguments.
_ARGUMENTS = (
    "act_layer", "class_token", "depth", "dynamic_img_size", "embed_dim", "fc_norm",
    "global_pool", "img_size", "in_chans", "init_values", "mlp_ratio", "no_embed_class",
    "num_blocks", "num_classes", "num_heads", "patch_size", "pre_norm", "qk_norm",
    "qkv_bias", "weight_init",
)  # fmt: skip
_BLOCK = BlockNames(
    norms=("norm1.", "norm2."),
    mlp=("mlp.fc1.", "mlp.fc2."),
    queries=("attn.qkv.",),
    output="attn.proj.",
    scales=("ls1.gamma", "ls2.gamma"),
    query_key_norms=("attn.q_norm.", "attn.k_norm."),
)
_VIT_PATCHES, _MIXER_PATCHES = "patch_embed.proj.", "stem.proj."
_FAMILIES = ("vit_", "deit_", "deit3_", "flexivit_", "mixer_", "test_vit")
# Models whose weights look like a ViT's but which post-normalise or use rotary
# positions.
_OTHERS = re.compile(r"_(rpn|rope|xp|18x2)_|vit_pe_|dinov3")
# Models with tanh-approximated GELU.
_TANH = re.compile(
    r"vit_((base_patch32|so400m_patch16|giantopt_patch16)_siglip_"
    r"|large_patch16_siglip_(gap_)?512)"
)
_DEPTHS = {
    "vit_tiny_": 12, "vit_small_": 12, "vit_base_": 12, "vit_large_": 24,
    "vit_huge_": 32, "deit_tiny_": 12, "deit_small_": 12, "deit_base_": 12,
    "deit3_small_": 12, "deit3_base_": 12, "deit3_large_": 24, "deit3_huge_": 32,
    "mixer_s16_": 8, "mixer_s32_": 8, "mixer_b16_": 12, "mixer_b32_": 12,
    "mixer_l16_": 24, "mixer_l32_": 24, "vit_small_patch16_36x1_": 36,
}  # fmt: skip
# Models with an unusual number of heads.
_HEADS = {"vit_base_patch16_gap_224": 16, "vit_giantopt_": 16, "test_vit": 2}
_ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu")
# timm's default `crop_pct`.
_CROP = 0.875
# transformers' placeholder names.
_NO_NAME = re.compile(r"LABEL_\d+")


def timm_spec(
    file, config: dict, overrides: dict, tower: str | None = None
) -> ConversionSpec | None:
    is_mixer = "blocks.0.mlp_tokens.fc1.weight" in file
    if f"{_MIXER_PATCHES if is_mixer else _VIT_PATCHES}weight" not in file:
        return None
    if not is_mixer and "blocks.0.norm1.weight" not in file:
        return None
    _check_architecture(file, config)
    unknown = sorted(set(config.get("model_args", {})) - set(_ARGUMENTS))
    if unknown:
        raise ValueError(
            f"Expected model_args of {_ARGUMENTS}; received: {unknown} in the config "
            f"of {file.path}"
        )
    spec = _mixer_spec(file, config) if is_mixer else _vit_spec(file, config, overrides)
    arguments, notes = _preprocessing(config)
    names = _class_names(config, (spec.task_arguments or {}).get("num_classes"))
    spec.preprocessing = {**arguments, "class_names": names}
    spec.notes += notes
    return spec


def image_normalization(config: dict, channels: int) -> Normalization | None:
    """Returns the image normalisation of a config; None for the default."""
    cfg = config.get("pretrained_cfg", {})
    images = {"image_mean": cfg.get("mean"), "image_std": cfg.get("std")}
    preprocessor = config.get("preprocessor", {})
    return normalization(channels, {**preprocessor, **images})


def _preprocessing(config):
    cfg = config.get("pretrained_cfg", {})
    arguments, notes = interpolation(cfg.get("interpolation") or "bicubic")
    squashes = cfg.get("crop_mode") == "squash"
    # Above 1 means padding: nothing is cropped.
    crop = min(float(cfg.get("crop_pct") or _CROP), 1.0)
    return {**arguments, "center_crop": None if squashes else crop}, notes


def _class_names(config: dict, num_classes: int | None) -> list[str] | None:
    """Returns timm's or transformers' class names, if complete."""
    names = config.get("label_names")
    names = names or config.get("pretrained_cfg", {}).get("label_names")
    by_number = config.get("id2label")
    if not names and by_number:
        names = [by_number.get(str(i)) for i in range(len(by_number))]
    if not names or len(names) != num_classes or None in names:
        return None
    return None if all(map(_NO_NAME.fullmatch, names)) else list(names)


def _check_architecture(file, config):
    # Without a config, use the architecture's name if file or folder has it.
    path = Path(file.path)
    default = f"{_FAMILIES[0]} {path.parent.name}/{path.name}"
    architecture = config.get("architecture", default)
    if not architecture.startswith(_FAMILIES) or _OTHERS.search(architecture):
        raise ValueError(
            "Expected an architecture of timm that is a plain ViT or MLP-Mixer; "
            f"received: architecture={architecture!r} in {file.path}"
        )


def _check_sizes(file, config, hidden_dim, num_layers, depth):
    """Raises ValueError if tensors and config disagree; `depth` is timm's name."""
    settings = {**config, **config.get("model_args", {})}
    architecture = config.get("architecture", "")
    by_name = [d for start, d in _DEPTHS.items() if architecture.startswith(start)]
    if by_name and depth not in settings:
        settings[depth] = by_name[-1]
    # timm's `num_features` is the embedding size.
    sizes = {"num_features": hidden_dim, "embed_dim": hidden_dim, depth: num_layers}
    if "embed_dim" in settings:
        del sizes["num_features"]
    num_classes = file["head.weight"].shape[0] if "head.weight" in file else 0
    agree(file, settings, "config.json", **sizes, num_classes=num_classes)


def _assumptions(config, arguments, heads_are_known=True):
    """Notes what neither weights nor config specify."""
    is_vit = "class_token" in arguments
    notes = []
    is_raw = not config.get("preprocessor", {}).get("do_normalize", True)
    if "mean" not in config.get("pretrained_cfg", {}) and not is_raw:
        notes.append("mean=0.5 and std=0.5 of the images")
    if "architecture" not in config:
        notes.append(f"layer_norm_epsilon={arguments['layer_norm_epsilon']}")
        if not heads_are_known:
            notes.append(f"num_heads={arguments['num_heads']}, usual for the size")
    if "global_pool" not in config and is_vit:
        pooling = "class token's" if arguments["class_token"] else "average"
        notes.append(f"pooling: the {pooling}")
    return tuple(f"assumed: {note} (no config says otherwise)" for note in notes)


def _torch_patches(file, name, images):
    bias = f"{name}bias"
    return patches(f"{name}weight", bias if bias in file else None, True, images)


def _mlp(path, name):
    return {
        **linear(f"{path}/hidden", f"{name}fc1."),
        **linear(f"{path}/output", f"{name}fc2."),
    }


def _head(file):
    if "head.weight" not in file:
        return {}, None
    num_classes, _ = required(file, "head.weight", 2)
    rules = linear("predictions", "head.", "head.bias" in file)
    return rules, {"num_classes": num_classes}


def _vit_spec(file, config, overrides):
    settings = {**config, **config.get("model_args", {})}
    arguments = _vit_arguments(file, config, settings, overrides)
    class_token = arguments["class_token"]
    images = image_normalization(config, arguments["image_shape"][2])
    rules = _torch_patches(file, _VIT_PATCHES, images)
    rules["position_embedding/embedding"] = Positions(
        "pos_embed", without_class_token=_lacks_class_row(file, arguments)
    )
    if class_token:
        rules["class_token/token"] = Direct("cls_token")
    if arguments["embedding_norm"]:
        rules.update(norm("embedding_norm", "norm_pre."))
    for i in range(arguments["num_layers"]):
        block = f"blocks.{i}."
        query_bias = f"{block}attn.qkv.bias" in file
        rules.update(block_rules(f"block_{i}", block, _BLOCK, arguments, query_bias))
    pooling = settings.get("global_pool", "token" if class_token else "avg")
    task, pooling_rules = _pooling(file, pooling, arguments)
    head, head_arguments = _head(file)
    if head_arguments is not None:
        task.update(head_arguments)
    elif pooling == "map":
        task["num_classes"] = arguments["hidden_dim"]
        head = without_projection()
    else:
        task = None
    heads = settings.get("num_heads") or overrides.get("num_heads")
    return ConversionSpec(
        _TIMM,
        "ViT",
        "ViTBackbone",
        arguments,
        {**rules, **pooling_rules, **head},
        task,
        notes=_assumptions(settings, arguments, bool(heads)),
    )


def _vit_arguments(file, config, settings, overrides):
    hidden_dim, channels, height, width = required(file, f"{_VIT_PATCHES}weight", 4)
    num_layers = numbered(file, "blocks.")
    _check_sizes(file, config, hidden_dim, num_layers, "depth")
    architecture = config.get("architecture", "")
    class_token = "cls_token" in file
    heads = settings.get("num_heads") or overrides.get("num_heads")
    by_name = (n for name, n in _HEADS.items() if architecture.startswith(name))
    heads = heads or next(by_name, 0) or usual_heads(hidden_dim, file.path)
    query_key_norm = "blocks.0.attn.q_norm.weight" in file
    arguments = {
        **patch_arguments((height, width, channels, hidden_dim)),
        "num_layers": num_layers,
        "num_heads": heads,
        "mlp_dim": required(file, "blocks.0.mlp.fc1.weight", 2)[0],
        "class_token": class_token,
        "activation": _activation(architecture, settings, overrides),
        # CLIP's towers keep PyTorch's default.
        "layer_norm_epsilon": 1e-5 if "_clip_" in architecture else 1e-6,
        "embedding_norm": "norm_pre.weight" in file,
        "query_key_norm": query_key_norm,
        "position_interpolation": "bicubic",
        **layer_scale_argument(file, _BLOCK, "blocks.0.", settings.get("init_values")),
    }
    if query_key_norm:
        arguments["query_key_norm_bias"] = True
    rows = required(file, "pos_embed", 3)[1]
    grid = _grid(settings, rows, class_token, (height, width))
    if grid is None:
        has_row = class_token and round((rows - 1) ** 0.5) ** 2 == rows - 1
        side = square_grid(rows, has_row, f"'pos_embed' in {file.path}")
        grid = side, side
    arguments["image_shape"] = (grid[0] * height, grid[1] * width, channels)
    return arguments


def _activation(architecture, settings, overrides):
    if "quickgelu" in architecture:
        return "quick_gelu"
    if _TANH.match(architecture):
        return "gelu_tanh"
    return overrides.get("activation") or check_one_of(
        "act_layer", settings.get("act_layer", "gelu"), _ACTIVATIONS
    )


def _grid(settings, rows, class_token, patch_size):
    """Returns the patch grid of the config's images; None if it does not fit."""
    cfg = settings.get("pretrained_cfg", {})
    size = settings.get("img_size") or cfg.get("input_size")
    if size is None:
        return None
    size = (size, size) if isinstance(size, int) else tuple(size[-2:])
    grid = size[0] // patch_size[0], size[1] // patch_size[1]
    return grid if rows - grid[0] * grid[1] in (0, class_token) else None


def _lacks_class_row(file, arguments):
    """Whether there is a class token but no position embedding for it."""
    _, _, height, width = file[f"{_VIT_PATCHES}weight"].shape
    image_height, image_width, _ = arguments["image_shape"]
    num_patches = (image_height // height) * (image_width // width)
    return arguments["class_token"] and file["pos_embed"].shape[1] == num_patches


def _pooling(file, pooling, arguments):
    if pooling == "map":
        task: dict[str, Any] = {"pooling": "map"}
        if arguments["query_key_norm"]:
            # timm's pooling does not normalise queries and keys.
            task["pooling_query_key_norm"] = False
        return task, {**norm("final_norm", "norm."), **_attention_pool()}
    names = {"token": "class_token", "avg": "average"}
    if arguments["class_token"]:
        names["avg"] = "patch_average"
    if pooling not in names:
        expected = f"global_pool of {[*names, 'map']} in the config of {file.path}"
        raise unfit(expected, global_pool=pooling)
    if "fc_norm.weight" not in file:
        return {"pooling": names[pooling]}, norm("final_norm", "norm.")
    # The pooled vector is normalised instead of the tokens.
    arguments["final_norm"] = False
    task = {"pooling": names[pooling], "pooled_norm": True}
    return task, norm("pooled_norm", "fc_norm.")


def _attention_pool():
    pool = "attn_pool."
    rules = {
        "pooler/probe": Direct(f"{pool}latent"),
        **linear("pooler/attention/query", f"{pool}q."),
        **linear("pooler/attention/attention_output", f"{pool}proj.", inputs=2),
        **norm("pooler/norm", f"{pool}norm."),
        **_mlp("pooler/mlp", f"{pool}mlp."),
    }
    for part, projection in enumerate(("key", "value")):
        path = f"pooler/attention/{projection}"
        rules.update(linear(path, f"{pool}kv.", part=part, parts=2))
    return rules


def _mixer_spec(file, config):
    hidden_dim, channels, height, width = required(file, f"{_MIXER_PATCHES}weight", 4)
    num_layers = numbered(file, "blocks.")
    _check_sizes(file, config, hidden_dim, num_layers, "num_blocks")
    token_mlp, tokens = required(file, "blocks.0.mlp_tokens.fc1.weight", 2)
    grid = square_grid(tokens, False, file.path)
    images = image_normalization(config, channels)
    rules = {
        **_torch_patches(file, _MIXER_PATCHES, images),
        **norm("final_norm", "norm."),
    }
    for i in range(num_layers):
        block, path = f"blocks.{i}.", f"block_{i}"
        rules.update(norm(f"{path}/mixer_norm", f"{block}norm1."))
        rules.update(norm(f"{path}/feed_forward_norm", f"{block}norm2."))
        rules.update(_mlp(f"{path}/token_mlp", f"{block}mlp_tokens."))
        rules.update(_mlp(f"{path}/mlp", f"{block}mlp_channels."))
    head, task = _head(file)
    mlp_dim, _ = required(file, "blocks.0.mlp_channels.fc1.weight", 2)
    kernel_shape, mlp_dims = (height, width, channels, hidden_dim), (token_mlp, mlp_dim)
    arguments = mixer_arguments(kernel_shape, grid, num_layers, mlp_dims, "gelu")
    return ConversionSpec(
        _TIMM,
        "MLP-Mixer",
        "MixerBackbone",
        arguments,
        {**rules, **head},
        task,
        notes=_assumptions(config, arguments),
    )
