"""timm's names of ViTs and MLP-Mixers."""

import re
from pathlib import Path

from keras_moe.models.conversion.image_range import Normalization, normalization
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.preprocessing import (
    class_names,
    timm_preprocessing,
)
from keras_moe.models.conversion.sizes import (
    agree,
    numbered,
    required,
    square_grid,
    usual_heads,
)
from keras_moe.models.conversion.torch_blocks import BlockNames, block_rules
from keras_moe.models.conversion.weight_rules import (
    Direct,
    Filled,
    PatchBias,
    PatchKernel,
    Positions,
    linear,
    norm,
)

_BLOCK = BlockNames(
    norms=("norm1.", "norm2."),
    mlp=("mlp.fc1.", "mlp.fc2."),
    queries=("attn.qkv.",),
    output="attn.proj.",
    scales=("ls1.gamma", "ls2.gamma"),
    query_key_norms=("attn.q_norm.", "attn.k_norm."),
)
_KERNELS = "stem.proj.weight", "patch_embed.proj.weight"
# Architectures that only their names tell from ViTs: blocks that normalise last, and
# rotary positions.
_OTHERS = re.compile(r"_(rpn|rope|xp|18x2)_|vit_pe_|dinov3")
_FAMILIES = ("vit_", "deit_", "deit3_", "flexivit_", "mixer_", "test_vit")
# Those with GELU in its tanh form, the blocks of the sizes, and those with another
# number of heads than usual.
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
_HEADS = {"vit_base_patch16_gap_224": 16, "vit_giantopt_": 16, "test_vit": 2}
# Arguments of a model whose meaning is known here.
_ARGUMENTS = (
    "act_layer", "class_token", "depth", "dynamic_img_size", "embed_dim", "fc_norm",
    "global_pool", "img_size", "in_chans", "init_values", "mlp_ratio", "no_embed_class",
    "num_blocks", "num_classes", "num_heads", "patch_size", "pre_norm", "qk_norm",
    "qkv_bias", "weight_init",
)  # fmt: skip
# timm's names of activations -> this library's.
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}


def timm_plan(file, config: dict, overrides: dict) -> ConversionPlan | None:
    """The plan for a model of timm, or None if the names are others."""
    is_mixer = "stem.proj.weight" in file and "blocks.0.mlp_tokens.fc1.weight" in file
    is_vit = "patch_embed.proj.weight" in file and "blocks.0.norm1.weight" in file
    if not is_mixer and not is_vit:
        return None
    architecture = config.get("architecture", _FAMILIES[0])
    if not architecture.startswith(_FAMILIES) or _OTHERS.search(architecture):
        raise ValueError(
            "Expected an architecture of timm that is a plain ViT or MLP-Mixer; "
            f"received: architecture={architecture!r} in {file.path}"
        )
    # Without a config, only the names of file and folder may identify the model.
    path = Path(file.path)
    named = _OTHERS.search(f"{path.parent.name}/{path.name}")
    if "architecture" not in config and named:
        raise ValueError(
            "Expected an architecture of timm that is a plain ViT or MLP-Mixer; "
            f"received: {named[0]!r} in the name of {file.path}"
        )
    unknown = sorted(set(config.get("model_args", {})) - set(_ARGUMENTS))
    if unknown:
        raise ValueError(
            f"Expected model_args of {_ARGUMENTS}; received: {unknown} in the config "
            f"of {file.path}"
        )
    return _mixer(file, config) if is_mixer else _vit(file, config, overrides)


def _check_sizes(file, config, hidden_dim, num_blocks, depth):
    """Refuses tensors that are not those of the config: `depth` is timm's name."""
    settings = {**config, **config.get("model_args", {})}
    architecture = config.get("architecture", "")
    by_name = [d for start, d in _DEPTHS.items() if architecture.startswith(start)]
    if by_name and depth not in settings:
        settings[depth] = by_name[-1]
    # timm's number of features is that of its embeddings.
    sizes = {"num_features": hidden_dim, "embed_dim": hidden_dim, depth: num_blocks}
    if "embed_dim" in settings:
        del sizes["num_features"]
    num_classes = 0
    if "head.weight" in file:
        num_classes = required(file, "head.weight", 2)[0]
    agree(file, settings, "config.json", **sizes, num_classes=num_classes)


def _assumed(settings, is_mixer, class_token, arguments, told_heads):
    """Notes about assumptions, where neither weights nor config are clear."""
    notes = []
    is_raw = not settings.get("preprocessor", {}).get("do_normalize", True)
    if "mean" not in settings.get("pretrained_cfg", {}) and not is_raw:
        notes.append("mean=0.5 and std=0.5 of the images (no config says them)")
    if "architecture" not in settings:
        epsilon = arguments["layer_norm_epsilon"]
        notes.append(f"layer_norm_epsilon={epsilon} (no config says it)")
        if not told_heads and not is_mixer:
            notes.append(
                f"num_heads={arguments['num_heads']} (no config says it: the usual "
                "one of the size)"
            )
    if "global_pool" not in settings and not is_mixer:
        pooling = "class token's" if class_token else "average"
        notes.append(f"pooling: the {pooling} (no config says it)")
    return tuple(f"assumed: {note}" for note in notes)


