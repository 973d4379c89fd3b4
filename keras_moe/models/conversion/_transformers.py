"""Converts transformers' CLIP, SigLIP, DINOv2 and DINOv3, in both directions."""

from typing import Any

import numpy as np

from keras_moe._checks import unfit
from keras_moe.models.conversion._rules import (
    BlockNames,
    Filled,
    Matrix,
    Normalization,
    TowerNames,
    image_tower_rules,
    linear,
    pooler_rules,
    tensors_of,
    text_tower_rules,
    without_projection,
)
from keras_moe.models.conversion._spec import (
    CLIP_IMAGES,
    LOGIT_NAMES,
    POSITION_IDS,
    TRANSFORMERS,
    ConversionSpec,
    agree,
    check_patch_size,
    ignored,
    image_tower_arguments,
    interpolation,
    normalization,
    required,
    text_tower_arguments,
    towers_spec,
)
from keras_moe.models.preprocessing.tokenizer import GEMMA_FILES, byte_pair_files

CONFIG_NAME = "config.json"
MODEL_TYPES = (
    "dinov2",
    "dinov2_with_registers",
    "dinov3_vit",
    *(
        f"{model}{tower}"
        for model in ("clip", "siglip", "siglip2")
        for tower in ("", "_vision_model", "_text_model")
    ),
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
_BLOCK = BlockNames(
    norms=("layer_norm1.", "layer_norm2."),
    mlp=("mlp.fc1.", "mlp.fc2."),
    queries=tuple(f"self_attn.{name}_proj." for name in "qkv"),
    output="self_attn.out_proj.",
)
_IMAGE = TowerNames(
    blocks="encoder.layers.",
    block=_BLOCK,
    positions="embeddings.position_embedding.weight",
    final_norm="post_layernorm.",
    patches="embeddings.patch_embedding.",
    class_token="embeddings.class_embedding",
    # Misspelt in the release.
    embedding_norm="pre_layrnorm.",
)
_TEXT = TowerNames(
    blocks="encoder.layers.",
    block=_BLOCK,
    positions="embeddings.position_embedding.weight",
    final_norm="final_layer_norm.",
    tokens="embeddings.token_embedding.weight",
)
_IMAGE_ROOT, _TEXT_ROOT = "vision_model.", "text_model."
_DINOV2 = TowerNames(
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
    registers="embeddings.register_tokens",
)
# As on the hub, with both layers in one matrix, and as transformers 5 has them.
_DINOV2_GATED: tuple[dict[str, Any], ...] = (
    {"mlp": ("mlp.weights_in.", "mlp.weights_out."), "gate": "mlp.weights_in."},
    {"mlp": ("mlp.up_proj.", "mlp.down_proj."), "gate": "mlp.gate_proj."},
)
# What DINOv2 and DINOv3 have in common.
_DINO = {
    "query_key_norm": False,
    "norm": "layer",
    "final_norm": True,
    "embedding_norm": False,
    "class_token": True,
    "image_pooling": None,
}
_DINOV3 = TowerNames(
    # Without the first part in files of transformers 4.
    blocks="model.layer.",
    block=BlockNames(
        norms=("norm1.", "norm2."),
        mlp=("mlp.up_proj.", "mlp.down_proj."),
        queries=tuple(f"attention.{name}_proj." for name in "qkv"),
        output="attention.o_proj.",
        scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
        gate="mlp.gate_proj.",
    ),
    positions="",
    final_norm="norm.",
    patches="embeddings.patch_embeddings.",
    class_token="embeddings.cls_token",
    registers="embeddings.register_tokens",
)
_DINOV2_SCALE = "encoder.layer.0.layer_scale1.lambda1"
_DINOV2_HEAD = "of a head on the class token and the mean of the patches"
_DINOV2_IMAGES = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def transformers_spec(
    file, config: dict, overrides: dict, tower: str | None = None
) -> ConversionSpec | None:
    root = next((x for x in ("", "dinov2.") if f"{x}{_DINOV2_SCALE}" in file), None)
    if root is not None:
        return _dinov2_spec(file, root, config, overrides)
    if f"{_DINOV3.patches}weight" in file and _DINOV3.registers in file:
        return _dinov3_spec(file, config, overrides)
    makers = {"image": _image_spec, "text": _text_spec}
    makers = {k: make for k, make in makers.items() if _root(file, k) is not None}
    return towers_spec(file, config, overrides, tower, makers)


def _dinov2_spec(file, root, config, overrides):
    names, activation = _DINOV2.under(root), config.get("hidden_act", "gelu")
    for gated in _DINOV2_GATED:
        if f"{names.blocks}0.{gated['gate']}weight" in file:
            names, activation = _with_mlp(names, gated), "silu"
    arguments = image_tower_arguments(
        file,
        names,
        overrides,
        axes=3,
        num_heads=config.get("num_attention_heads"),
        activation=activation,
        epsilon=config.get("layer_norm_eps", 1e-6),
        layer_scale=config.get("layerscale_value", 1.0),
    )
    _check_sizes(file, config, arguments)
    if "register_tokens" not in arguments:
        # transformers resizes those with registers with antialiasing.
        arguments["position_interpolation"] = "torch_bicubic"
    preprocessor = config.get("preprocessor", {})
    images = normalization(arguments["image_shape"][2], preprocessor, _DINOV2_IMAGES)
    bias = f"{names.patches}bias"
    image_arguments, notes = _preprocessing(preprocessor, crops=True)
    size = _edge(preprocessor.get("crop_size"))
    return ConversionSpec(
        TRANSFORMERS,
        "DINOv2",
        "ViTBackbone",
        arguments,
        image_tower_rules(names, arguments, images, bias, axes=0),
        ignored={
            f"{root}embeddings.mask_token": "of the pretraining",
            **dict.fromkeys(("classifier.weight", "classifier.bias"), _DINOV2_HEAD),
        },
        notes=notes,
        preprocessing=image_arguments,
        image_size=size if size and size % arguments["patch_size"] == 0 else None,
    )


def _with_mlp(names, mlp):
    return names._replace(block=names.block._replace(**mlp))


def _dinov3_spec(file, config, overrides):
    names = _DINOV3
    if f"layer.0.{names.block.norms[0]}weight" in file:
        names = names._replace(blocks="layer.")
    preprocessor = config.get("preprocessor", {})
    theta = (config.get("rope_parameters") or config).get("rope_theta", 100.0)
    arguments = image_tower_arguments(
        file,
        names,
        overrides,
        image_size=_edge(preprocessor.get("size")) or config.get("image_size", 224),
        num_heads=config.get("num_attention_heads"),
        activation=config.get("hidden_act", "gelu"),
        epsilon=config.get("layer_norm_eps", 1e-5),
        layer_scale=config.get("layerscale_value", 1.0),
    )
    arguments.update(position_embedding="rotary_2d", rotary_base=theta)
    _check_sizes(file, config, arguments)
    images = normalization(arguments["image_shape"][2], preprocessor, _DINOV2_IMAGES)
    image_arguments, notes = _preprocessing(preprocessor, crops=False)
    return ConversionSpec(
        TRANSFORMERS,
        "DINOv3",
        "ViTBackbone",
        arguments,
        image_tower_rules(names, arguments, images, f"{names.patches}bias", axes=0),
        ignored={"embeddings.mask_token": "of the pretraining"},
        notes=notes,
        preprocessing=image_arguments,
    )


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
    arguments = image_tower_arguments(
        file,
        names,
        overrides,
        num_heads=vision.get("num_attention_heads"),
        activation=activation,
        epsilon=vision.get("layer_norm_eps", 1e-5 if is_clip else 1e-6),
        # A matrix does not tell the size of its patches.
        patch_size=vision.get("patch_size", 16) if is_flat else None,
    )
    _check_sizes(file, vision, arguments)
    preprocessor = config.get("preprocessor", {})
    images = normalization(
        arguments["image_shape"][2], preprocessor, CLIP_IMAGES if is_clip else None
    )
    bias = f"{names.patches}bias"
    rules = image_tower_rules(names, arguments, images, bias if bias in file else None)
    task = None
    image_arguments, notes = _preprocessing(preprocessor, crops=is_clip)
    if is_flat:
        if images is not None:
            raise unfit("mean and std of 0.5 for patches", **images._asdict())
        rules["patch_embedding/kernel"] = Matrix(kernel, inputs=3)
        check_patch_size(overrides, arguments["patch_size"])
        most = preprocessor.get("max_num_patches", vision.get("num_patches", 256))
        arguments.update(max_patches=most, position_interpolation="antialiased")
        image_arguments, notes = interpolation(preprocessor.get("resample", 2))
        image_arguments.update(max_patches=most, patch_size=arguments["patch_size"])
    if "visual_projection.weight" in file:
        rules["predictions/kernel"] = Matrix("visual_projection.weight")
        rules["predictions/bias"] = Filled()
        size = required(file, "visual_projection.weight", 2)[0]
        task = {"num_classes": size, "pooling": "class_token"}
    elif f"{root}head.probe" in file:
        rules.update({**pooler_rules(f"{root}head."), **without_projection()})
        task = {"num_classes": arguments["hidden_dim"], "pooling": "map"}
    left = ignored(file, text=("text_model.", "text_projection."), logits=LOGIT_NAMES)
    left[f"{root}embeddings.position_ids"] = POSITION_IDS
    return ConversionSpec(
        TRANSFORMERS,
        "CLIP" if is_clip else "SigLIP",
        "ViTBackbone",
        arguments,
        rules,
        task,
        left,
        notes,
        image_arguments,
    )


def _check_sizes(file, config, arguments):
    """Raises ValueError if the config is that of another model."""
    sizes = {
        "hidden_size": arguments["hidden_dim"],
        "num_hidden_layers": arguments["num_layers"],
    }
    agree(file, config, CONFIG_NAME, **sizes)


def _preprocessing(preprocessor, crops):
    """Returns arguments of `ImagePreprocessor`, and notes; `crops` is a default."""
    arguments, notes = interpolation(preprocessor.get("resample", 3))
    size = preprocessor.get("size")
    squashes = not crops
    if size:
        squashes = isinstance(size, dict) and "height" in size
    size, crop = _edge(size), _edge(preprocessor.get("crop_size"))
    share = None if squashes else 1.0
    if share and size and crop and preprocessor.get("do_center_crop", crops):
        share = min(crop / size, 1.0)
    return {**arguments, "center_crop": share}, notes


def _edge(size):
    """Returns the shorter edge from any of transformers' size formats."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height")
    return size if isinstance(size, int) else None


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
    arguments = text_tower_arguments(
        file,
        names,
        overrides,
        num_heads=settings.get("num_attention_heads"),
        activation=settings.get("hidden_act"),
        epsilon=settings.get("layer_norm_eps", defaults["layer_norm_eps"]),
    )
    _check_sizes(file, text, arguments)
    rules, notes = text_tower_rules(names, arguments), ()
    projection = f"{root}head.weight" if is_siglip else "text_projection.weight"
    if projection in file:
        arguments["projection_dim"] = required(file, projection, 2)[0]
        rules.update(_text_projection(root, is_siglip))
    if is_siglip:
        arguments.update(
            causal=False, pooling="last", mask_padding=False, projection_bias=True
        )
    else:
        arguments["end_of_text_id"], notes = _end_of_text(
            settings, arguments["vocabulary_size"], file, overrides
        )
    left = ignored(
        file, image=("vision_model.", "visual_projection."), logits=LOGIT_NAMES
    )
    left[f"{root}embeddings.position_ids"] = POSITION_IDS
    return ConversionSpec(
        TRANSFORMERS,
        "SigLIP" if is_siglip else "CLIP",
        "TextBackbone",
        arguments,
        rules,
        ignored=left,
        notes=notes,
    )


def _text_projection(root: str, is_siglip: bool) -> dict:
    if is_siglip:
        return linear("projection", f"{root}head.")
    return {"projection/kernel": Matrix("text_projection.weight")}


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


def transformers_files(model: Any) -> tuple[dict, dict[str, Any]]:
    image, text = model.towers.get("image"), model.towers.get("text")
    own = (image or text).config
    if text is None and own["layer_scale_initial_value"]:
        is_rotary = own["position_embedding"] == "rotary_2d"
        return _dinov3_files(model) if is_rotary else _dinov2_files(model)
    is_clip = own["causal" if image is None else "class_token"]
    tensors, configs, files = {}, {}, {}
    if image is not None:
        tensors, configs["vision"], image_range = _exported_image(image, is_clip)
        most = image.config["max_patches"]
        family = "Siglip" if most is None else "Siglip2"
        images = _exported_preprocessor(
            model.preprocessor,
            configs["vision"].get("image_size"),
            image_range,
            "CLIP" if is_clip else family,
            crop=1.0 if is_clip else None,
        )
        if most is not None and not is_clip:
            own = {"patch_size": configs["vision"]["patch_size"]}
            images.update(max_num_patches=most, **own)
        files["preprocessor_config.json"] = images
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
    files[CONFIG_NAME] = {"dtype": "float32", **config}
    return tensors, files


def _tower_config(tower):
    config = tower.config
    return {
        "hidden_size": config["hidden_dim"],
        "num_hidden_layers": config["num_layers"],
        "num_attention_heads": config["num_heads"],
        "hidden_act": tower.activation,
        "layer_norm_eps": config["layer_norm_epsilon"],
    }


def _image_config(tower, kind):
    """Returns the entries of an image tower's config that CLIP and DINOv2 share."""
    return {
        **_tower_config(tower),
        "image_size": tower.square("image_shape", kind),
        "patch_size": tower.square("patch_size", kind),
        "num_channels": tower.config["image_shape"][2],
    }


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
        position_embedding="learned",
        query_key_norm=False,
        final_norm=True,
        embedding_norm=is_clip,
        class_token=is_clip,
        layer_scale_initial_value=None,
        **wanted,
    )
    if most is not None and not tower.images.is_default:
        raise unfit(f"mean and std of 0.5 for {kind}", **tower.images._asdict())
    config = {
        "model_type": "clip_vision_model" if is_clip else "siglip_vision_model",
        **_image_config(tower, kind),
        "intermediate_size": tower.config["mlp_dim"],
    }
    names = _IMAGE.under(_IMAGE_ROOT)
    if not is_clip:
        rules = image_tower_rules(names, tower.config, bias=f"{names.patches}bias")
        if tower.config["max_patches"] is not None:
            side = config.pop("image_size") // config["patch_size"]
            config.update(model_type="siglip2_vision_model", num_patches=side**2)
            rules["patch_embedding/kernel"] = Matrix(f"{names.patches}weight", inputs=3)
        rules.update(pooler_rules(f"{_IMAGE_ROOT}head."))
        if "predictions/kernel" in tower.values:
            rules.update(without_projection())
        return tensors_of(rules, tower.values, kind), config, tower.images
    values, image_range = tower.without_patch_bias()
    rules = image_tower_rules(names, tower.config)
    del rules["patch_embedding/bias"]
    if tower.projection_dim is not None:
        config["projection_dim"] = tower.projection_dim
        rules["predictions/kernel"] = Matrix("visual_projection.weight")
        if "predictions/bias" in values:
            rules["predictions/bias"] = Filled()
    return tensors_of(rules, values, kind), config, image_range


