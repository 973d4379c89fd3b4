"""Converts SigLino's vision encoders (tiiuae), dense or with experts.

Axes: D hidden, E experts, H mlp.
"""

from dataclasses import dataclass
from typing import Any

from keras_moe._checks import unfit
from keras_moe.models.conversion import _rules, _spec

MODEL_TYPES = ("siglino",)
_TABLE, _PATCHES = "freqs_cis_golden", "img_projector.weight"
_TEACHERS = ("siglip2", "dinov3")
_POOLING = "siglip2_multihead_attention_pooling_head."
# Those of SigLIP 2's attention pooling, whatever its width is.
_POOLING_HEADS = 16
# 256 patches, as in the release's examples; any other size works as well.
_PATCHES_PER_SIDE = 16


@dataclass(frozen=True)
class _ExpertKernel(_rules.Direct):
    """Kernels (E, outputs, inputs) of all experts."""

    def shapes(self, target):
        experts, inputs, outputs = target
        return {self.name: (experts, outputs, inputs)}

    def make(self, read, target):
        return read(self.name).transpose(0, 2, 1)

    def tensor(self, value):
        return value.transpose(0, 2, 1)


def siglino_spec(
    file: Any, config: dict, overrides: dict, tower: str | None = None
) -> _spec.ConversionSpec | None:
    if _TABLE not in file or _PATCHES not in file:
        return None
    heads, pairs, _ = _spec.required(file, _TABLE, 3)
    dim, pixels = _spec.required(file, _PATCHES, 2)
    size = config.get("patch_size", 16)
    head_dim, channels = 4 * pairs, pixels // size**2
    num_layers = _spec.numbered(file, "layers.")
    _spec.agree(
        file, config, _spec.CONFIG_NAME,
        dim=dim, n_heads=heads, head_dim=head_dim, n_layers=num_layers,
    )  # fmt: skip
    keys = _spec.required(file, "layers.0.attention.wk.weight", 2)[0] // head_dim
    if keys != heads:
        raise unfit(
            "as many heads of keys as of queries", n_heads=heads, n_kv_heads=keys
        )
    for part in (config, config.get("moe") or {}):
        if (activation := part.get("activation", "silu")) != "silu":
            raise unfit("activation='silu'", activation=activation)
    _spec.check_patch_size(overrides, size)
    # As published, of between 64 patches and the budget.
    images: dict[str, object] = {"interpolation": "bicubic"}
    if (most := overrides.get("max_patches")) is not None:
        images.update(max_patches=most, min_patches=min(64, most), patch_size=size)
    has_norms, teachers = "layers.0.ffn_norm.weight" in file, _teachers(file)
    arguments = {
        "image_shape": (*[_PATCHES_PER_SIDE * size] * 2, channels),
        "patch_size": size,
        "hidden_dim": dim,
        "num_layers": num_layers,
        "num_heads": heads,
        "head_dim": head_dim,
        "mlp_dim": _mlp_dim(file, num_layers),
        "register_tokens": _spec.required(file, "storage_tokens", 3)[1],
        "position_embedding": "golden_2d",
        "attention_sinks": True,
        "query_key_norm": "plain_rms",
        "norm": "rms" if has_norms else "plain_rms",
        "layer_norm_epsilon": config.get("norm_eps", 1e-5),
        "gated_mlp": True,
        "use_bias": False,
        "activation": "silu",
        **_experts(file, config, num_layers),
    }
    return _spec.ConversionSpec(
        _spec.Library("tiiuae", "as its model card says"),
        "SigLino",
        "ViTBackbone",
        arguments,
        {**_backbone_rules(arguments, has_norms), **_teacher_rules(teachers)},
        {"teachers": teachers} if teachers else None,
        ignored={
            name: "not used by the released code"
            for name in file
            if name.startswith("layer_norm_dinov3.")
        },
        preprocessing=images,
        task="TeacherFeatures" if teachers else None,
    )


def _teachers(file):
    """The sizes of the heads for the teachers' features."""
    teachers: dict = {}
    for name in _TEACHERS:
        if (weight := f"{name}_adapter.fc1.weight") in file:
            teachers[name] = {"dim": _spec.required(file, weight, 2)[0]}
    if "siglip2" in teachers and f"{_POOLING}probe" in file:
        width = _spec.required(file, f"{_POOLING}mlp.fc1.weight", 2)[0]
        teachers["siglip2"] |= {"num_heads": _POOLING_HEADS, "mlp_dim": width}
    return teachers


def _teacher_rules(teachers):
    rules: dict = {}
    for name, sizes in teachers.items():
        path, adapter = f"teacher_{name}", f"{name}_adapter."
        rules.update(_rules.linear(f"{path}/hidden", f"{adapter}fc1."))
        rules.update(_rules.norm(f"{path}/norm", f"{adapter}norm."))
        rules[f"{path}/output/kernel"] = _rules.Matrix(f"{adapter}fc2.weight")
        if "num_heads" in sizes:
            rules.update(_rules.pooler_rules(_POOLING, f"{path}/pooler"))
    return rules


