"""Converts transformers' DINOv2, in both directions."""

from typing import Any

from keras_moe.models.conversion._configs import normalization
from keras_moe.models.conversion._rules import (
    BlockNames,
    Normalization,
    TowerNames,
    image_tower_rules,
    tensors_of,
)
from keras_moe.models.conversion._spec import ConversionSpec, image_tower_arguments
from keras_moe.models.conversion._transformers import (
    CONFIG_NAME,
    check_sizes,
    exported_preprocessor,
    image_config,
    preprocessing,
)

MODEL_TYPES = ("dinov2",)
_NAMES = TowerNames(
    blocks="encoder.layer.",
    block=BlockNames(
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
)
_SCALE = "encoder.layer.0.layer_scale1.lambda1"
_HEAD = "of a head on the class token and the mean of the patches"
_IMAGES = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def dinov2_spec(file, config: dict, overrides: dict) -> ConversionSpec | None:
    """Returns the spec of a DINOv2 checkpoint; None for other names."""
    root = next((x for x in ("", "dinov2.") if f"{x}{_SCALE}" in file), None)
    if root is None:
        return None
    names = _NAMES.under(root)
    arguments = image_tower_arguments(
        file,
        names,
        overrides,
        axes=3,
        num_heads=config.get("num_attention_heads"),
        activation=config.get("hidden_act", "gelu"),
        epsilon=config.get("layer_norm_eps", 1e-6),
        layer_scale=config.get("layerscale_value", 1.0),
    )
    check_sizes(file, config, arguments)
    preprocessor = config.get("preprocessor", {})
    images = normalization(arguments["image_shape"][2], preprocessor, _IMAGES)
    bias = f"{names.patches}bias"
    image_arguments, notes = preprocessing(preprocessor, crops=True)
    return ConversionSpec(
        "DINOv2 (transformers)",
        "ViTBackbone",
        arguments,
        image_tower_rules(names, arguments, images, bias, axes=0),
        ignored={
            f"{root}embeddings.mask_token": "of the pretraining",
            **dict.fromkeys(("classifier.weight", "classifier.bias"), _HEAD),
        },
        notes=notes,
        preprocessing=image_arguments,
    )


def dinov2_files(model: Any) -> tuple[dict, dict[str, Any]]:
    """Returns the tensors and JSON files of an exported image tower."""
    kind = "transformers' DINOv2"
    tower = model.towers["image"]
    config = tower.config
    tower.check(
        kind,
        position_embedding="learned",
        query_key_norm=False,
        final_norm=True,
        embedding_norm=False,
        class_token=True,
        image_pooling=None,
    )
    if config["mlp_dim"] % config["hidden_dim"]:
        raise ValueError(
            f"Expected an mlp_dim that hidden_dim={config['hidden_dim']} divides for "
            f"{kind}; received: mlp_dim={config['mlp_dim']}"
        )
    content = {
        "architectures": ["Dinov2Model"],
        "model_type": "dinov2",
        "dtype": "float32",
        **image_config(tower, kind),
        "mlp_ratio": config["mlp_dim"] // config["hidden_dim"],
        "layerscale_value": config["layer_scale_initial_value"],
        "use_mask_token": False,
    }
    rules = image_tower_rules(_NAMES, config, bias=f"{_NAMES.patches}bias", axes=0)
    images = exported_preprocessor(
        model.preprocessor, content["image_size"], tower.images, "Bit", crop=1.0
    )
    files = {CONFIG_NAME: content, "preprocessor_config.json": images}
    return tensors_of(rules, tower.values, kind), files
