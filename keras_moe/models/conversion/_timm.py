"""Converts timm's ViTs, MLP-Mixers and, in both directions, DINOv3s."""

import math
import re
from pathlib import Path
from typing import Any

from keras_moe._checks import check_one_of, unfit
from keras_moe.models.conversion import _rules, _spec

_TIMM = _spec.Library("timm", "as its model card says (mostly Apache-2.0)")
# Supported arguments.
_ARGUMENTS = (
    "act_layer", "class_token", "depth", "dynamic_img_size", "embed_dim", "fc_norm",
    "global_pool", "img_size", "in_chans", "init_values", "mlp_ratio", "no_embed_class",
    "num_blocks", "num_classes", "num_heads", "patch_size", "pre_norm", "qk_norm",
    "qkv_bias", "weight_init",
    # Of DINOv3.
    "num_reg_tokens", "rope_temperature", "swiglu_align_to", "swiglu_mlp",
    "use_fc_norm",
)  # fmt: skip
_VIT = _rules.TowerNames(
    blocks="blocks.",
    block=_rules.BlockNames(
        norms=("norm1.", "norm2."),
        mlp=("mlp.fc1.", "mlp.fc2."),
        queries=("attn.qkv.",),
        output="attn.proj.",
        scales=("ls1.gamma", "ls2.gamma"),
        query_key_norms=("attn.q_norm.", "attn.k_norm."),
    ),
    positions="pos_embed",
    final_norm="norm.",
    patches="patch_embed.proj.",
    class_token="cls_token",
    embedding_norm="norm_pre.",
)
_MIXER_PATCHES = "stem.proj."
_FAMILIES = ("vit_", "deit_", "deit3_", "flexivit_", "mixer_", "test_vit")
# Models whose weights look like a ViT's but which post-normalise or use rotary
# positions.
_OTHERS = re.compile(r"_(rpn|rope|xp|18x2)_|vit_pe_|dinov3|lingbot")
# DINOv3's layout, which LingBot has as well.
_DINOV3_NAMES = re.compile("dinov3|lingbot")
_DINOV3 = _VIT._replace(
    block=_VIT.block._replace(scales=("gamma_1", "gamma_2"), query_key_norms=("", "")),
    positions="",
    embedding_norm="",
    registers="reg_token",
)
_DINOV3_GATED = {"mlp": ("mlp.fc1_x.", "mlp.fc2."), "gate": "mlp.fc1_g."}
# Biases of queries and values; keys have none.
_DINOV3_BIASES = {"query": "attn.q_bias", "value": "attn.v_bias"}
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
) -> _spec.ConversionSpec | None:
    is_mixer = "blocks.0.mlp_tokens.fc1.weight" in file
    if f"{_MIXER_PATCHES if is_mixer else _VIT.patches}weight" not in file:
        return None
    if not is_mixer and "blocks.0.norm1.weight" not in file:
        return None
    is_dinov3 = _DINOV3.registers in file and "blocks.0.gamma_1" in file
    _check_architecture(file, config, is_dinov3)
    unknown = sorted(set(config.get("model_args", {})) - set(_ARGUMENTS))
    if unknown:
        expected = f"model_args of {_ARGUMENTS}"
        raise unfit(expected, f"{unknown} in the config of {file.path}")
    if is_mixer:
        spec = _mixer_spec(file, config)
    else:
        make = _dinov3_spec if is_dinov3 else _vit_spec
        spec = make(file, config, overrides)
    arguments, notes = _preprocessing(config)
    names = _class_names(config, (spec.task_arguments or {}).get("num_classes"))
    spec.preprocessing = {**arguments, "class_names": names}
    spec.notes += notes
    return spec


def image_normalization(config: dict, channels: int) -> _rules.Normalization | None:
    """Returns the image normalisation of a config; None for the default."""
    cfg = config.get("pretrained_cfg", {})
    images = {"image_mean": cfg.get("mean"), "image_std": cfg.get("std")}
    preprocessor = config.get("preprocessor", {})
    return _spec.normalization(channels, {**preprocessor, **images})


def _preprocessing(config):
    cfg = config.get("pretrained_cfg", {})
    arguments, notes = _spec.interpolation(cfg.get("interpolation") or "bicubic")
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


