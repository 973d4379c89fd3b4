"""Google's releases: ViT, AugReg, SAM, V-MoE, E3, Soft MoE, MLP-Mixer, image-text.

Reads all naming styles: modules of a block counted together (`LayerNorm_0,
MultiHeadDotProductAttention_1, ...`), counted by class, or named as in V-MoE.
"""

from pathlib import Path

from keras_moe._checks import check_image_shape
from keras_moe.models.conversion import _rules, _spec
from keras_moe.models.registry import builtin_presets

# Released V-MoEs, whose weights do not determine all arguments: name prefix and the
# built-in preset that does.
_RELEASED = {
    "eee_s32_last2": "eee_s32_last2_e8",
    "vmoe_s32_last2": "vmoe_s32_last2_e8",
    "vmoe_b16_imagenet21k": "vmoe_b16_every2_e8",
}
_GOOGLE = _spec.Library("Google", "Apache-2.0")
_ROUTING = (
    "ensemble_size", "num_selected_experts", "capacity_factor", "capacity_multiple_of",
    "examples_per_group", "noise_std", "auxiliary_losses", "expert_dropout",
)  # fmt: skip
_UNKNOWN_ROUTING = (
    "weights do not tell how tokens are allocated: router, num_selected_experts and "
    "capacity_factor have their defaults unless given"
)
# The releases evaluate on the whole image, resized without antialiasing.
_PREPROCESSING = {"interpolation": "bilinear", "antialias": False}
_PREFIXES = ("", "params/", "opt/target/", "target/")
# Optimizer entries of a training state.
_OPTIMIZER = ("opt", "opt_state")
_IMAGE, _TEXT = "img/", "txt/"


def google_spec(
    file, config: dict, overrides: dict, tower: str | None = None
) -> _spec.ConversionSpec | None:
    name = Path(file.path).name
    for prefix in _PREFIXES:
        if f"{prefix}{_IMAGE}embedding/kernel" in file:
            spec = _pair_spec(file, prefix, name, overrides, tower)
        elif f"{prefix}stem/kernel" in file:
            spec = _mixer_spec(file, prefix)
        elif f"{prefix}embedding/kernel" in file:
            spec = _vit_spec(file, prefix, name, overrides)
        else:
            continue
        spec.ignored.update(_rest_of_state(file, prefix))
        return spec
    return None


def _rest_of_state(file, prefix):
    """Returns the parts of a training state that are not parameters."""
    reasons = {}
    for name in file:
        if not name.startswith(prefix):
            top = name.split("/")[0]
            is_optimizer = top in _OPTIMIZER
            what = "the optimizer's state" if is_optimizer else "the training state"
            reasons[name] = f"of {what}, no parameter: {top}"
    return reasons


def _module(file, parent, *names):
    """Returns the first of several modules that has a tensor."""
    for name in names:
        start = f"{parent}{name}/"
        if any(tensor.startswith(start) for tensor in file):
            return start
    return f"{parent}{names[0]}/"


def _flax_norm(path, name):
    return _rules.norm(path, name, "scale", "bias")


def _attention(path, name, query_key_norm=False):
    rules = _rules.direct(f"{path}/attention_output", f"{name}out/")
    for part in ("query", "key", "value"):
        rules.update(_rules.direct(f"{path}/{part}", f"{name}{part}/"))
        if query_key_norm and part != "value":
            rules[f"{path}/{part}_norm/gamma"] = _rules.Direct(f"{name}{part}_ln/scale")
    return rules


def _mlp(path, name):
    return {
        **_rules.direct(f"{path}/hidden", f"{name}Dense_0/"),
        **_rules.direct(f"{path}/output", f"{name}Dense_1/"),
    }


def _head(file, prefix):
    if f"{prefix}head/kernel" not in file:
        return {}, None
    _, num_classes = _spec.required(file, f"{prefix}head/kernel", 2)
    rules = _rules.direct("predictions", f"{prefix}head/")
    arguments = {"num_classes": num_classes}
    if f"{prefix}pre_logits/kernel" in file:
        rules.update(_rules.direct("pre_logits", f"{prefix}pre_logits/"))
        _, dim = _spec.required(file, f"{prefix}pre_logits/kernel", 2)
        arguments["representation_dim"] = dim
    return rules, arguments


