"""Converts transformers' CLIP and SigLIP, in both directions."""

from typing import Any

from keras_moe._checks import unfit
from keras_moe.models.conversion import _rules, _spec
from keras_moe.models.conversion._dino import dino_files
from keras_moe.models.preprocessing.tokenizer import GEMMA_FILES, byte_pair_files

MODEL_TYPES = tuple(
    f"{model}{tower}"
    for model in ("clip", "siglip", "siglip2")
    for tower in ("", "_vision_model", "_text_model")
)
# Defaults that configs omit.
_CLIP_TEXT = {
    "num_attention_heads": 8,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
}
_SIGLIP_TEXT = {
    "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
# The id in OpenAI's releases, which means the largest id of each text.
_LARGEST = 2
_BLOCK = _rules.BlockNames(
    norms=("layer_norm1.", "layer_norm2."),
    mlp=("mlp.fc1.", "mlp.fc2."),
    queries=tuple(f"self_attn.{name}_proj." for name in "qkv"),
    output="self_attn.out_proj.",
)
_IMAGE = _rules.TowerNames(
    blocks="encoder.layers.",
    block=_BLOCK,
    positions="embeddings.position_embedding.weight",
    final_norm="post_layernorm.",
    patches="embeddings.patch_embedding.",
    class_token="embeddings.class_embedding",
    # Misspelt in the release.
    embedding_norm="pre_layrnorm.",
)
_TEXT = _rules.TowerNames(
    blocks="encoder.layers.",
    block=_BLOCK,
    positions="embeddings.position_embedding.weight",
    final_norm="final_layer_norm.",
    tokens="embeddings.token_embedding.weight",
)
_IMAGE_ROOT, _TEXT_ROOT = "vision_model.", "text_model."


def transformers_spec(
    file, config: dict, overrides: dict, tower: str | None = None
) -> _spec.ConversionSpec | None:
    makers = {"image": _image_spec, "text": _text_spec}
    makers = {k: make for k, make in makers.items() if _root(file, k) is not None}
    return _spec.towers_spec(file, config, overrides, tower, makers)


def _root(file, tower):
    """Returns the name prefix of a tower, "" for a single tower; None without it."""
    root, name = {
        "image": (_IMAGE_ROOT, f"{_IMAGE.patches}weight"),
        "text": (_TEXT_ROOT, _TEXT.tokens),
    }[tower]
    return next((start for start in (root, "") if f"{start}{name}" in file), None)


def _image_spec(file, config, overrides):
    root = _root(file, "image") or ""
    names = _IMAGE.under(root)
    kernel = f"{names.patches}weight"
    is_flat = len(file[kernel].shape) == 2
    vision = config.get("vision_config") or config
    is_clip = names.class_token in file
    activation = vision.get("hidden_act")
    if activation is None and config.keys() - {"preprocessor"}:
        activation = "quick_gelu" if is_clip else "gelu_pytorch_tanh"
    arguments = _spec.image_tower_arguments(
        file,
        names,
        overrides,
        num_heads=vision.get("num_attention_heads"),
        activation=activation,
        epsilon=vision.get("layer_norm_eps", 1e-5 if is_clip else 1e-6),
        # A matrix does not tell the size of its patches.
        patch_size=vision.get("patch_size", 16) if is_flat else None,
    )
    _spec.check_sizes(file, vision, arguments)
    preprocessor = config.get("preprocessor", {})
    images = _spec.normalization(
        arguments["image_shape"][2],
        preprocessor,
        _spec.CLIP_IMAGES if is_clip else None,
    )
    rules = _rules.image_tower_rules(names, arguments, images, file)
    task = None
    image_arguments, notes = _spec.preprocessor_settings(preprocessor, crops=is_clip)
    if is_flat:
        if images is not None:
            raise unfit("mean and std of 0.5 for patches", **images._asdict())
        rules["patch_embedding/kernel"] = _rules.Matrix(kernel, inputs=3)
        _spec.check_patch_size(overrides, arguments["patch_size"])
        most = preprocessor.get("max_num_patches", vision.get("num_patches", 256))
        arguments.update(max_patches=most, position_interpolation="antialiased")
        image_arguments, notes = _spec.interpolation(preprocessor.get("resample", 2))
        image_arguments.update(max_patches=most, patch_size=arguments["patch_size"])
    if "visual_projection.weight" in file:
        rules["predictions/kernel"] = _rules.Matrix("visual_projection.weight")
        rules["predictions/bias"] = _rules.Filled()
        size = _spec.required(file, "visual_projection.weight", 2)[0]
        task = {"num_classes": size, "pooling": "class_token"}
    elif f"{root}head.probe" in file:
        rules.update(
            {**_rules.pooler_rules(f"{root}head."), **_rules.without_projection()}
        )
        task = {"num_classes": arguments["hidden_dim"], "pooling": "map"}
    left = _spec.ignored(
        file, text=("text_model.", "text_projection."), logits=_spec.LOGIT_NAMES
    )
    left[f"{root}embeddings.position_ids"] = _spec.POSITION_IDS
    name = "CLIP" if is_clip else "SigLIP"
    spec = _spec.ConversionSpec(
        _spec.TRANSFORMERS, name, "ViTBackbone", arguments, rules, task
    )
    spec.ignored, spec.notes, spec.preprocessing = left, notes, image_arguments
    return spec


# Text towers


def _text_spec(file, config, overrides):
    root = _root(file, "text") or ""
    names = _TEXT.under(root)
    is_siglip = f"{root}head.weight" in file
    text = config.get("text_config")
    if text is None:
        # An image tower's config has no text entries.
        text = {} if "vision_config" in config else config
    defaults = _SIGLIP_TEXT if is_siglip else _CLIP_TEXT
    settings = {**defaults, **text} if config.keys() - {"preprocessor"} else {}
    arguments = _spec.text_tower_arguments(
        file,
        names,
        overrides,
        num_heads=settings.get("num_attention_heads"),
        activation=settings.get("hidden_act"),
        epsilon=settings.get("layer_norm_eps", defaults["layer_norm_eps"]),
    )
    _spec.check_sizes(file, text, arguments)
    rules, notes = _rules.text_tower_rules(names, arguments), ()
    projection = f"{root}head.weight" if is_siglip else "text_projection.weight"
    if projection in file:
        arguments["projection_dim"] = _spec.required(file, projection, 2)[0]
        rules.update(_text_projection(root, is_siglip))
    if is_siglip:
        arguments.update(
            causal=False, pooling="last", mask_padding=False, projection_bias=True
        )
    else:
        arguments["end_of_text_id"], notes = _end_of_text(
            settings, arguments["vocabulary_size"], file, overrides
        )
    left = _spec.ignored(
        file, image=("vision_model.", "visual_projection."), logits=_spec.LOGIT_NAMES
    )
    left[f"{root}embeddings.position_ids"] = _spec.POSITION_IDS
    name = "SigLIP" if is_siglip else "CLIP"
    spec = _spec.ConversionSpec(
        _spec.TRANSFORMERS, name, "TextBackbone", arguments, rules
    )
    spec.ignored, spec.notes = left, notes
    return spec


def _text_projection(root: str, is_siglip: bool) -> dict:
    if is_siglip:
        return _rules.linear("projection", f"{root}head.")
    return {"projection/kernel": _rules.Matrix("text_projection.weight")}


def _end_of_text(settings, vocabulary_size, file, overrides):
    """Returns the id at which CLIP pools (None for the largest), and notes."""
    if "end_of_text_id" in overrides:
        return overrides["end_of_text_id"], ()
    end = settings.get("eos_token_id", _LARGEST)
    if end == _LARGEST:
        if settings:
            return None, ()
        return None, ("assumed: pooling at the largest id (no config says otherwise)",)
    if end is None or end >= vocabulary_size:
        raise ValueError(
            f"Expected eos_token_id below vocab_size={vocabulary_size} in {file.path}, "
            f"or end_of_text_id=... (None: the largest); received: eos_token_id={end}"
        )
    return end, ()


# Export


def transformers_files(model: Any) -> tuple[dict, dict]:
    image, text = model.towers.get("image"), model.towers.get("text")
    own = (image or text).config
    if text is None and own["layer_scale_initial_value"]:
        return dino_files(model)
    is_clip = own["causal" if image is None else "class_token"]
    tensors, configs, files = {}, {}, {}
    if image is not None:
        tensors, configs["vision"], image_range = _exported_image(image, is_clip)
        most = image.config["max_patches"]
        family = "Siglip" if most is None else "Siglip2"
        images = _spec.preprocessor_config(
            model.preprocessor,
            configs["vision"].get("image_size"),
            image_range,
            "CLIP" if is_clip else family,
            crop=1.0 if is_clip else None,
        )
        if most is not None and not is_clip:
            own = {"patch_size": configs["vision"]["patch_size"]}
            images.update(max_num_patches=most, **own)
        files[_spec.PREPROCESSOR_NAME] = images
    if text is not None:
        texts, configs["text"] = _exported_text(text, is_clip)
        tensors.update(texts)
        if is_clip:
            configs["text"]["bos_token_id"] = getattr(model.tokenizer, "start_id", None)
            files.update(byte_pair_files(model.tokenizer, is_clip))
        elif model.tokenizer is not None:
            files.update(_exported_gemma(model.tokenizer))
    if model.logits:
        tensors.update(_exported_logits(model.logits, is_clip))
    config = _exported_config(configs, is_clip)
    files[_spec.CONFIG_NAME] = {"dtype": "float32", **config}
    return tensors, files


def _exported_image(tower, is_clip):
    kind = f"the image tower of transformers' {'CLIP' if is_clip else 'SigLIP'}"
    wanted = {"image_pooling": "class_token" if is_clip else "map"}
    if is_clip and tower.pooling is None:
        wanted = {}
    most = tower.config["max_patches"]
    if most is not None and not is_clip:
        # Its positions are resized in the model.
        wanted |= {"max_patches": most, "position_interpolation": "antialiased"}
    tower.check(
        kind,
        embedding_norm=is_clip,
        class_token=is_clip,
        layer_scale_initial_value=None,
        **wanted,
    )
    if most is not None and not tower.images.is_default:
        raise unfit(f"mean and std of 0.5 for {kind}", **tower.images._asdict())
    config = {
        "model_type": "clip_vision_model" if is_clip else "siglip_vision_model",
        **_spec.image_config(tower, kind),
        "intermediate_size": tower.config["mlp_dim"],
    }
    names = _IMAGE.under(_IMAGE_ROOT)
    if not is_clip:
        rules = _rules.image_tower_rules(names, tower.config)
        if tower.config["max_patches"] is not None:
            side = config.pop("image_size") // config["patch_size"]
            config.update(model_type="siglip2_vision_model", num_patches=side**2)
            rules["patch_embedding/kernel"] = _rules.Matrix(
                f"{names.patches}weight", inputs=3
            )
        rules.update(_rules.pooler_rules(f"{_IMAGE_ROOT}head."))
        if "predictions/kernel" in tower.values:
            rules.update(_rules.without_projection())
        return _rules.tensors_of(rules, tower.values, kind), config, tower.images
    values, image_range = tower.without_patch_bias()
    rules = _rules.image_tower_rules(names, tower.config)
    del rules["patch_embedding/bias"]
    if tower.projection_dim is not None:
        config["projection_dim"] = tower.projection_dim
        rules["predictions/kernel"] = _rules.Matrix("visual_projection.weight")
        if "predictions/bias" in values:
            rules["predictions/bias"] = _rules.Filled()
    return _rules.tensors_of(rules, values, kind), config, image_range


def _exported_text(tower, is_clip):
    kind = f"the text tower of transformers' {'CLIP' if is_clip else 'SigLIP'}"
    config = tower.config
    wanted = {"pooling": "end_of_text", "projection_bias": False}
    if not is_clip:
        wanted = {"pooling": "last", "projection_bias": True, "mask_padding": False}
    tower.check(kind, causal=is_clip, layer_scale_initial_value=None, **wanted)
    content = {
        "model_type": "clip_text_model" if is_clip else "siglip_text_model",
        **_spec.tower_config(tower),
        "intermediate_size": config["mlp_dim"],
        "vocab_size": config["vocabulary_size"],
        "max_position_embeddings": config["max_length"],
    }
    rules = _rules.text_tower_rules(_TEXT.under(_TEXT_ROOT), config)
    if config["projection_dim"] is not None:
        rules.update(_text_projection(_TEXT_ROOT, not is_clip))
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
    return _rules.tensors_of(rules, tower.values, kind), content


def _exported_gemma(tokenizer):
    """SigLIP 2's tokenizer, in the file that it came from; {} for another."""
    own = tokenizer.tokenizer
    tokens = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    is_gemma = {*tokens.values()} <= {*own.get_vocabulary()}
    if not is_gemma or not tokenizer.lower_case or tokenizer.start_id is not None:
        return {}
    name, content = GEMMA_FILES[0], getattr(own, "content", None)
    if content is None:
        name, content = GEMMA_FILES[1], own.proto
    config = {
        "tokenizer_class": "Siglip2Tokenizer",
        **tokens,
        "add_bos_token": False,
        "add_eos_token": True,
        "model_max_length": tokenizer.max_length,
        "padding_side": "right",
    }
    return {name: content, "tokenizer_config.json": config}


def _exported_logits(logits, is_clip):
    if is_clip == ("bias" in logits):
        raise ValueError(
            "Expected a bias of the logits for transformers' SigLIP, and none for its "
            f"CLIP; received: class_token={is_clip} and the logits' {sorted(logits)}"
        )
    shape = () if is_clip else (1,)
    names = {"log_scale": "logit_scale", "bias": "logit_bias"}
    return {names[name]: value.reshape(shape) for name, value in logits.items()}


def _exported_config(configs, is_clip):
    family, title = ("clip", "CLIP") if is_clip else ("siglip", "Siglip")
    if "num_patches" in configs.get("vision", {}):
        family, title = "siglip2", "Siglip2"
        if "text" in configs:
            configs["text"]["model_type"] = "siglip2_text_model"
    if len(configs) == 1:
        ((name, config),) = configs.items()
        projected = "WithProjection" if "projection_dim" in config else ""
        return {"architectures": [f"{title}{name.title()}Model{projected}"], **config}
    content = {
        "architectures": [f"{title}Model"],
        "model_type": family,
        "text_config": configs["text"],
        "vision_config": configs["vision"],
    }
    if is_clip:
        content["projection_dim"] = configs["vision"].get("projection_dim")
    return content
