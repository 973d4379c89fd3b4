"""Converts MoE++'s released language models, in both directions.

Axes: D hidden, H mlp, E experts, J constant experts. The release orders experts FFN,
constant, copy, zero; here they are FFN, zero, copy, constant.
"""

import re
from typing import Any

import numpy as np

from keras_moe._checks import unfit
from keras_moe.models.conversion import _rules, _spec

MODEL_TYPES = ("MoE++",)
_LAYERS = "model.layers."
_GATE, _EXPERTS = "mlp.moe.gate.", "mlp.moe.experts.experts."
# Constants of the released code: K, and one zero and one copy expert.
_SELECTED, _ZERO, _COPY, _CONSTANT = 2, 1, 1, 2
_BUFFER = "rotary_emb.inv_freq"
_NORMS = {
    "mixer_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
}


def moepp_spec(
    file, config: dict, overrides: dict, tower: str | None = None
) -> _spec.ConversionSpec | None:
    first = f"{_LAYERS}0."
    if f"{first}{_GATE}gate_map.weight" not in file:
        return None
    vocabulary_size, dim = _spec.required(file, "model.embed_tokens.weight", 2)
    total = _spec.required(file, f"{first}{_GATE}gate_map.weight", 2)[0]
    _, mlp_dim = _spec.required(file, f"{first}{_EXPERTS}0.down_proj.weight", 2)
    pattern = re.compile(rf"{re.escape(first + _EXPERTS)}\d+\.constant")
    constants = sum(bool(pattern.fullmatch(name)) for name in file)
    sizes = {
        "hidden_size": dim,
        "num_hidden_layers": _spec.numbered(file, _LAYERS),
        "vocab_size": vocabulary_size,
        "intermediate_size": mlp_dim,
        "num_experts": [total],
        "moe_expert_interval": 1,
        "tie_word_embeddings": "lm_head.weight" not in file,
    }
    if config.get("tie_word_embeddings"):
        # A tied matrix may be in the file twice.
        sizes["tie_word_embeddings"] = True
    _spec.agree(file, config, _spec.CONFIG_NAME, **sizes)
    if config.get("hidden_act", "silu") != "silu":
        expected = f"hidden_act='silu' in {_spec.CONFIG_NAME}, as in the release"
        raise unfit(expected, hidden_act=config["hidden_act"])
    key_size = _spec.required(file, f"{first}self_attn.k_proj.weight", 2)[0]
    heads = config.get("num_attention_heads") or overrides.get("num_heads")
    heads = heads or _spec.usual_heads(dim, file.path)
    arguments = {
        "vocabulary_size": vocabulary_size,
        "max_length": config.get("max_position_embeddings", 2048),
        "hidden_dim": dim,
        "num_layers": sizes["num_hidden_layers"],
        "num_heads": heads,
        "num_key_value_heads": key_size * heads // dim,
        "mlp_dim": sizes["intermediate_size"],
        "layer_norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "tied_embeddings": sizes["tie_word_embeddings"],
        "positions": "rotary",
        "norm": "rms",
        "use_bias": False,
        "activation": "silu",
        **_rope(config),
        "moe": _experts(file, config, total, constants),
    }
    left = {name: "a table of positions" for name in file if name.endswith(_BUFFER)}
    if arguments["tied_embeddings"]:
        left["lm_head.weight"] = "tied to the embeddings"
    library = _spec.Library("SkyworkAI", "as its model card says")
    rules = moepp_rules(arguments)
    return _spec.ConversionSpec(
        library, "MoE++", "DecoderBackbone", arguments, rules, {}, left
    )