def _map_head(file, prefix):
    root = _module(file, prefix, "MapHead", "MAPHead_0")
    if f"{root}probe" not in file:
        return {}
    attention = "MultiHeadDotProductAttention"
    attention = _module(file, root, attention, f"{attention}_0")
    query_key_norm = f"{attention}query_ln/scale" in file
    return {
        "pooler/probe": _rules.Direct(f"{root}probe"),
        **_attention("pooler/attention", attention, query_key_norm),
        **_flax_norm("pooler/norm", _module(file, root, "LayerNorm", "LayerNorm_0")),
        **_mlp("pooler/mlp", _module(file, root, "Mlp", "MlpBlock_0")),
    }


def _encoder(file, root):
    num_layers = _spec.numbered(file, f"{root}encoderblock_")
    attentions = ("SelfAttention", *(f"MultiHeadDotProductAttention_{i}" for i in "10"))
    arguments = {
        "num_layers": num_layers,
        "activation": "gelu_tanh",
        "layer_norm_epsilon": 1e-6,
    }
    rules = _flax_norm("final_norm", f"{root}encoder_norm/")
    moe_layers, expert_mlp_dim = [], None
    for i in range(num_layers):
        block, path = f"{root}encoderblock_{i}/", f"block_{i}"
        attention = _module(file, block, *attentions)
        query_key_norm = f"{attention}query_ln/scale" in file
        second = _module(file, block, "LayerNorm_2", "LayerNorm_1")
        rules.update(_flax_norm(f"{path}/mixer_norm", f"{block}LayerNorm_0/"))
        rules.update(_flax_norm(f"{path}/feed_forward_norm", second))
        rules.update(_attention(f"{path}/attention", attention, query_key_norm))
        if any(tensor.startswith(f"{block}Moe/") for tensor in file):
            moe_layers.append(i)
            moe_rules, router = _moe(file, f"{path}/moe", f"{block}Moe/")
            rules.update(moe_rules)
            arguments.update(router)
            experts = _spec.required(file, f"{block}Moe/Mlp/Dense_0/kernel", 3)
            arguments["num_experts"], _, expert_mlp_dim = experts
        else:
            mlp = _module(file, block, "Mlp", "MlpBlock_3", "MlpBlock_0")
            rules.update(_mlp(f"{path}/mlp", mlp))
            arguments["mlp_dim"] = _spec.required(file, f"{mlp}Dense_0/kernel", 2)[1]
        if i == 0:
            query = _spec.required(file, f"{attention}query/kernel", 3)
            arguments.update(num_heads=query[1], query_key_norm=query_key_norm)
    if moe_layers:
        arguments["moe_layers"] = moe_layers
        if arguments.setdefault("mlp_dim", expert_mlp_dim) != expert_mlp_dim:
            arguments["expert_mlp_dim"] = expert_mlp_dim
    return rules, arguments


def _moe(file, path, name):
    rules = {
        f"{path}/experts/{layer}_{what}": _rules.Direct(f"{name}Mlp/{dense}/{what}")
        for layer, dense in (("hidden", "Dense_0"), ("output", "Dense_1"))
        for what in ("kernel", "bias")
    }
    if f"{name}Router/mu" not in file:
        kernel = f"{name}Router/dense/kernel"
        shape = file[kernel].shape if kernel in file else ()
        rules[f"{path}/router/kernel"] = _rules.Direct(kernel)
        if len(shape) < 3:
            return rules, {}
        # The kernel (D, M, E / M) of an ensemble.
        rules[f"{path}/router/kernel"] = _rules.Reshaped(kernel, shape=shape)
        return rules, {"ensemble_size": shape[1]}
    has_scale = f"{name}Router/scale" in file
    _, _, num_slots = _spec.required(file, f"{name}Router/mu", 3)
    rules[f"{path}/router/slots"] = _rules.Direct(f"{name}Router/mu")
    if has_scale:
        rules[f"{path}/router/scale"] = _rules.Direct(f"{name}Router/scale")
    return rules, {"router": "soft", "num_slots": num_slots, "normalize": has_scale}