def _check_architecture(file, config, is_dinov3):
    # Without a config, use the architecture's name if file or folder has it.
    path = Path(file.path)
    default = f"{_FAMILIES[0]} {path.parent.name}/{path.name}"
    architecture = config.get("architecture", default)
    is_other = bool(_OTHERS.search(architecture))
    if is_dinov3:
        is_other = "architecture" in config and not _DINOV3_NAMES.search(architecture)
    if not architecture.startswith(_FAMILIES) or is_other:
        expected = "timm's name of a plain ViT, a DINOv3 or an MLP-Mixer"
        raise unfit(expected, f"architecture={architecture!r} in {file.path}")


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
    _spec.agree(file, settings, "config.json", **sizes, num_classes=num_classes)


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


def _mlp(path, name):
    return {
        **_rules.linear(f"{path}/hidden", f"{name}fc1."),
        **_rules.linear(f"{path}/output", f"{name}fc2."),
    }


def _head(file):
    if "head.weight" not in file:
        return {}, None
    num_classes, _ = _spec.required(file, "head.weight", 2)
    rules = _rules.linear("predictions", "head.", "head.bias" in file)
    return rules, {"num_classes": num_classes}


def _vit_spec(file, config, overrides):
    settings = {**config, **config.get("model_args", {})}
    arguments = _vit_arguments(file, config, settings, overrides)
    images = image_normalization(config, arguments["image_shape"][2])
    rules = _rules.image_tower_rules(_VIT, arguments, images, file, axes=0)
    rules["position_embedding/embedding"] = _rules.Positions(
        _VIT.positions, without_class_token=_lacks_class_row(file, arguments)
    )
    if "blocks.0.attn.qkv.bias" not in file:
        for i in range(arguments["num_layers"]):
            for projection in ("query", "key", "value"):
                rules[f"block_{i}/attention/{projection}/bias"] = _rules.Filled()
    default = "token" if arguments["class_token"] else "avg"
    pooling = settings.get("global_pool", default)
    heads = settings.get("num_heads") or overrides.get("num_heads")
    notes = _assumptions(settings, arguments, bool(heads))
    return _tower_spec(file, "ViT", arguments, rules, pooling, notes)


def _tower_spec(file, architecture, arguments, rules, pooling, notes):
    """The spec of a tower with its pooling and head."""
    task, pooling_rules = _pooling(file, pooling, arguments)
    head, head_arguments = _head(file)
    if head_arguments is not None:
        task.update(head_arguments)
    elif pooling == "map":
        task["num_classes"] = arguments["hidden_dim"]
        head = _rules.without_projection()
    else:
        task = None
    rules = {**rules, **pooling_rules, **head}
    spec = _spec.ConversionSpec(
        _TIMM, architecture, "ViTBackbone", arguments, rules, task
    )
    spec.notes = notes
    return spec


def _dinov3_spec(file, config, overrides):
    settings = {**config, **config.get("model_args", {})}
    names, is_gated = _DINOV3, "blocks.0.mlp.fc1_g.weight" in file
    if is_gated:
        names = names._replace(block=names.block._replace(**_DINOV3_GATED))
    dim = _spec.required(file, f"{_VIT.patches}weight", 4)[0]
    _check_sizes(file, config, dim, _spec.numbered(file, "blocks."), "depth")
    size = config.get("pretrained_cfg", {}).get("input_size", (3, 256, 256))
    size = settings.get("img_size") or size[-1]
    arguments = _spec.image_tower_arguments(
        file,
        names,
        overrides,
        image_size=size if isinstance(size, int) else size[-1],
        # Heads of 64, but for the largest model's.
        num_heads=settings.get("num_heads") or dim // (128 if dim > 2048 else 64),
        activation="silu" if is_gated else "gelu",
        epsilon=1e-5,
        layer_scale=settings.get("init_values"),
    )
    arguments.update(
        position_embedding="rotary_2d",
        rotary_base=float(settings.get("rope_temperature", 100.0)),
        key_bias=False,
    )
    images = image_normalization(config, arguments["image_shape"][2])
    has_biases = "blocks.0.attn.q_bias" in file
    rules = _dinov3_rules(names, arguments, has_biases, images)
    pooling = settings.get("global_pool", "token")
    notes = _assumptions(settings, arguments)
    return _tower_spec(file, "DINOv3", arguments, rules, pooling, notes)