def _exported_text(tower, is_clip):
    kind = f"the text tower of transformers' {'CLIP' if is_clip else 'SigLIP'}"
    config = tower.config
    wanted = {"pooling": "end_of_text", "projection_bias": False}
    if not is_clip:
        wanted = {"pooling": "last", "projection_bias": True, "mask_padding": False}
    tower.check(
        kind, causal=is_clip, final_norm=True, layer_scale_initial_value=None, **wanted
    )
    content = {
        "model_type": "clip_text_model" if is_clip else "siglip_text_model",
        **_tower_config(tower),
        "intermediate_size": config["mlp_dim"],
        "vocab_size": config["vocabulary_size"],
        "max_position_embeddings": config["max_length"],
    }
    rules = text_tower_rules(_TEXT.under(_TEXT_ROOT), config)
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
    return tensors_of(rules, tower.values, kind), content


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


def _exported_preprocessor(preprocessor, side, image_range, name, crop):
    """Returns a `preprocessor_config.json`; `crop` is a default."""
    crop = getattr(preprocessor, "center_crop", crop)
    interpolation = getattr(preprocessor, "interpolation", "bicubic")
    content = {
        "image_processor_type": f"{name}ImageProcessor",
        "do_resize": True,
        "resample": {"bilinear": 2, "bicubic": 3}[interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(image_range.mean),
        "image_std": list(image_range.std),
    }
    if side is None:
        return content
    if crop is None:
        size = {"height": side, "width": side}
        return {**content, "do_center_crop": False, "size": size}
    return {
        **content,
        "size": {"shortest_edge": round(side / crop)},
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
    }


def _dinov2_files(model):
    kind = "transformers' DINOv2"
    tower = model.towers["image"]
    config, names = tower.config, _DINOV2
    own: dict[str, Any] = {"model_type": "dinov2"}
    own_registers = {"register_tokens": config["register_tokens"]}
    tower.check(kind, position_embedding="learned", **own_registers, **_DINO)
    if config["gated_mlp"]:
        names = _with_mlp(names, _DINOV2_GATED[0])
        own["use_swiglu_ffn"] = True
    if config["register_tokens"]:
        own["model_type"] += "_with_registers"
        own["num_register_tokens"] = config["register_tokens"]
    content = {
        "architectures": [
            "Dinov2WithRegistersModel" if config["register_tokens"] else "Dinov2Model"
        ],
        "dtype": "float32",
        **_image_config(tower, kind),
        **own,
        "mlp_ratio": _dinov2_ratio(config, kind),
        "layerscale_value": config["layer_scale_initial_value"],
        "use_mask_token": False,
    }
    return _dino_files(model, names, content, kind)


def _dinov2_ratio(config, kind):
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


def _dinov3_files(model):
    kind = "transformers' DINOv3"
    tower = model.towers["image"]
    config = tower.config
    own = {name: config[name] for name in ("register_tokens", "key_bias")}
    tower.check(kind, **own, **_DINO)
    if not config["register_tokens"] or not config["use_bias"]:
        raise unfit(
            f"registers and biases for {kind}",
            register_tokens=config["register_tokens"],
            use_bias=config["use_bias"],
        )
    content = {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "dtype": "float32",
        **_image_config(tower, kind),
        "intermediate_size": config["mlp_dim"],
        "layerscale_value": config["layer_scale_initial_value"],
        "rope_theta": config["rotary_base"],
        "num_register_tokens": config["register_tokens"],
        "use_gated_mlp": config["gated_mlp"],
        "key_bias": config["key_bias"],
    }
    return _dino_files(model, _DINOV3._replace(blocks="layer."), content, kind)


def _dino_files(model, names, content, kind):
    tower = model.towers["image"]
    rules = image_tower_rules(names, tower.config, bias=f"{names.patches}bias", axes=0)
    tensors = tensors_of(rules, tower.values, kind)
    if content["model_type"] != "dinov2":
        # Of the pretraining; transformers' classes always have it.
        dim = tower.config["hidden_dim"]
        shape = (1, 1, dim) if content["model_type"] == "dinov3_vit" else (1, dim)
        tensors["embeddings.mask_token"] = np.zeros(shape, "float32")
    images = _exported_preprocessor(
        model.preprocessor, content["image_size"], tower.images, "Bit", crop=1.0
    )
    return tensors, {CONFIG_NAME: content, "preprocessor_config.json": images}
