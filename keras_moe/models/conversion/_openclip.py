"""Converts OpenCLIP's towers, in both directions."""

from typing import Any

from keras_moe._checks import unfit
from keras_moe.models.conversion import _rules, _spec
from keras_moe.models.conversion._readers import PublishedTensors
from keras_moe.models.conversion._timm import timm_spec
from keras_moe.models.preprocessing.tokenizer import byte_pair_files

CONFIG_NAME = "open_clip_config.json"
# For "local-dir:FOLDER" any name means the folder's own tokenizer. Without a name it is
# OpenAI's, of so many tokens.
OWN_TOKENIZER, _OPENAI_TOKENS = "local-dir", 49408
_OPENCLIP = _spec.Library("OpenCLIP", "as its model card says (OpenAI's: MIT)")
# Settings that change a tower's outputs and that this library does not have.
_UNSUPPORTED = (
    "block_type", "qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner",
    "scale_attn", "scale_fc", "act_kwargs",
)  # fmt: skip
_VISION_UNSUPPORTED = (
    *_UNSUPPORTED, "norm_kwargs", "pool_type", "pos_embed_type", "attentional_pool",
    "no_ln_pre", "final_ln_after_pool", "global_average_pool", "input_patchnorm",
)  # fmt: skip
_TEXT_UNSUPPORTED = (*_UNSUPPORTED, "embed_cls", "hf_model_name", "text_arch")
# Their defaults.
_UNSET = (None, False, "", {}, {"approximate": "none"}, "default", "tok", "learnable")
_BLOCK = _rules.BlockNames(
    norms=("ln_1.", "ln_2."),
    mlp=("mlp.c_fc.", "mlp.c_proj."),
    # PyTorch's attention: `in_proj_weight`, `in_proj_bias`.
    queries=("attn.in_proj_",),
    output="attn.out_proj.",
    scales=("ls_1.gamma", "ls_2.gamma"),
)
_IMAGE = _rules.TowerNames(
    blocks="visual.transformer.resblocks.",
    block=_BLOCK,
    positions="visual.positional_embedding",
    final_norm="visual.ln_post.",
    patches="visual.conv1.",
    class_token="visual.class_embedding",
    embedding_norm="visual.ln_pre.",
)
_TEXT = _rules.TowerNames(
    blocks="transformer.resblocks.",
    block=_BLOCK,
    positions="positional_embedding",
    final_norm="ln_final.",
    tokens="token_embedding.weight",
)
# Numbers that OpenAI's files store besides the weights.
_OPENAI_NUMBERS = ("input_resolution", "context_length", "vocab_size")
_TEXT_NAMES = (
    "positional_embedding",
    "text_projection",
    "attn_mask",
    "token_embedding.",
    "ln_final.",
    "transformer.",
    # Newer versions use `text.`.
    "text.",
    *_OPENAI_NUMBERS,
)
_VISUAL, _TRUNK, _HEAD = "visual.", "visual.trunk.", "visual.head."
# PyTorch's default.
_EPSILON = 1e-5
_ASSUMED = (
    "assumed: causal attention and pooling at the largest id (no config says otherwise)"
)


def openclip_spec(
    file, config: dict, overrides: dict, tower: str | None = None
) -> _spec.ConversionSpec | None:
    makers = {}
    if any(name.startswith(_TRUNK) for name in file):
        makers["image"] = _timm_image_spec
    elif any(name.startswith(_VISUAL) for name in file):
        makers["image"] = _image_spec
    if _text_root(file) is not None:
        makers["text"] = _text_spec
    return _spec.towers_spec(file, config, overrides, tower, makers)


def _check_config(name, config, unsupported, file):
    for argument in unsupported:
        if config.get(argument) not in _UNSET:
            expected = f"one of OpenCLIP's own towers in the config of {file.path}"
            raise unfit(expected, f"{name}.{argument}={config[argument]!r}")


def _preprocessing(cfg):
    arguments, notes = _spec.interpolation(cfg.get("interpolation") or "bicubic")
    mode = cfg.get("resize_mode") or "shortest"
    if mode == "longest":
        notes += ("preprocessor: the middle of the image, which the source pads",)
    return {**arguments, "center_crop": None if mode == "squash" else 1.0}, notes


# Image towers