def _with_preprocessing(plan, config):
    """The plan with the config's preparation of images."""
    arguments, notes = timm_preprocessing(config)
    names = class_names(config, (plan.task_arguments or {}).get("num_classes"))
    plan.preprocessing = {**arguments, "class_names": names}
    plan.notes += notes
    return plan


def image_normalization(config: dict, channels: int) -> Normalization | None:
    """The images' normalisation in the configs, if it differs from this library's."""
    cfg, preprocessor = config.get("pretrained_cfg", {}), config.get("preprocessor", {})
    return normalization(channels, cfg.get("mean"), cfg.get("std"), preprocessor)


def patches(
    name: str, has_bias: bool, torch: bool, images: Normalization | None
) -> dict:
    """Rules of the patch embedding `<name>weight` and `<name>bias`."""
    kernel = f"{name}weight" if torch else f"{name}kernel"
    return {
        "patch_embedding/kernel": PatchKernel(kernel, torch, images),
        "patch_embedding/bias": PatchBias(
            kernel, torch, images, bias=f"{name}bias" if has_bias else None
        ),
    }


def _head(file):
    if "head.weight" not in file:
        return {}, None
    num_classes, _ = required(file, "head.weight", 2)
    rules = linear("predictions", "head.", "head.bias" in file)
    return rules, {"num_classes": num_classes}


def _mlp(place, name):
    return {
        **linear(f"{place}/hidden", f"{name}fc1."),
        **linear(f"{place}/output", f"{name}fc2."),
    }


def _vit(file, config, overrides):
    architecture = config.get("architecture", "")
    settings = {**config, **config.get("model_args", {})}
    hidden_dim, channels, height, width = required(file, _KERNELS[1], 4)
    blocks = numbered(file, r"blocks\.(\d+)\.")
    _check_sizes(file, config, hidden_dim, len(blocks), "depth")
    if "reg_token" in file:
        raise ValueError(
            "Expected a ViT without register tokens, which ours has not; received: "
            f"'reg_token' in {file.path}"
        )
    class_token = "cls_token" in file
    pooling = settings.get("global_pool", "token" if class_token else "avg")
    is_clip = "_clip_" in architecture
    activation = settings.get("act_layer", "gelu")
    if "quickgelu" in architecture:
        activation = "quick_gelu"
    elif _TANH.match(architecture):
        activation = "gelu_tanh"
    if "activation" not in overrides and activation not in _ACTIVATIONS:
        raise ValueError(
            f"Expected an activation of {sorted(_ACTIVATIONS)}, or activation=...; "
            f"received: act_layer={activation!r}"
        )
    images = image_normalization(config, channels)
    num_heads = settings.get("num_heads") or overrides.get("num_heads")
    num_heads = num_heads or next(
        (_HEADS[start] for start in _HEADS if architecture.startswith(start)), None
    )
    arguments = {
        "patch_size": height if height == width else (height, width),
        "hidden_dim": hidden_dim,
        "num_layers": len(blocks),
        "num_heads": num_heads or usual_heads(hidden_dim, file.path),
        "mlp_dim": required(file, "blocks.0.mlp.fc1.weight", 2)[0],
        "class_token": class_token,
        "activation": _ACTIVATIONS.get(activation),
        # CLIP's towers keep PyTorch's own epsilon.
        "layer_norm_epsilon": 1e-5 if is_clip else 1e-6,
        "embedding_norm": "norm_pre.weight" in file,
        "query_key_norm": _BLOCK.query_key_norm(file, "blocks.0."),
        "position_interpolation": "bicubic",
    }
    rules = patches("patch_embed.proj.", "patch_embed.proj.bias" in file, True, images)
    if arguments["query_key_norm"]:
        arguments["query_key_norm_bias"] = True
    agree(file, settings, "config.json", qk_norm=arguments["query_key_norm"])
    if class_token:
        rules["class_token/token"] = Direct("cls_token")
    if arguments["embedding_norm"]:
        rules.update(norm("embedding_norm", "norm_pre."))
    arguments["image_shape"] = _positions(file, settings, class_token, rules)
    for i in blocks:
        block = f"blocks.{i}."
        query_bias = f"{block}attn.qkv.bias" in file
        rules.update(block_rules(file, f"block_{i}", block, _BLOCK, query_bias))
    task, final, pooler = _pooling(file, pooling, class_token, arguments)
    head, head_arguments = _head(file)
    if head_arguments is not None:
        task.update(head_arguments)
    elif pooler:
        # The pooled vector itself is the output.
        task["num_classes"] = hidden_dim
        head = {"predictions/kernel": Filled("identity"), "predictions/bias": Filled()}
    else:
        task = None
    rules = {**rules, **final, **pooler, **head}
    notes = _assumed(settings, False, class_token, arguments, num_heads)
    return _with_preprocessing(
        ConversionPlan(
            "ViT (timm)", "ViTBackbone", arguments, rules, task, notes=notes
        ),
        config,
    )


