"""The names of Google's releases: ViT, AugReg, SAM, V-MoE, Soft MoE and MLP-Mixer.

They changed over the years: modules of a block were first counted together
(`LayerNorm_0, MultiHeadDotProductAttention_1, LayerNorm_2, MlpBlock_3`), then by
class, and V-MoE names them. All of these are read.
"""

from keras_moe.checks import check_image_shape
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.sizes import numbered, required, square_grid
from keras_moe.models.conversion.weight_rules import (
    Direct,
    PatchKernel,
    Positions,
    direct,
    norm,
)
from keras_moe.models.registry import builtin_presets

# The released V-MoEs, whose weights do not imply all arguments: the start of the name,
# and the built-in preset with the arguments.
RELEASED = {
    "vmoe_s32_last2": "vmoe_s32_last2_e8",
    "vmoe_b16_imagenet21k": "vmoe_b16_every2_e8",
}
_ROUTING = (
    "num_selected_experts",
    "capacity_factor",
    "capacity_multiple_of",
    "examples_per_group",
    "noise_std",
    "auxiliary_losses",
    "expert_dropout",
)
UNKNOWN_ROUTING = (
    "weights do not tell how tokens are allocated: taken are the defaults of router, "
    "num_selected_experts and capacity_factor, where no argument is given"
)
# The releases evaluate on the whole image, resized without antialiasing.
_PREPROCESSING = {"interpolation": "bilinear", "antialias": False}
PREFIXES = ("", "params/", "opt/target/", "target/")
# Entries of a training state that hold moments and counts of an optimizer.
_OPTIMIZER = ("opt", "opt_state")


def _first(file, *names):
    """The first of several names that is present, or else the first."""
    present = [name for name in names if name in file]
    return (present or names)[0]


def _module(file, place, *names):
    """The first of several modules below `place` that has a tensor."""
    for name in names:
        start = f"{place}{name}/"
        if any(tensor.startswith(start) for tensor in file):
            return start
    return f"{place}{names[0]}/"


def google_plan(file, name: str, overrides: dict) -> ConversionPlan | None:
    """The plan for a checkpoint of Google's names, or None if it has others."""
    for prefix in PREFIXES:
        if f"{prefix}stem/kernel" in file:
            return _mixer(file, prefix)
        if f"{prefix}embedding/kernel" in file:
            return vit_plan(file, prefix, name, overrides)
    return None


def left_of_state(file, prefix):
    """All that is no parameter, such as the other parts of a training state."""
    reasons = {}
    for name in file:
        if name.startswith(prefix):
            continue
        top = name.split("/")[0]
        what = "the optimizer's state" if top in _OPTIMIZER else "the training state"
        reasons[name] = f"of {what}, no parameter: {top}"
    return reasons


def _attention(place, name, query_key_norm=False):
    rules = {}
    for part in ("query", "key", "value"):
        rules.update(direct(f"{place}/{part}", f"{name}{part}/"))
        if query_key_norm and part != "value":
            norm_name = f"{name}{part}_ln/scale"
            rules[f"{place}/{part}_norm/gamma"] = Direct(norm_name)
    return {**rules, **direct(f"{place}/attention_output", f"{name}out/")}


def _mlp(place, name):
    return {
        **direct(f"{place}/hidden", f"{name}Dense_0/"),
        **direct(f"{place}/output", f"{name}Dense_1/"),
    }


def _flax_norm(place, name):
    return norm(place, name, "scale", "bias")


def head_rules(file, prefix):
    """Rules and arguments of representation and head; None without a head."""
    if f"{prefix}head/kernel" not in file:
        return {}, None
    _, num_classes = required(file, f"{prefix}head/kernel", 2)
    rules = direct("predictions", f"{prefix}head/")
    arguments = {"num_classes": num_classes}
    if f"{prefix}pre_logits/kernel" in file:
        rules.update(direct("pre_logits", f"{prefix}pre_logits/"))
        _, dim = required(file, f"{prefix}pre_logits/kernel", 2)
        arguments["representation_dim"] = dim
    return rules, arguments