def _image_spec(file, config, overrides):
    model = config.get("model_cfg", {})
    vision = model.get("vision_cfg", {})
    _check_config("vision_cfg", vision, _VISION_UNSUPPORTED, file)
    num_heads = None
    if "width" in vision:
        num_heads = vision["width"] // vision.get("head_width", 64)
    arguments = _spec.image_tower_arguments(
        file,
        _IMAGE,
        overrides,
        num_heads=num_heads,
        activation=_activation(model),
        epsilon=_EPSILON,
        layer_scale=vision.get("ls_init_value"),
    )
    sizes = {"width": arguments["hidden_dim"], "layers": arguments["num_layers"]}
    _spec.agree(file, vision, CONFIG_NAME, **sizes)
    arguments["embedding_norm"] = True
    cfg = config.get("preprocess_cfg", {})
    images = _spec.normalization(
        arguments["image_shape"][2],
        {
            **config.get("preprocessor", {}),
            "image_mean": cfg.get("mean"),
            "image_std": cfg.get("std"),
        },
        _spec.CLIP_IMAGES,
    )
    rules = _rules.image_tower_rules(_IMAGE, arguments, images, file)
    task = None
    if f"{_VISUAL}proj" in file:
        # (D, embedding), as in this library.
        size = _spec.required(file, f"{_VISUAL}proj", 2)[1]
        _spec.agree(file, model, CONFIG_NAME, embed_dim=size)
        rules["predictions/kernel"] = _rules.Direct(f"{_VISUAL}proj")
        rules["predictions/bias"] = _rules.Filled()
        task = {"num_classes": size, "pooling": "class_token"}
    spec = _spec.ConversionSpec(
        _OPENCLIP, "CLIP", "ViTBackbone", arguments, rules, task
    )
    spec.ignored = _spec.ignored(file, text=_TEXT_NAMES, logits=_spec.LOGIT_NAMES)
    spec.preprocessing, spec.notes = _preprocessing(cfg)
    return spec


def _activation(model):
    if not model:
        return None
    return "quick_gelu" if model.get("quick_gelu") else "gelu"


def _timm_image_spec(file, config, overrides):
    """Returns the spec of a timm image tower, as in OpenCLIP's SigLIPs."""
    vision = config.get("model_cfg", {}).get("vision_cfg", {})
    cfg = config.get("preprocess_cfg", {})
    timm: dict[str, object] = {
        "pretrained_cfg": {
            "mean": cfg.get("mean", _spec.CLIP_IMAGES.mean),
            "std": cfg.get("std", _spec.CLIP_IMAGES.std),
        }
    }
    if vision.get("timm_model_name"):
        timm["architecture"] = vision["timm_model_name"]
    names = [name for name in file if name.startswith(_TRUNK)]
    tensors = {name.removeprefix(_TRUNK): file[name] for name in names}
    trunk = PublishedTensors(file.path, tensors)
    pool = vision.get("timm_pool") or ("map" if "attn_pool.q.weight" in trunk else None)
    if pool is not None:
        timm["global_pool"] = pool
    spec = timm_spec(trunk, timm, overrides)
    if spec is None:
        raise ValueError(
            "Expected an image tower of timm that is a plain ViT; received: "
            f"{len(trunk)} tensors such as {_TRUNK + min(trunk)!r} in {file.path}"
        )
    spec.library, spec.architecture = _OPENCLIP, "CLIP"
    spec.rules = _rules.renamed(spec.rules, _TRUNK.__add__)
    projection = f"{_HEAD}proj."
    if f"{projection}weight" in file:
        has_token = spec.arguments["class_token"]
        default = {"pooling": "class_token" if has_token else "average"}
        size = _spec.required(file, f"{projection}weight", 2)[0]
        spec.task_arguments = {**(spec.task_arguments or default), "num_classes": size}
        has_bias = f"{projection}bias" in file
        spec.rules.update(_rules.linear("predictions", projection, has_bias))
    spec.ignored = _spec.ignored(file, text=("text.",), logits=_spec.LOGIT_NAMES)
    spec.preprocessing, notes = _preprocessing(cfg)
    spec.notes += notes
    return spec


# Text towers


def _text_root(file):
    # The second is a tower of transformers, which is refused by name.
    names = _TEXT.tokens, "transformer.embeddings.word_embeddings.weight"
    for root in ("text.", ""):
        if any(f"{root}{name}" in file for name in names):
            return root
    return None