def _positions(file, settings, class_token, rules):
    """Adds the rule of the position embeddings; returns the image's shape."""
    _, channels, height, width = file[_KERNELS[1]].shape
    rows = required(file, "pos_embed", 3)[1]
    size = settings.get("img_size") or settings.get("pretrained_cfg", {}).get(
        "input_size"
    )
    grid = None
    if size is not None:
        size = (size, size) if isinstance(size, int) else tuple(size[-2:])
        grid = size[0] // height, size[1] // width
        # The config may be of another resolution than the weights.
        if rows - grid[0] * grid[1] not in (0, class_token):
            grid = None
    if grid is None:
        has_row = class_token and round((rows - 1) ** 0.5) ** 2 == rows - 1
        side = square_grid(rows, has_row, f"'pos_embed' in {file.path}")
        grid = side, side
    rules["position_embedding/embedding"] = Positions(
        "pos_embed", without_class_token=class_token and rows == grid[0] * grid[1]
    )
    return grid[0] * height, grid[1] * width, channels


def _pooling(file, pooling, class_token, arguments):
    """Arguments of the task, and rules of the last norm and of the pooling."""
    if pooling == "map":
        task = {"pooling": "map"}
        if arguments["query_key_norm"]:
            # timm's pooling goes without, whatever its blocks do.
            task["pooling_query_key_norm"] = False
        return task, norm("final_norm", "norm."), _attention_pool(file)
    names = {"token": "class_token", "avg": "average"}
    if class_token:
        names["avg"] = "patch_average"
    if pooling not in names:
        raise ValueError(
            f"Expected global_pool of {[*names, 'map']} in the config of {file.path}; "
            f"received: global_pool={pooling!r}"
        )
    if "fc_norm.weight" not in file:
        return {"pooling": names[pooling]}, norm("final_norm", "norm."), {}
    # The last norm is that of the pooled vector.
    arguments["final_norm"] = False
    task = {"pooling": names[pooling], "pooled_norm": True}
    return task, {}, norm("pooled_norm", "fc_norm.")


def _attention_pool(file):
    pool = "attn_pool."
    rules = {
        "pooler/probe": Direct(f"{pool}latent"),
        **linear("pooler/attention/query", f"{pool}q."),
        **linear("pooler/attention/attention_output", f"{pool}proj.", inputs=2),
        **norm("pooler/norm", f"{pool}norm."),
        **_mlp("pooler/mlp", f"{pool}mlp."),
    }
    for part, projection in enumerate(("key", "value")):
        place = f"pooler/attention/{projection}"
        rules.update(linear(place, f"{pool}kv.", part=part, parts=2))
    return rules


def _mixer(file, config):
    hidden_dim, channels, height, width = required(file, _KERNELS[0], 4)
    blocks = numbered(file, r"blocks\.(\d+)\.")
    _check_sizes(file, config, hidden_dim, len(blocks), "num_blocks")
    token_mlp, tokens = required(file, "blocks.0.mlp_tokens.fc1.weight", 2)
    grid = square_grid(tokens, False, file.path)
    images = image_normalization(config, channels)
    rules = {
        **patches("stem.proj.", "stem.proj.bias" in file, True, images),
        **norm("final_norm", "norm."),
    }
    for i in blocks:
        block, target = f"blocks.{i}.", f"block_{i}"
        rules.update(norm(f"{target}/mixer_norm", f"{block}norm1."))
        rules.update(norm(f"{target}/feed_forward_norm", f"{block}norm2."))
        rules.update(_mlp(f"{target}/token_mlp", f"{block}mlp_tokens."))
        rules.update(_mlp(f"{target}/mlp", f"{block}mlp_channels."))
    head, task = _head(file)
    arguments = {
        "image_shape": (grid * height, grid * width, channels),
        "patch_size": height if height == width else (height, width),
        "hidden_dim": hidden_dim,
        "num_layers": len(blocks),
        "token_mlp_dim": token_mlp,
        "mlp_dim": required(file, "blocks.0.mlp_channels.fc1.weight", 2)[0],
        "activation": "gelu",
        "layer_norm_epsilon": 1e-6,
    }
    plan = ConversionPlan(
        "MLP-Mixer (timm)",
        "MixerBackbone",
        arguments,
        {**rules, **head},
        task,
        notes=_assumed(config, True, False, arguments, None),
    )
    return _with_preprocessing(plan, config)