def vit_plan(file, prefix: str, name: str, overrides: dict) -> ConversionPlan:
    """The plan for a ViT, V-MoE or Soft MoE."""
    if name.startswith("eee_"):
        raise ValueError(
            "Expected a V-MoE; received an efficient ensemble of experts, whose "
            f"routers serve each member its own experts: {name!r}"
        )
    kernel = f"{prefix}embedding/kernel"
    height, width, channels, hidden_dim = required(file, kernel, 4)
    root = f"{prefix}Encoder/"
    if not any(tensor.startswith(root) for tensor in file):
        root = f"{prefix}Transformer/"
    class_token = f"{prefix}cls" in file
    rules, arguments = encoder_rules(file, root)
    moe_layers = arguments.get("moe_layers")
    arguments.update(
        patch_size=height if height == width else (height, width),
        hidden_dim=hidden_dim,
        class_token=class_token,
    )
    rules.update(
        {
            "patch_embedding/kernel": PatchKernel(kernel),
            "patch_embedding/bias": Direct(f"{prefix}embedding/bias"),
        }
    )
    if class_token:
        rules["class_token/token"] = Direct(f"{prefix}cls")
    notes = []
    head, task = head_rules(file, prefix)
    rules.update(head)
    pooler, pooling = map_head_rules(file, prefix)
    rules.update(pooler)
    if task is not None:
        task["pooling"] = pooling or ("class_token" if class_token else "average")
        normalizes = "pooler/attention/query_norm/gamma" in pooler
        if pooling and normalizes != arguments["query_key_norm"]:
            task["pooling_query_key_norm"] = normalizes
    released = next((RELEASED[x] for x in RELEASED if name.startswith(x)), None)
    if released:
        preset = builtin_presets()[released]
        routing = {k: v for k, v in preset["config"].items() if k in _ROUTING}
        arguments.update(routing)
        if task is not None and "_ft_" not in name:
            task["multi_label"] = preset["task_config"].get("multi_label", False)
    elif moe_layers and "router" not in arguments:
        notes.append(UNKNOWN_ROUTING)
    positions = _first(
        file, f"{root}posembed_input/pos_embedding", f"{prefix}pos_embedding"
    )
    if positions in file:
        rules["position_embedding/embedding"] = Positions(positions)
        rows = required(file, positions, 3)[1]
        grid = square_grid(rows, class_token, f"{positions!r} in {file.path}")
        arguments["image_shape"] = (grid * height, grid * width, channels)
    else:
        arguments["position_embedding"] = "sincos"
        if "image_shape" not in overrides:
            raise ValueError(
                "Expected image_shape=(height, width, channels), which weights "
                f"without position embeddings do not tell; received: {file.path}"
            )
        arguments["image_shape"] = (
            *check_image_shape(overrides["image_shape"])[:2],
            channels,
        )
    scheme = "V-MoE" if moe_layers else "ViT"
    if arguments.get("router") == "soft":
        scheme = "Soft MoE"
    return ConversionPlan(
        f"{scheme} (Google)",
        "ViTBackbone",
        arguments,
        rules,
        task,
        left_of_state(file, prefix),
        tuple(notes),
        _PREPROCESSING,
    )


def encoder_rules(file, root: str) -> tuple[dict, dict]:
    """Rules of an encoder's blocks and last norm, and the arguments that they imply."""
    blocks = numbered(file, rf"{root}encoderblock_(\d+)/")
    attentions = ("SelfAttention", *(f"MultiHeadDotProductAttention_{i}" for i in "10"))
    arguments = {
        "num_layers": len(blocks),
        "activation": "gelu_tanh",
        "layer_norm_epsilon": 1e-6,
    }
    rules = _flax_norm("final_norm", f"{root}encoder_norm/")
    moe_layers = []
    for i in blocks:
        block, target = f"{root}encoderblock_{i}/", f"block_{i}"
        attention = _module(file, block, *attentions)
        query_key_norm = f"{attention}query_ln/scale" in file
        second = _module(file, block, "LayerNorm_2", "LayerNorm_1")
        rules.update(_flax_norm(f"{target}/mixer_norm", f"{block}LayerNorm_0/"))
        rules.update(_flax_norm(f"{target}/feed_forward_norm", second))
        rules.update(_attention(f"{target}/attention", attention, query_key_norm))
        if any(tensor.startswith(f"{block}Moe/") for tensor in file):
            moe_layers.append(i)
            rules.update(_moe(file, f"{target}/moe", f"{block}Moe/", arguments))
        else:
            mlp = _module(file, block, "Mlp", "MlpBlock_3", "MlpBlock_0")
            rules.update(_mlp(f"{target}/mlp", mlp))
            arguments["mlp_dim"] = required(file, f"{mlp}Dense_0/kernel", 2)[1]
        if i == 0:
            query = required(file, f"{attention}query/kernel", 3)
            arguments.update(num_heads=query[1], query_key_norm=query_key_norm)
    if moe_layers:
        arguments["moe_layers"] = moe_layers
        expert_mlp_dim = arguments.pop("experts' mlp_dim")
        if arguments.setdefault("mlp_dim", expert_mlp_dim) != expert_mlp_dim:
            arguments["expert_mlp_dim"] = expert_mlp_dim
    return rules, arguments