def _text_spec(file, config, overrides):
    root = _text_root(file) or ""
    model = config.get("model_cfg", {})
    text = model.get("text_cfg", {})
    # Some configs have this next to the towers.
    settings = {"text_arch": model.get("text_arch"), **text}
    activation = _activation(model)
    if activation == "gelu" and text.get("act_kwargs") == {"approximate": "tanh"}:
        activation, settings["act_kwargs"] = "gelu_pytorch_tanh", None
    _check_config("text_cfg", settings, _TEXT_UNSUPPORTED, file)
    norm_kwargs = text.get("norm_kwargs") or {"eps": _EPSILON}
    if norm_kwargs.keys() != {"eps"}:
        expected = f"no arguments of norms but eps in the config of {file.path}"
        raise unfit(expected, f"text_cfg.norm_kwargs={norm_kwargs!r}")
    names = _TEXT.under(root)
    arguments = _spec.text_tower_arguments(
        file,
        names,
        overrides,
        num_heads=text.get("heads", 8) if model else None,
        activation=activation,
        epsilon=norm_kwargs["eps"],
        layer_scale=text.get("ls_init_value"),
    )
    _spec.agree(
        file,
        text,
        CONFIG_NAME,
        vocab_size=arguments["vocabulary_size"],
        context_length=arguments["max_length"],
        width=arguments["hidden_dim"],
        layers=arguments["num_layers"],
    )
    # Without a config, assume a tower like OpenAI's.
    causal = not text.get("no_causal_mask", False)
    pool = text.get("pool_type", "argmax")
    projection, projection_rules = _projection(file, root)
    if projection:
        size = projection["projection_dim"]
        _spec.agree(file, model, CONFIG_NAME, embed_dim=size)
    arguments.update(
        causal=causal,
        pooling="end_of_text" if pool in ("argmax", "eos") else pool,
        end_of_text_id=text.get("eos_id", 2) if pool == "eos" else None,
        # Causal towers ignore padding after the end token; OpenCLIP does not mask it in
        # others.
        mask_padding=causal and pool != "last",
        **projection,
    )
    left = _spec.ignored(file, image=(_VISUAL,), logits=_spec.LOGIT_NAMES)
    left.update(dict.fromkeys(_OPENAI_NUMBERS, "a number that the shapes imply"))
    left[f"{root}attn_mask"] = "the mask of causal attention"
    rules = {**_rules.text_tower_rules(names, arguments), **projection_rules}
    spec = _spec.ConversionSpec(_OPENCLIP, "CLIP", "TextBackbone", arguments, rules)
    spec.ignored, spec.notes = left, () if model else (_ASSUMED,)
    return spec


def _projection(file, root):
    name = f"{root}text_projection"
    if name in file:
        # (D, embedding), as in this library.
        size = _spec.required(file, name, 2)[1]
        return {"projection_dim": size}, {"projection/kernel": _rules.Direct(name)}
    if f"{name}.weight" not in file:
        return {}, {}
    has_bias = f"{name}.bias" in file
    rules = _rules.linear("projection", f"{name}.")
    if not has_bias:
        del rules["projection/bias"]
    size = _spec.required(file, f"{name}.weight", 2)[0]
    return {"projection_dim": size, "projection_bias": has_bias}, rules


# Export


def openclip_files(model: Any) -> tuple[dict, dict]:
    if len(model.towers) < 2:
        raise ValueError(
            "Expected a CLIPBackbone, since OpenCLIP loads pairs of towers only; "
            f"received: the {next(iter(model.towers))} tower. 'transformers' loads it."
        )
    image, text = model.towers["image"], model.towers["text"]
    images, vision_cfg, image_range = _exported_image(image)
    texts, text_cfg = _exported_text(text)
    config = {
        "embed_dim": image.projection_dim,
        "vision_cfg": vision_cfg,
        "text_cfg": text_cfg,
    }
    activations = image.config["activation"], text.config["activation"]
    if "quick_gelu" in activations:
        if len(set(activations)) > 1:
            expected = "activation='quick_gelu' of both towers or of none for OpenCLIP"
            raise unfit(expected, f"{activations[0]!r} and {activations[1]!r}")
        config["quick_gelu"] = True
    elif activations[1] == "gelu_tanh":
        text_cfg["act_kwargs"] = {"approximate": "tanh"}
    tensors = {**images, **texts, "logit_scale": model.logits["log_scale"]}
    if "bias" in model.logits:
        tensors["logit_bias"] = model.logits["bias"]
        config["init_logit_bias"] = float(model.logits["bias"])
    squashes = model.preprocessor is not None and model.preprocessor.center_crop is None
    preprocess_cfg = {
        "mean": list(image_range.mean),
        "std": list(image_range.std),
        "interpolation": getattr(model.preprocessor, "interpolation", "bicubic"),
        "resize_mode": "squash" if squashes else "shortest",
    }
    files = {CONFIG_NAME: {"model_cfg": config, "preprocess_cfg": preprocess_cfg}}
    tokenizer = byte_pair_files(model.tokenizer, is_clip=True)
    if tokenizer and text.config["vocabulary_size"] != _OPENAI_TOKENS:
        text_cfg["hf_tokenizer_name"] = OWN_TOKENIZER
        files.update(tokenizer)
    return tensors, files


