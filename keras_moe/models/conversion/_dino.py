"""Converts transformers' DINOv2 and DINOv3, in both directions."""

from typing import Any

import numpy as np

from keras_moe._checks import unfit
from keras_moe.models.conversion import _rules, _spec

MODEL_TYPES = ("dinov2", "dinov2_with_registers", "dinov3_vit")
_DINOV2 = _rules.TowerNames(
    blocks="encoder.layer.",
    block=_rules.BlockNames(
        norms=("norm1.", "norm2."),
        mlp=("mlp.fc1.", "mlp.fc2."),
        queries=tuple(
            f"attention.attention.{name}." for name in ("query", "key", "value")
        ),
        output="attention.output.dense.",
        scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
    ),
    positions="embeddings.position_embeddings",
    final_norm="layernorm.",
    patches="embeddings.patch_embeddings.projection.",
    class_token="embeddings.cls_token",
    embedding_norm="embeddings.norm.",
    registers="embeddings.register_tokens",
)
# As on the hub, with both layers in one matrix, and as transformers 5 has them.
_DINOV2_GATED: tuple[dict, ...] = (
    {"mlp": ("mlp.weights_in.", "mlp.weights_out."), "gate": "mlp.weights_in."},
    {"mlp": ("mlp.up_proj.", "mlp.down_proj."), "gate": "mlp.gate_proj."},
)
# As in files of transformers 4. Those of 5 begin with "model.".
_DINOV3 = _rules.TowerNames(
    blocks="layer.",
    block=_rules.BlockNames(
        norms=("norm1.", "norm2."),
        mlp=("mlp.up_proj.", "mlp.down_proj."),
        queries=tuple(f"attention.{name}_proj." for name in "qkv"),
        output="attention.o_proj.",
        scales=_DINOV2.block.scales,
        gate="mlp.gate_proj.",
    ),
    positions="",
    final_norm="norm.",
    patches="embeddings.patch_embeddings.",
    class_token="embeddings.cls_token",
    registers="embeddings.register_tokens",
)
_HEAD = "of a head on the class token and the mean of the patches"
_MASK_TOKEN = "embeddings.mask_token"
_IMAGES = _rules.Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def dino_spec(
    file, config: dict, overrides: dict, tower: str | None = None
) -> _spec.ConversionSpec | None:
    scale = f"{_DINOV2.blocks}0.{_DINOV2.block.scales[0]}"
    root = next((x for x in ("", "dinov2.") if f"{x}{scale}" in file), None)
    preprocessor = config.get("preprocessor", {})
    activation, epsilon = config.get("hidden_act", "gelu"), 1e-6
    ignored = {f"{root or ''}{_MASK_TOKEN}": "of the pretraining"}
    sizes: dict = {"axes": 3}
    if root is not None:
        names = _DINOV2.under(root)
        for gated in _DINOV2_GATED:
            if f"{names.blocks}0.{gated['gate']}weight" in file:
                names, activation = _with_mlp(names, gated), "silu"
        ignored |= dict.fromkeys(("classifier.weight", "classifier.bias"), _HEAD)
    elif f"{_DINOV3.patches}weight" in file and _DINOV3.registers in file:
        names, epsilon = _DINOV3, 1e-5
        if f"layer.0.{names.block.norms[0]}weight" not in file:
            names = names._replace(blocks="model.layer.")
        side = _spec.edge(preprocessor.get("size")) or config.get("image_size", 224)
        sizes = {"image_size": side}
    else:
        return None
    arguments = _spec.image_tower_arguments(
        file,
        names,
        overrides,
        **sizes,
        num_heads=config.get("num_attention_heads"),
        activation=activation,
        epsilon=config.get("layer_norm_eps", epsilon),
        layer_scale=config.get("layerscale_value", 1.0),
    )
    _spec.check_sizes(file, config, arguments)
    size = None
    if root is None:
        theta = (config.get("rope_parameters") or config).get("rope_theta", 100.0)
        arguments.update(position_embedding="rotary_2d", rotary_base=theta)
    else:
        size = _spec.edge(preprocessor.get("crop_size"))
        if "register_tokens" not in arguments:
            # transformers resizes those with registers with antialiasing.
            arguments["position_interpolation"] = "torch_bicubic"
    images = _spec.normalization(arguments["image_shape"][2], preprocessor, _IMAGES)
    rules = _rules.image_tower_rules(names, arguments, images, axes=0)
    settings, notes = _spec.preprocessor_settings(preprocessor, crops=root is not None)
    name = "DINOv3" if root is None else "DINOv2"
    spec = _spec.ConversionSpec(
        _spec.TRANSFORMERS, name, "ViTBackbone", arguments, rules
    )
    spec.ignored, spec.notes, spec.preprocessing = ignored, notes, settings
    if size and size % arguments["patch_size"] == 0:
        spec.image_size = size
    return spec