def _dinov3_rules(names, arguments, has_biases, images=None):
    """Rules of a tower; without biases, those of queries and values are zeros."""
    rules = _rules.image_tower_rules(names, arguments, images, axes=0)
    for i in range(arguments["num_layers"]):
        for projection, name in _DINOV3_BIASES.items():
            rule = (
                _rules.Vector(f"{names.blocks}{i}.{name}")
                if has_biases
                else _rules.Filled()
            )
            rules[f"block_{i}/attention/{projection}/bias"] = rule
    return rules


def _vit_arguments(file, config, settings, overrides):
    hidden_dim, _, height, width = _spec.required(file, f"{_VIT.patches}weight", 4)
    _check_sizes(file, config, hidden_dim, _spec.numbered(file, _VIT.blocks), "depth")
    architecture = config.get("architecture", "")
    by_name = (n for name, n in _HEADS.items() if architecture.startswith(name))
    heads = settings.get("num_heads") or overrides.get("num_heads")
    rows, class_token = (
        _spec.required(file, _VIT.positions, 3)[1],
        _VIT.class_token in file,
    )
    grid = _grid(settings, rows, class_token, (height, width))
    if grid is None:
        has_row = class_token and round((rows - 1) ** 0.5) ** 2 == rows - 1
        side = _spec.square_grid(rows, has_row, f"{_VIT.positions!r} in {file.path}")
        grid = side, side
    arguments = _spec.image_tower_arguments(
        file,
        _VIT,
        overrides,
        image_size=(grid[0] * height, grid[1] * width),
        num_heads=heads or next(by_name, None),
        activation=_activation(architecture, settings, overrides),
        # CLIP's towers keep PyTorch's default.
        epsilon=1e-5 if "_clip_" in architecture else 1e-6,
        layer_scale=settings.get("init_values"),
    )
    if "blocks.0.attn.q_norm.weight" in file:
        arguments.update(query_key_norm=True, query_key_norm_bias=True)
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
    _, _, height, width = file[f"{_VIT.patches}weight"].shape
    image_height, image_width, _ = arguments["image_shape"]
    num_patches = (image_height // height) * (image_width // width)
    return arguments["class_token"] and file["pos_embed"].shape[1] == num_patches


def _pooling(file, pooling, arguments):
    if pooling == "map":
        task: dict[str, object] = {"pooling": "map"}
        if arguments.get("query_key_norm"):
            # timm's pooling does not normalise queries and keys.
            task["pooling_query_key_norm"] = False
        return task, {**_rules.norm("final_norm", "norm."), **_attention_pool()}
    names = {"token": "class_token", "avg": "average"}
    if arguments["class_token"]:
        names["avg"] = "patch_average"
    if pooling not in names:
        expected = f"global_pool of {[*names, 'map']} in the config of {file.path}"
        raise unfit(expected, global_pool=pooling)
    if "fc_norm.weight" not in file:
        return {"pooling": names[pooling]}, _rules.norm("final_norm", "norm.")
    # The pooled vector is normalised instead of the tokens.
    arguments["final_norm"] = False
    task = {"pooling": names[pooling], "pooled_norm": True}
    return task, _rules.norm("pooled_norm", "fc_norm.")


def _attention_pool():
    pool = "attn_pool."
    rules = {
        "pooler/probe": _rules.Direct(f"{pool}latent"),
        **_rules.linear("pooler/attention/query", f"{pool}q."),
        **_rules.linear("pooler/attention/attention_output", f"{pool}proj.", inputs=2),
        **_rules.norm("pooler/norm", f"{pool}norm."),
        **_mlp("pooler/mlp", f"{pool}mlp."),
    }
    for part, projection in enumerate(("key", "value")):
        path = f"pooler/attention/{projection}"
        rules.update(_rules.linear(path, f"{pool}kv.", part=part, parts=2))
    return rules


def _mixer_spec(file, config):
    hidden_dim, channels, height, width = _spec.required(
        file, f"{_MIXER_PATCHES}weight", 4
    )
    num_layers = _spec.numbered(file, "blocks.")
    _check_sizes(file, config, hidden_dim, num_layers, "num_blocks")
    token_mlp, tokens = _spec.required(file, "blocks.0.mlp_tokens.fc1.weight", 2)
    grid = _spec.square_grid(tokens, False, file.path)
    images, bias = image_normalization(config, channels), f"{_MIXER_PATCHES}bias"
    bias = bias if bias in file else None
    rules = {
        **_rules.patches(f"{_MIXER_PATCHES}weight", bias, torch=True, images=images),
        **_rules.norm("final_norm", "norm."),
    }
    for i in range(num_layers):
        block, path = f"blocks.{i}.", f"block_{i}"
        rules.update(_rules.norm(f"{path}/mixer_norm", f"{block}norm1."))
        rules.update(_rules.norm(f"{path}/feed_forward_norm", f"{block}norm2."))
        rules.update(_mlp(f"{path}/token_mlp", f"{block}mlp_tokens."))
        rules.update(_mlp(f"{path}/mlp", f"{block}mlp_channels."))
    head, task = _head(file)
    mlp_dim, _ = _spec.required(file, "blocks.0.mlp_channels.fc1.weight", 2)
    kernel_shape, mlp_dims = (height, width, channels, hidden_dim), (token_mlp, mlp_dim)
    arguments = _spec.mixer_arguments(kernel_shape, grid, num_layers, mlp_dims, "gelu")
    rules.update(head)
    spec = _spec.ConversionSpec(
        _TIMM, "MLP-Mixer", "MixerBackbone", arguments, rules, task
    )
    spec.notes = _assumptions(config, arguments)
    return spec


# Export


def timm_files(model: Any) -> tuple[dict, dict]:
    tower, kind = model.towers.get("image"), "timm's DINOv3"
    if tower is None or "text" in model.towers:
        raise unfit(f"a ViTBackbone for {kind}", towers=sorted(model.towers))
    config, names = tower.config, _DINOV3
    poolings = {None: "token", "class_token": "token", "patch_average": "avg"}
    tower.check(
        kind,
        position_embedding="rotary_2d",
        layer_norm_epsilon=1e-5,
        activation="silu" if config["gated_mlp"] else "gelu",
        register_tokens=config["register_tokens"] or 1,
        key_bias=False,
        use_bias=True,
        class_token=True,
    )
    if tower.pooling not in poolings:
        expected = f"a pooling of {sorted(filter(None, poolings))} for {kind}"
        raise unfit(expected, pooling=tower.pooling)
    if config["gated_mlp"]:
        names = names._replace(block=names.block._replace(**_DINOV3_GATED))
    ends = tuple(f"/attention/{name}/bias" for name in _DINOV3_BIASES)
    has_biases = any(x.any() for path, x in tower.values.items() if path.endswith(ends))
    rules = _dinov3_rules(names, config, has_biases)
    rules.update(_rules.norm("final_norm", names.final_norm))
    if tower.projection_dim is not None:
        rules.update(_rules.linear("predictions", "head."))
    dim, width = config["hidden_dim"], config["mlp_dim"]
    ratio = width / dim
    if int(dim * ratio) != width:
        ratio = math.nextafter(ratio, math.inf)
    side = tower.square("image_shape", kind)
    arguments = {
        "img_size": side,
        "patch_size": tower.square("patch_size", kind),
        "in_chans": config["image_shape"][2],
        "embed_dim": dim,
        "depth": config["num_layers"],
        "num_heads": config["num_heads"],
        "mlp_ratio": ratio,
        "swiglu_mlp": config["gated_mlp"],
        "swiglu_align_to": 1,
        "qkv_bias": has_biases,
        "init_values": config["layer_scale_initial_value"],
        "rope_temperature": config["rotary_base"],
        "num_reg_tokens": config["register_tokens"],
        "global_pool": poolings[tower.pooling],
    }
    preprocessor = model.preprocessor
    crop = getattr(preprocessor, "center_crop", 1.0)
    content = {
        "architecture": "vit_small_patch16_dinov3",
        "num_classes": tower.projection_dim or 0,
        "num_features": dim,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [config["image_shape"][2], side, side],
            "interpolation": getattr(preprocessor, "interpolation", "bicubic"),
            "crop_pct": crop or 1.0,
            "crop_mode": "center" if crop else "squash",
            "mean": list(tower.images.mean),
            "std": list(tower.images.std),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    return _rules.tensors_of(rules, tower.values, kind), {"config.json": content}