def _exported_image(tower):
    kind = "the image tower of OpenCLIP"
    config = tower.config
    tower.check(
        kind,
        embedding_norm=True,
        class_token=True,
        image_pooling="class_token",
        layer_norm_epsilon=_EPSILON,
    )
    received = config["activation"], tower.projection_dim, config["image_shape"][2]
    if received[0] == "gelu_tanh" or received[1] is None or received[2] != 3:
        raise ValueError(
            "Expected activation 'gelu' or 'quick_gelu', a projection and images of 3 "
            f"channels for {kind}; received: activation={received[0]!r}, "
            f"projection_dim={received[1]}, image_shape={config['image_shape']}"
        )
    content = {
        "image_size": tower.square("image_shape", kind),
        "patch_size": tower.square("patch_size", kind),
        "head_width": config["hidden_dim"] // config["num_heads"],
        **_block_config(tower),
    }
    values, image_range = tower.without_patch_bias()
    rules = _rules.image_tower_rules(_IMAGE, config)
    del rules["patch_embedding/bias"]
    rules["predictions/kernel"] = _rules.Direct(f"{_VISUAL}proj")
    if "predictions/bias" in values:
        rules["predictions/bias"] = _rules.Filled()
    return _rules.tensors_of(rules, values, kind), content, image_range


def _exported_text(tower):
    kind = "the text tower of OpenCLIP"
    config = tower.config
    tower.check(kind)
    pooling, end = config["pooling"], config["end_of_text_id"]
    masks = config["mask_padding"] and (pooling == "last" or not config["causal"])
    if pooling not in ("end_of_text", "first", "last") or masks:
        raise ValueError(
            "Expected pooling of 'end_of_text', 'first' or 'last', and "
            f"mask_padding=False unless padding comes last and is causal, for {kind}; "
            f"received: pooling={pooling!r}, mask_padding={config['mask_padding']}, "
            f"causal={config['causal']}"
        )
    content = {
        "context_length": config["max_length"],
        "vocab_size": config["vocabulary_size"],
        "heads": config["num_heads"],
        **_block_config(tower),
    }
    if not config["causal"]:
        content["no_causal_mask"] = True
    if pooling != "end_of_text":
        content["pool_type"] = pooling
    elif end is not None:
        content.update(pool_type="eos", eos_id=end)
    if config["layer_norm_epsilon"] != _EPSILON:
        content["norm_kwargs"] = {"eps": config["layer_norm_epsilon"]}
    rules = _rules.text_tower_rules(_TEXT, config)
    if config["projection_bias"]:
        content["proj_bias"] = True
        rules.update(_rules.linear("projection", "text_projection."))
    elif config["projection_dim"] is not None:
        rules["projection/kernel"] = _rules.Direct("text_projection")
    else:
        content["proj_type"] = "none"
    return _rules.tensors_of(rules, tower.values, kind), content


def _block_config(tower):
    config, dim = tower.config, tower.config["hidden_dim"]
    # int(dim * ratio) is exactly `mlp_dim`.
    ratio = config["mlp_dim"] / dim
    if int(dim * ratio) != config["mlp_dim"]:
        ratio = (config["mlp_dim"] + 0.5) / dim
    content = {"width": dim, "layers": config["num_layers"], "mlp_ratio": ratio}
    if config["layer_scale_initial_value"] is not None:
        content["ls_init_value"] = config["layer_scale_initial_value"]
    return content