def _with_mlp(names, mlp):
    return names._replace(block=names.block._replace(**mlp))


# Export


def dino_files(model: Any) -> tuple[dict, dict]:
    tower = model.towers["image"]
    config, registers = tower.config, tower.config["register_tokens"]
    is_third = config["position_embedding"] == "rotary_2d"
    kind = f"transformers' DINOv{3 if is_third else 2}"
    tower.check(
        kind,
        position_embedding="rotary_2d" if is_third else "learned",
        register_tokens=registers,
        key_bias=config["key_bias"] if is_third else True,
        class_token=True,
        image_pooling=None,
    )
    if is_third and not (registers and config["use_bias"]):
        raise unfit(
            f"registers and biases for {kind}",
            register_tokens=registers,
            use_bias=config["use_bias"],
        )
    content = {
        "dtype": "float32",
        **_spec.image_config(tower, kind),
        "layerscale_value": config["layer_scale_initial_value"],
    }
    if registers:
        content["num_register_tokens"] = registers
    if is_third:
        names = _DINOV3
        content.update(
            architectures=["DINOv3ViTModel"],
            model_type="dinov3_vit",
            intermediate_size=config["mlp_dim"],
            rope_theta=config["rotary_base"],
            use_gated_mlp=config["gated_mlp"],
            key_bias=config["key_bias"],
        )
    else:
        names = _DINOV2
        content.update(
            architectures=["Dinov2WithRegistersModel" if registers else "Dinov2Model"],
            model_type="dinov2_with_registers" if registers else "dinov2",
            mlp_ratio=_mlp_ratio(config, kind),
            use_mask_token=False,
        )
        if config["gated_mlp"]:
            names = _with_mlp(names, _DINOV2_GATED[0])
            content["use_swiglu_ffn"] = True
    rules = _rules.image_tower_rules(names, config, axes=0)
    tensors = _rules.tensors_of(rules, tower.values, kind)
    if registers:
        # Of the pretraining; transformers' classes always have it.
        shape = (1,) * (1 + is_third)
        tensors[_MASK_TOKEN] = np.zeros((*shape, config["hidden_dim"]), "float32")
    images = _spec.preprocessor_config(
        model.preprocessor, content["image_size"], tower.images, "Bit", crop=1.0
    )
    return tensors, {_spec.CONFIG_NAME: content, _spec.PREPROCESSOR_NAME: images}


def _mlp_ratio(config, kind):
    """The `mlp_ratio` of a width, of which SwiGLU takes two thirds, in eights."""
    width, dim = config["mlp_dim"], config["hidden_dim"]
    for ratio in range(1, 2 + 2 * width // dim):
        hidden = ratio * dim
        if config["gated_mlp"]:
            hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        if hidden == width:
            return ratio
    raise ValueError(
        f"Expected an mlp_dim that is a whole multiple of hidden_dim={dim} for {kind}, "
        f"or two thirds of one with gated_mlp=True; received: mlp_dim={width}"
    )