def _vit_spec(file, prefix, name, overrides):
    kernel = f"{prefix}embedding/kernel"
    kernel_shape = _spec.required(file, kernel, 4)
    root = f"{prefix}Encoder/"
    if not any(tensor.startswith(root) for tensor in file):
        root = f"{prefix}Transformer/"
    class_token = f"{prefix}cls" in file
    rules, arguments = _encoder(file, root)
    arguments.update(_spec.patch_arguments(kernel_shape), class_token=class_token)
    rules["patch_embedding/kernel"] = _rules.PatchKernel(kernel)
    rules["patch_embedding/bias"] = _rules.Direct(f"{prefix}embedding/bias")
    if class_token:
        rules["class_token/token"] = _rules.Direct(f"{prefix}cls")
    head, task = _head(file, prefix)
    pooler = _map_head(file, prefix)
    rules.update({**head, **pooler})
    if task is not None:
        task["pooling"] = "class_token" if class_token else "average"
    if task is not None and pooler:
        task["pooling"] = "map"
        normalizes = "pooler/attention/query_norm/gamma" in pooler
        if normalizes != arguments["query_key_norm"]:
            task["pooling_query_key_norm"] = normalizes
    notes = _add_routing(arguments, task, name)
    _add_positions(file, prefix, root, rules, arguments, kernel_shape, overrides)
    architecture = "V-MoE" if arguments.get("moe_layers") else "ViT"
    if arguments.get("router") == "soft":
        architecture = "Soft MoE"
    elif arguments.get("ensemble_size", 1) > 1:
        architecture = "E3"
    spec = _spec.ConversionSpec(
        _GOOGLE, architecture, "ViTBackbone", arguments, rules, task
    )
    spec.notes, spec.preprocessing = notes, _PREPROCESSING
    return spec


def _add_routing(arguments, task, name):
    """Adds the arguments of a released V-MoE; returns notes."""
    preset = next((x for start, x in _RELEASED.items() if name.startswith(start)), None)
    if preset is None:
        is_unknown = arguments.get("moe_layers") and "router" not in arguments
        return (_UNKNOWN_ROUTING,) if is_unknown else ()
    preset = builtin_presets()[preset]
    arguments.update({k: v for k, v in preset["config"].items() if k in _ROUTING})
    if task is not None and "_ft_" not in name:
        task["multi_label"] = preset["task_config"].get("multi_label", False)
    return ()


def _add_positions(file, prefix, root, rules, arguments, kernel_shape, overrides):
    """Adds the rule of position embeddings, and the image shape."""
    height, width, channels, _ = kernel_shape
    positions = f"{root}posembed_input/pos_embedding"
    if positions not in file and f"{prefix}pos_embedding" in file:
        positions = f"{prefix}pos_embedding"
    if positions in file:
        rules["position_embedding/embedding"] = _rules.Positions(positions)
        rows = _spec.required(file, positions, 3)[1]
        where = f"{positions!r} in {file.path}"
        grid = _spec.square_grid(rows, arguments["class_token"], where)
        arguments["image_shape"] = (grid * height, grid * width, channels)
        return
    if "image_shape" not in overrides:
        raise ValueError(
            "Expected image_shape=(height, width, channels), which weights "
            f"without position embeddings do not tell; received: {file.path}"
        )
    size = check_image_shape(overrides["image_shape"])[:2]
    arguments.update(position_embedding="sincos", image_shape=(*size, channels))