def _rope(config):
    theta, scaling = config.get("rope_theta", 10000.0), config.get("rope_scaling") or {}
    kind, factor = scaling.get("type"), scaling.get("factor", 1.0)
    kind = scaling.get("rope_type", kind)
    if kind not in ("linear", "ntk") and scaling not in ({}, {"rope_type": "default"}):
        raise ValueError(
            "Expected rope_scaling of type 'linear' or 'ntk', which fits cached keys, "
            f"or none; received: rope_scaling={scaling}"
        )
    if kind == "ntk":
        theta, factor = theta * factor, 1.0
    return {"rope_theta": float(theta), "rope_scaling": float(factor)}


def _experts(file, config, total, constants):
    is_mixtral = config.get("moe_use_mixtral_gating", False)
    is_scaled = not (is_mixtral or config.get("moe_feature_no_mul_topk", False))
    router = {
        "name": "softmax_token_choice",
        "num_selected_experts": _SELECTED,
        # Gates are normalised after the zero expert's share is removed, or kept.
        "normalize_gates": "before",
        "zero_gates": "keep" if is_mixtral else "remove",
    }
    hidden = f"{_LAYERS}0.{_GATE}wg.0.weight"
    if hidden in file:
        router["gate_hidden_dim"] = _spec.required(file, hidden, 2)[0]
    if config.get("moe_use_logits_norm", False):
        router["logits_norm_std"] = float(config.get("moe_gate_norm_std", 1.0))
    return {
        "moe_layers": "every_1",
        "num_experts": total - _ZERO - _COPY - constants,
        "zero_experts": _ZERO,
        "copy_experts": _COPY,
        "constant_experts": constants,
        "gating_residual": "every_block",
        "gated_experts": True,
        "expert_use_bias": False,
        "expert_activation": "silu",
        "input_scale": float(_SELECTED) if is_scaled else 1.0,
        "router": router,
    }


def moepp_rules(arguments: dict) -> dict:
    """Rules of all weights; `arguments` are those of the backbone."""
    moe = arguments["moe"]
    ffn, constants = moe["num_experts"], moe["constant_experts"]
    first = ffn + constants
    order = (*range(ffn), first + 1, first, *range(ffn, first))
    router = moe["router"] if isinstance(moe["router"], dict) else {}
    rules: dict = {
        "token_embedding/embeddings": _rules.Direct("model.embed_tokens.weight"),
        "final_norm/scale": _rules.Direct("model.norm.weight"),
    }
    if not arguments["tied_embeddings"]:
        rules["token_embedding/reverse_embeddings"] = _rules.Matrix("lm_head.weight")
    for i in range(arguments["num_layers"]):
        block, path = f"{_LAYERS}{i}.", f"block_{i}"
        gate, moe_path = f"{block}{_GATE}", f"{path}/moe"
        attention, own = f"{path}/attention", f"{block}self_attn."
        for name, theirs in _NORMS.items():
            rules[f"{path}/{name}/scale"] = _rules.Direct(f"{block}{theirs}.weight")
        for name in ("query", "key", "value"):
            rules[f"{attention}/{name}/kernel"] = _rules.Matrix(
                f"{own}{name[0]}_proj.weight"
            )
        output = _rules.Matrix(f"{own}o_proj.weight", inputs=2)
        rules[f"{attention}/attention_output/kernel"] = output
        kernel = "wg.weight"
        if router.get("gate_hidden_dim"):
            kernel = "wg.2.weight"
            rules[f"{moe_path}/router/hidden_kernel"] = _rules.Matrix(
                f"{gate}wg.0.weight"
            )
        router_kernel = _rules.ExpertMatrix(f"{gate}{kernel}", order=order)
        residual = _rules.ExpertMatrix(
            f"{gate}gate_map.weight", order=order, square=True
        )
        rules[f"{moe_path}/router/kernel"] = router_kernel
        rules[f"{moe_path}/router/residual_kernel"] = residual

        def each(name, experts, block=block, **part):
            names = (f"{block}{_EXPERTS}{expert}.{name}" for expert in experts)
            return _rules.Stacked(tuple(names), **part)

        experts, constant = range(ffn), range(ffn, first)
        # One matrix holds the gate and the hidden layer.
        for part, name in enumerate(("gate", "hidden")):
            rules[f"{moe_path}/experts/{name}_kernel"] = each(
                "up_proj.weight", experts, part=part, parts=2
            )
        rules[f"{moe_path}/experts/output_kernel"] = each("down_proj.weight", experts)
        if constants:
            in_place = f"{moe_path}/zero_computation_experts"
            rules[f"{in_place}/kernel"] = each("wg.weight", constant)
            rules[f"{in_place}/vector"] = each("constant", constant)
    return rules