def _moe_layers(file, num_layers):
    names = (f"layers.{i}.moe.router.gate.weight" for i in range(num_layers))
    return [i for i, name in enumerate(names) if name in file]


def _mlp_dim(file, num_layers):
    """H of the dense blocks, or of the experts where there is none."""
    for i in range(num_layers):
        if (name := f"layers.{i}.feed_forward.w1.weight") in file:
            return _spec.required(file, name, 2)[0]
    return _spec.required(file, "layers.0.moe.experts.w1", 3)[1]


def _experts(file, config, num_layers):
    layers = _moe_layers(file, num_layers)
    if not layers:
        return {}
    first = f"layers.{layers[0]}.moe."
    num_experts, mlp_dim, _ = _spec.required(file, f"{first}experts.w1", 3)
    moe = config.get("moe") or {}
    if moe.get("score_func", "sigmoid") != "sigmoid" or moe.get("score_before_experts"):
        raise unfit("sigmoid scores that weigh the experts' outputs", moe=moe)
    if "top_k" not in moe:
        raise unfit(
            f"moe.top_k in {_spec.CONFIG_NAME}, which the weights do not tell", moe=moe
        )
    shared, name = 0, f"{first}shared_experts.w1.weight"
    if name in file:
        shared = _spec.required(file, name, 2)[0] // mlp_dim
    router = {
        "name": "softmax_token_choice",
        "num_selected_experts": moe["top_k"],
        "gates": "sigmoid",
        "selection_bias_rate": moe.get("load_balance_coeff", 1e-3),
        "normalize_gates": "before" if moe.get("route_norm") else None,
        "route_scale": moe.get("route_scale", 1.0),
        "dropless": True,
    }
    return {
        "moe": {
            "moe_layers": layers,
            "num_experts": num_experts,
            "expert_mlp_dim": mlp_dim,
            "gated_experts": True,
            "expert_use_bias": False,
            "shared_experts": shared,
            "router": {k: v for k, v in router.items() if v is not None},
        }
    }


def _backbone_rules(arguments, has_norms):
    rules: dict = {
        "patch_embedding/kernel": _rules.Matrix(_PATCHES, inputs=3),
        "patch_embedding/bias": _rules.Filled(),
        "class_token/token": _rules.Direct("cls_token"),
        "register_tokens/tokens": _rules.Direct("storage_tokens"),
        "final_norm/scale": _rules.Direct("norm.weight"),
    }
    moe = arguments.get("moe") or {"moe_layers": ()}
    for i in range(arguments["num_layers"]):
        block, path = f"layers.{i}.", f"block_{i}"
        attention, own = f"{path}/attention", f"{block}attention."
        for name in ("query", "key", "value"):
            rules[f"{attention}/{name}/kernel"] = _rules.Matrix(
                f"{own}w{name[0]}.weight"
            )
        rules[f"{attention}/attention_output/kernel"] = _rules.Matrix(
            f"{own}wo.weight", inputs=2
        )
        rules[f"{attention}/sinks"] = _rules.Direct(f"{own}sinks")
        # One table for all blocks.
        rules[f"{attention}/rotary_embedding/frequencies"] = _rules.Direct(_TABLE)
        if has_norms:
            rules[f"{path}/mixer_norm/scale"] = _rules.Direct(
                f"{block}attention_norm.weight"
            )
            rules[f"{path}/feed_forward_norm/scale"] = _rules.Direct(
                f"{block}ffn_norm.weight"
            )
        if i not in moe["moe_layers"]:
            rules.update(_mlp_rules(f"{path}/mlp", f"{block}feed_forward."))
            continue
        experts, router = f"{block}moe.experts.", f"{path}/moe/router"
        for name, theirs in (("gate", "w1"), ("output", "w2"), ("hidden", "w3")):
            kernel = _ExpertKernel(f"{experts}{theirs}")
            rules[f"{path}/moe/experts/{name}_kernel"] = kernel
        rules[f"{router}/kernel"] = _rules.Matrix(f"{block}moe.router.gate.weight")
        rules[f"{router}/selection_bias"] = _rules.Direct(f"{block}moe.expert_bias")
        rules[f"{router}/expert_load"] = rules[f"{router}/num_passes"] = _rules.Filled()
        if moe["shared_experts"]:
            names = f"{path}/moe/shared_experts", f"{block}moe.shared_experts."
            rules.update(_mlp_rules(*names))
    return rules


def _mlp_rules(path, block):
    # w2(silu(w1 x) * w3 x).
    return {
        f"{path}/{name}/kernel": _rules.Matrix(f"{block}{theirs}.weight")
        for name, theirs in (("gate", "w1"), ("output", "w2"), ("hidden", "w3"))
    }