def _mixer_spec(file, prefix):
    kernel_shape = _spec.required(file, f"{prefix}stem/kernel", 4)
    num_layers = _spec.numbered(file, f"{prefix}MixerBlock_")
    first = f"{prefix}MixerBlock_0/"
    tokens, token_mlp = _spec.required(file, f"{first}token_mixing/Dense_0/kernel", 2)
    _, mlp_dim = _spec.required(file, f"{first}channel_mixing/Dense_0/kernel", 2)
    grid = _spec.square_grid(tokens, False, file.path)
    rules = {
        "patch_embedding/kernel": _rules.PatchKernel(f"{prefix}stem/kernel"),
        "patch_embedding/bias": _rules.Direct(f"{prefix}stem/bias"),
        **_flax_norm("final_norm", f"{prefix}pre_head_layer_norm/"),
    }
    for i in range(num_layers):
        block, path = f"{prefix}MixerBlock_{i}/", f"block_{i}"
        rules.update(_flax_norm(f"{path}/mixer_norm", f"{block}LayerNorm_0/"))
        rules.update(_flax_norm(f"{path}/feed_forward_norm", f"{block}LayerNorm_1/"))
        rules.update(_mlp(f"{path}/token_mlp", f"{block}token_mixing/"))
        rules.update(_mlp(f"{path}/mlp", f"{block}channel_mixing/"))
    head, task = _head(file, prefix)
    mlp_dims = token_mlp, mlp_dim
    arguments = _spec.mixer_arguments(
        kernel_shape, grid, num_layers, mlp_dims, "gelu_tanh"
    )
    rules.update(head)
    spec = _spec.ConversionSpec(
        _GOOGLE, "MLP-Mixer", "MixerBackbone", arguments, rules, task
    )
    spec.preprocessing = _PREPROCESSING
    return spec


# Contrastive models: an image tower and a text tower


def _pair_spec(file, prefix, name, overrides, tower):
    specs = {}
    if tower != "text":
        own = {**overrides, **(overrides.get("image") or {})}
        specs["image"] = _vit_spec(file, prefix + _IMAGE, name, own)
    if tower != "image":
        own = {**overrides, **(overrides.get("text") or {})}
        specs["text"] = _text_spec(file, prefix + _TEXT, own)
    logits = f"{prefix}s", f"{prefix}b"
    if tower is None:
        return _spec.pair_spec(file, **specs, log_scale=logits[0], bias=logits[1])
    spec = specs[tower]
    other, start = ("text", _TEXT) if tower == "image" else ("image", _IMAGE)
    for tensor in file:
        if tensor.startswith(prefix + start):
            spec.ignored[tensor] = f"of the {other} tower"
    spec.ignored.update(dict.fromkeys(logits, "of the logits of pairs"))
    return spec


def _text_spec(file, prefix, overrides):
    embedding, root = f"{prefix}Embed_0/embedding", f"{prefix}Encoder/"
    positions = f"{root}posembed_input/pos_embedding"
    vocabulary_size, hidden_dim = _spec.required(file, embedding, 2)
    rules, arguments = _encoder(file, root)
    # Text towers do not have this argument, nor the checkpoint such weights.
    arguments.pop("query_key_norm")
    pooler = _map_head(file, prefix)
    head, task = _head(file, prefix)
    notes = (_UNKNOWN_ROUTING,) if arguments.get("moe_layers") else ()
    pooling = "map" if pooler else overrides.get("pooling", "last")
    if not pooler and "pooling" not in overrides:
        notes += ("assumed: pooling at the last token (the weights do not tell)",)
    rules.update(pooler)
    rules["token_embedding/embeddings"] = _rules.Direct(embedding)
    rules["text_positions/embedding"] = _rules.Direct(positions)
    if task is not None:
        arguments.update(projection_dim=task["num_classes"], projection_bias=True)
        for path, rule in head.items():
            rules[path.replace("predictions/", "projection/")] = rule
    arguments.update(
        vocabulary_size=vocabulary_size,
        max_length=_spec.required(file, positions, 3)[1],
        hidden_dim=hidden_dim,
        # Padding is attended to.
        causal=False,
        mask_padding=False,
        pooling=pooling,
    )
    name = "V-MoE" if arguments.get("moe_layers") else "ViT"
    spec = _spec.ConversionSpec(_GOOGLE, name, "TextBackbone", arguments, rules)
    spec.notes = notes
    return spec