# Export


def moepp_files(model: Any) -> tuple[dict[str, np.ndarray], dict]:
    tower = model.towers["text"]
    config, kind = tower.config, "MoE++'s released code"
    moe = config["moe"] or {}
    router = moe.get("router")
    router = router if isinstance(router, dict) else {}
    received = {**config, **moe, **router}
    zero_gates = received.get("zero_gates", "keep")
    wanted = {
        "norm": "rms",
        "positions": "rotary",
        "head_dim": None,
        "attention_sinks": False,
        "use_bias": False,
        "query_key_norm": False,
        "layer_scale_initial_value": None,
        "zero_experts": _ZERO,
        "copy_experts": _COPY,
        "constant_experts": _CONSTANT,
        "gating_residual": "every_block",
        "gated_experts": True,
        "expert_use_bias": False,
        "normalize_gates": "before",
        "num_selected_experts": _SELECTED,
        "pruning": None,
    }
    if zero_gates == "keep":
        # Mixtral's gates, of which the code does not scale the input.
        wanted["input_scale"] = 1.0
    received.setdefault("num_selected_experts", _SELECTED)
    received["activation"] = received.get("expert_activation") or config["activation"]
    for name, value in {**wanted, "activation": "silu"}.items():
        if received.get(name) != value:
            raise unfit(
                f"{name}={value!r} for {kind}", f"{name}={received.get(name)!r}"
            )
    if received["input_scale"] not in (1.0, _SELECTED):
        expected = f"input_scale=1.0 or {_SELECTED} for {kind}"
        raise unfit(expected, input_scale=received["input_scale"])
    total = moe["num_experts"] + _ZERO + _COPY + _CONSTANT
    hidden = router.get("gate_hidden_dim")
    if hidden not in (None, 8 * total):
        expected = f"gate_hidden_dim=None or 8 * {total} experts for {kind}"
        raise unfit(expected, gate_hidden_dim=hidden)
    content = {
        "architectures": ["MoeForCausalLM"],
        "model_type": MODEL_TYPES[0],
        "hidden_act": "silu",
        "hidden_size": config["hidden_dim"],
        "intermediate_size": moe["expert_mlp_dim"] or config["mlp_dim"],
        "max_position_embeddings": config["max_length"],
        "num_attention_heads": config["num_heads"],
        "num_key_value_heads": config["num_key_value_heads"] or config["num_heads"],
        "num_hidden_layers": config["num_layers"],
        "num_experts": [total],
        "moe_expert_interval": 1,
        "moe_2layer_gate": hidden is not None,
        "moe_use_mixtral_gating": zero_gates == "keep",
        "moe_feature_no_mul_topk": received["input_scale"] == 1.0,
        "moe_use_logits_norm": router.get("logits_norm_std") is not None,
        "moe_gate_norm_std": router.get("logits_norm_std") or 1.0,
        "rms_norm_eps": config["layer_norm_epsilon"],
        "rope_theta": config["rope_theta"],
        "rope_scaling": None,
        "tie_word_embeddings": config["tied_embeddings"],
        "vocab_size": config["vocabulary_size"],
        "torch_dtype": "float32",
    }
    if config["rope_scaling"] != 1:
        content["rope_scaling"] = {"type": "linear", "factor": config["rope_scaling"]}
    return _rules.tensors_of(moepp_rules(config), tower.values, kind), {
        _spec.CONFIG_NAME: content
    }
