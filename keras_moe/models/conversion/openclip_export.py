"""Models as OpenCLIP's: configs and tensors."""

from typing import Any

from keras_moe.models.conversion.clip_image_names import openclip_image_rules
from keras_moe.models.conversion.clip_parts import OPENCLIP_CONFIG
from keras_moe.models.conversion.exported_images import without_patch_bias
from keras_moe.models.conversion.exported_towers import ExportedModel, ExportedTower
from keras_moe.models.conversion.inverse_rules import tensors_of
from keras_moe.models.conversion.openclip_text_names import openclip_text_rules
from keras_moe.models.conversion.weight_rules import Direct, Filled, linear

_IMAGE, _TEXT = "the image tower of OpenCLIP", "the text tower of OpenCLIP"
# PyTorch's own, which OpenCLIP's image towers keep.
_EPSILON = 1e-5


def openclip_files(model: ExportedModel) -> tuple[dict, dict[str, Any]]:
    """The tensors and the JSON files of a model."""
    if len(model.towers) < 2:
        raise ValueError(
            "Expected a CLIPBackbone, since OpenCLIP loads both towers alone; "
            f"received: the {next(iter(model.towers))} tower. 'transformers' holds it."
        )
    image, text = model.towers["image"], model.towers["text"]
    images, vision_cfg, normalization = _image(image)
    texts, text_cfg = _text(text)
    config = {
        "embed_dim": image.projection_dim,
        "vision_cfg": vision_cfg,
        "text_cfg": text_cfg,
    }
    activations = image.config["activation"], text.config["activation"]
    if "quick_gelu" in activations:
        if len(set(activations)) > 1:
            raise ValueError(
                "Expected activation='quick_gelu' of both towers or of none for "
                f"OpenCLIP; received: {activations[0]!r} and {activations[1]!r}"
            )
        config["quick_gelu"] = True
    elif activations[1] == "gelu_tanh":
        text_cfg["act_kwargs"] = {"approximate": "tanh"}
    tensors = {**images, **texts, "logit_scale": model.logits["log_scale"]}
    if "bias" in model.logits:
        tensors["logit_bias"] = model.logits["bias"]
        config["init_logit_bias"] = float(model.logits["bias"])
    preprocessor = model.preprocessor
    squashes = preprocessor is not None and preprocessor.center_crop is None
    preprocess_cfg = {
        "mean": list(normalization.mean),
        "std": list(normalization.std),
        "interpolation": getattr(preprocessor, "interpolation", "bicubic"),
        "resize_mode": "squash" if squashes else "shortest",
    }
    files = {OPENCLIP_CONFIG: {"model_cfg": config, "preprocess_cfg": preprocess_cfg}}
    return tensors, files


def _image(tower: ExportedTower):
    config = tower.config
    tower.check(
        _IMAGE,
        position_embedding="learned",
        query_key_norm=False,
        final_norm=True,
        embedding_norm=True,
        class_token=True,
        image_pooling="class_token",
        layer_norm_epsilon=_EPSILON,
    )
    if config["activation"] == "gelu_tanh" or tower.projection_dim is None:
        raise ValueError(
            f"Expected activation 'gelu' or 'quick_gelu' and a projection for "
            f"{_IMAGE}; received: activation={config['activation']!r}, "
            f"projection_dim={tower.projection_dim}"
        )
    width = config["hidden_dim"]
    content = {
        "image_size": tower.square("image_shape", _IMAGE),
        "patch_size": tower.square("patch_size", _IMAGE),
        "width": width,
        "layers": config["num_layers"],
        "head_width": width // config["num_heads"],
        "mlp_ratio": _ratio(config["mlp_dim"], width),
    }
    if config["image_shape"][2] != 3:
        raise ValueError(
            f"Expected images of 3 channels for {_IMAGE}; received: "
            f"image_shape={config['image_shape']}"
        )
    values, normalization = without_patch_bias(tower.values, True, tower.images)
    rules = openclip_image_rules(config["num_layers"])
    del rules["patch_embedding/bias"]
    rules["predictions/kernel"] = Direct("visual.proj")
    if "predictions/bias" in values:
        rules["predictions/bias"] = Filled()
    return tensors_of(rules, values, _IMAGE), content, normalization


def _text(tower: ExportedTower):
    config = tower.config
    tower.check(_TEXT, final_norm=True)
    pooling, end = config["pooling"], config["end_of_text_id"]
    if pooling not in ("end_of_text", "first", "last"):
        raise ValueError(
            "Expected pooling of 'end_of_text', 'first' or 'last' for "
            f"{_TEXT}; received: pooling={pooling!r}"
        )
    if config["mask_padding"] and (pooling == "last" or not config["causal"]):
        raise ValueError(
            f"Expected mask_padding=False for {_TEXT}, which attends to padding; "
            f"received: mask_padding=True, causal={config['causal']}, "
            f"pooling={pooling!r}"
        )
    content = {
        "context_length": config["max_length"],
        "vocab_size": config["vocabulary_size"],
        "width": config["hidden_dim"],
        "heads": config["num_heads"],
        "layers": config["num_layers"],
        "mlp_ratio": _ratio(config["mlp_dim"], config["hidden_dim"]),
    }
    if not config["causal"]:
        content["no_causal_mask"] = True
    if pooling != "end_of_text":
        content["pool_type"] = pooling
    elif end is not None:
        content.update(pool_type="eos", eos_id=end)
    if config["layer_norm_epsilon"] != _EPSILON:
        content["norm_kwargs"] = {"eps": config["layer_norm_epsilon"]}
    rules = openclip_text_rules("", config["num_layers"])
    if config["projection_bias"]:
        content["proj_bias"] = True
        rules.update(linear("projection", "text_projection."))
    elif config["projection_dim"] is not None:
        rules["projection/kernel"] = Direct("text_projection")
    else:
        content["proj_type"] = "none"
    return tensors_of(rules, tower.values, _TEXT), content


def _ratio(mlp_dim, width):
    """The ratio of which OpenCLIP takes the integer part of its product."""
    ratio = mlp_dim / width
    # Rounding may lose the last one.
    return ratio if int(width * ratio) == mlp_dim else (mlp_dim + 0.5) / width