def _moe(file, place, name, arguments):
    """Rules of an MoE layer; adds to the backbone's arguments."""
    experts = f"{name}Mlp/Dense_0/kernel"
    num_experts, _, expert_mlp_dim = required(file, experts, 3)
    arguments["num_experts"] = num_experts
    arguments["experts' mlp_dim"] = expert_mlp_dim
    rules = {
        f"{place}/experts/{layer}_{what}": Direct(f"{name}Mlp/{dense}/{what}")
        for layer, dense in (("hidden", "Dense_0"), ("output", "Dense_1"))
        for what in ("kernel", "bias")
    }
    if f"{name}Router/mu" not in file:
        rules[f"{place}/router/kernel"] = Direct(f"{name}Router/dense/kernel")
        return rules
    has_scale = f"{name}Router/scale" in file
    _, _, num_slots = required(file, f"{name}Router/mu", 3)
    arguments["router"] = "soft"
    arguments["router_options"] = {"num_slots": num_slots, "normalize": has_scale}
    rules[f"{place}/router/slots"] = Direct(f"{name}Router/mu")
    if has_scale:
        rules[f"{place}/router/scale"] = Direct(f"{name}Router/scale")
    return rules


def map_head_rules(file, prefix):
    """Rules of attention pooling, if there is one."""
    root = _module(file, prefix, "MapHead", "MAPHead_0")
    if f"{root}probe" not in file:
        return {}, None
    attention = "MultiHeadDotProductAttention"
    attention = _module(file, root, attention, f"{attention}_0")
    query_key_norm = f"{attention}query_ln/scale" in file
    return {
        "pooler/probe": Direct(f"{root}probe"),
        **_attention("pooler/attention", attention, query_key_norm),
        **_flax_norm("pooler/norm", _module(file, root, "LayerNorm", "LayerNorm_0")),
        **_mlp("pooler/mlp", _module(file, root, "Mlp", "MlpBlock_0")),
    }, "map"


def _mixer(file, prefix):
    height, width, channels, hidden_dim = required(file, f"{prefix}stem/kernel", 4)
    blocks = numbered(file, rf"{prefix}MixerBlock_(\d+)/")
    first = f"{prefix}MixerBlock_0/"
    tokens, token_mlp = required(file, f"{first}token_mixing/Dense_0/kernel", 2)
    _, mlp_dim = required(file, f"{first}channel_mixing/Dense_0/kernel", 2)
    grid = square_grid(tokens, False, file.path)
    rules = {
        "patch_embedding/kernel": PatchKernel(f"{prefix}stem/kernel"),
        "patch_embedding/bias": Direct(f"{prefix}stem/bias"),
        **_flax_norm("final_norm", f"{prefix}pre_head_layer_norm/"),
    }
    for i in blocks:
        block, target = f"{prefix}MixerBlock_{i}/", f"block_{i}"
        rules.update(_flax_norm(f"{target}/mixer_norm", f"{block}LayerNorm_0/"))
        rules.update(_flax_norm(f"{target}/feed_forward_norm", f"{block}LayerNorm_1/"))
        rules.update(_mlp(f"{target}/token_mlp", f"{block}token_mixing/"))
        rules.update(_mlp(f"{target}/mlp", f"{block}channel_mixing/"))
    head, task = head_rules(file, prefix)
    return ConversionPlan(
        "MLP-Mixer (Google)",
        "MixerBackbone",
        {
            "image_shape": (grid * height, grid * width, channels),
            "patch_size": height if height == width else (height, width),
            "hidden_dim": hidden_dim,
            "num_layers": len(blocks),
            "token_mlp_dim": token_mlp,
            "mlp_dim": mlp_dim,
            "activation": "gelu_tanh",
            "layer_norm_epsilon": 1e-6,
        },
        {**rules, **head},
        task,
        left_of_state(file, prefix),
        preprocessing=_PREPROCESSING,
    )
