"""Models as transformers' CLIP and SigLIP: configs and tensors."""

from typing import Any

from keras_moe.models.conversion.clip_image_names import (
    siglip_pooler_rules,
    transformers_image_rules,
)
from keras_moe.models.conversion.exported_images import (
    without_patch_bias,
)
from keras_moe.models.conversion.exported_towers import ExportedModel, ExportedTower
from keras_moe.models.conversion.image_range import Normalization
from keras_moe.models.conversion.inverse_rules import tensors_of
from keras_moe.models.conversion.transformers_text_names import (
    transformers_text_projection,
    transformers_text_rules,
)
from keras_moe.models.conversion.weight_rules import Filled, Matrix

_LARGEST = 2


def transformers_files(model: ExportedModel) -> tuple[dict, dict[str, Any]]:
    """The tensors and the JSON files of a model."""
    towers = model.towers
    is_clip = (
        towers["image"].config["class_token"]
        if "image" in towers
        else towers["text"].config["causal"]
    )
    tensors, configs, files = {}, {}, {}
    if "image" in towers:
        images, configs["vision"], normalization = _image(towers["image"], is_clip)
        tensors.update(images)
        side = configs["vision"]["image_size"]
        files["preprocessor_config.json"] = _preprocessor(
            model.preprocessor, side, normalization, is_clip
        )
    if "text" in towers:
        texts, configs["text"] = _text(towers["text"], is_clip)
        tensors.update(texts)
    if model.logits:
        tensors.update(_logits(model.logits, is_clip))
    files["config.json"] = {"dtype": "float32", **_config(configs, is_clip, towers)}
    return tensors, files


def _common(tower):
    config = tower.config
    return {
        "hidden_size": config["hidden_dim"],
        "intermediate_size": config["mlp_dim"],
        "num_hidden_layers": config["num_layers"],
        "num_attention_heads": config["num_heads"],
        "hidden_act": tower.activation,
        "layer_norm_eps": config["layer_norm_epsilon"],
    }


def _image(tower: ExportedTower, is_clip):
    kind = f"the image tower of transformers' {'CLIP' if is_clip else 'SigLIP'}"
    wanted = {
        "position_embedding": "learned",
        "query_key_norm": False,
        "final_norm": True,
        "embedding_norm": is_clip,
        "class_token": is_clip,
    }
    if tower.pooling is not None or not is_clip:
        wanted["image_pooling"] = "class_token" if is_clip else "map"
    tower.check(kind, **wanted)
    config = {
        "model_type": "clip_vision_model" if is_clip else "siglip_vision_model",
        **_common(tower),
        "image_size": tower.square("image_shape", kind),
        "patch_size": tower.square("patch_size", kind),
        "num_channels": tower.config["image_shape"][2],
    }
    root = "vision_model."
    if not is_clip:
        rules = transformers_image_rules(root, tower.config, has_bias=True)
        rules.update(siglip_pooler_rules(f"{root}head."))
        values = tower.values
        if "predictions/kernel" not in values:
            # A classifier alone has the identity that stands for no projection.
            del rules["predictions/kernel"], rules["predictions/bias"]
        return tensors_of(rules, values, kind), config, tower.images
    values, normalization = without_patch_bias(tower.values, True, tower.images)
    rules = transformers_image_rules(root, tower.config)
    del rules["patch_embedding/bias"]
    if tower.projection_dim is not None:
        config["projection_dim"] = tower.projection_dim
        rules["predictions/kernel"] = Matrix("visual_projection.weight")
        if "predictions/bias" in values:
            rules["predictions/bias"] = Filled()
    return tensors_of(rules, values, kind), config, normalization


def _text(tower: ExportedTower, is_clip):
    kind = f"the text tower of transformers' {'CLIP' if is_clip else 'SigLIP'}"
    config, root = tower.config, "text_model."
    wanted = {"causal": is_clip, "final_norm": True}
    if is_clip:
        wanted.update(pooling="end_of_text", projection_bias=False)
    else:
        wanted.update(pooling="last", mask_padding=False, projection_bias=True)
    tower.check(kind, **wanted)
    content = {
        "model_type": "clip_text_model" if is_clip else "siglip_text_model",
        **_common(tower),
        "vocab_size": config["vocabulary_size"],
        "max_position_embeddings": config["max_length"],
    }
    rules = transformers_text_rules(root, config["num_layers"])
    if config["projection_dim"] is not None:
        rules.update(transformers_text_projection(root, not is_clip))
        size = "projection_dim" if is_clip else "projection_size"
        content[size] = config["projection_dim"]
    if is_clip:
        end = config["end_of_text_id"]
        if end == _LARGEST:
            raise ValueError(
                f"Expected another end_of_text_id than {_LARGEST}, which stands for "
                f"the largest id in {kind}; received: end_of_text_id={end}"
            )
        content["eos_token_id"] = _LARGEST if end is None else end
    return tensors_of(rules, tower.values, kind), content


def _logits(logits, is_clip):
    if is_clip == ("bias" in logits):
        raise ValueError(
            "Expected a bias of the logits for transformers' SigLIP, and none for its "
            f"CLIP; received: class_token={is_clip} and the logits' {sorted(logits)}"
        )
    shape = () if is_clip else (1,)
    names = {"log_scale": "logit_scale", "bias": "logit_bias"}
    return {names[name]: value.reshape(shape) for name, value in logits.items()}


def _config(configs, is_clip, towers):
    family, title = ("clip", "CLIP") if is_clip else ("siglip", "Siglip")
    if len(configs) == 2:
        content = {
            "architectures": [f"{title}Model"],
            "model_type": family,
            "text_config": configs["text"],
            "vision_config": configs["vision"],
        }
        if is_clip:
            content["projection_dim"] = towers["image"].projection_dim
        return content
    ((name, config),) = configs.items()
    projected = "WithProjection" if "projection_dim" in config else ""
    return {"architectures": [f"{title}{name.title()}Model{projected}"], **config}


def _preprocessor(preprocessor, side, normalization: Normalization, is_clip):
    crop = getattr(preprocessor, "center_crop", 1.0 if is_clip else None)
    kind = getattr(preprocessor, "interpolation", "bicubic")
    content = {
        "image_processor_type": f"{'CLIP' if is_clip else 'Siglip'}ImageProcessor",
        "do_resize": True,
        "resample": {"bilinear": 2, "bicubic": 3}[kind],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(normalization.mean),
        "image_std": list(normalization.std),
    }
    if crop is None:
        return {**content, "size": {"height": side, "width": side}}
    return {
        **content,
        "size": {"shortest_edge": round(side / crop)},
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
    }
