"""Converts KerasHub's ViT, CLIP, SigLIP and language models."""

import re

import keras
import keras_hub
import numpy as np

from keras_moe._checks import unfit
from keras_moe.models.conversion import _rules, _spec
from keras_moe.models.conversion._readers import PublishedTensors, TensorInfo
from keras_moe.models.preprocessing.tokenizer import TextTokenizer

_hub = keras_hub.models
_KERAS_HUB = _spec.Library("KerasHub", "as its model card says (per preset)")
_TEXTS = (_hub.CLIPTextEncoder, _hub.SigLIPTextEncoder)
_PAIRS = (_hub.CLIPBackbone, _hub.SigLIPBackbone)
# Llama 3 extends Llama.
_LLAMA = (_hub.LlamaBackbone, _hub.MistralBackbone, _hub.Qwen3Backbone)
_LANGUAGE = (_hub.GPT2Backbone, *_LLAMA)
LANGUAGE_TASKS = (
    _hub.GPT2CausalLM,
    _hub.LlamaCausalLM,
    _hub.MistralCausalLM,
    _hub.Qwen3CausalLM,
)
CLASSES = (
    _hub.ViTBackbone,
    _hub.ViTImageClassifier,
    _hub.CLIPVisionEncoder,
    _hub.SigLIPVisionEncoder,
    *_TEXTS,
    *_PAIRS,
    *_LANGUAGE,
    *LANGUAGE_TASKS,
)
WITH_PRESETS = (_hub.ViTBackbone, *_PAIRS, *_LANGUAGE)
_PROJECTIONS = ("query", "key", "value", "attention_output")
# Parts of a block: norms, attention and MLP layers.
_VIT_BLOCK = ("ln_1", "ln_2", "mha", "mlp/dense_1", "mlp/dense_2")
_CLIP_BLOCK = ("layer_norm_1", "layer_norm_2", "attention", "dense_1", "dense_2")
_SIGLIP_BLOCK = ("layer_norm1", "layer_norm2", "self_attn", "mlp/fc1", "mlp/fc2")
_GPT2_BLOCK = (
    "self_attention_layer_norm", "feedforward_layer_norm", "self_attention",
    "feedforward_intermediate_dense", "feedforward_output_dense",
)  # fmt: skip
# May be preceded by a model's name.
_ROOTS = (
    "vit_patching_and_embedding/|vit_encoder/|encoder_block_|embedding/|"
    "pre_layer_norm/|post_layer_norm/|layer_norm/|head/|pre_logits/|predictions/|"
    "vision_projection/|text_projection/|token_embedding/|position_embedding/|"
    "sequence_output_layernorm/|"
    r"transformer_layer_\d+/"
)
_CLIP_EPSILON = 1e-5
# Tokens, for rotary positions without a preprocessor; `max_length` overrides it.
_USUAL_LENGTH = 2048


class KerasHubModel(PublishedTensors):
    """The weights of a KerasHub model, or of some of its layers, by path."""

    def __init__(self, model: keras.Model, layers: dict[str, list] | None = None):
        label = f"{type(model).__name__} {model.name!r}"
        super().__init__(label, {})
        self._weights = {}
        for start, parts in (layers or {"": [model]}).items():
            for weight in (weight for part in parts for weight in part.weights):
                name = start + weight.path
                if "seed_generator" in name:
                    continue
                self._weights[name] = weight
                dtype = keras.backend.standardize_dtype(weight.dtype)
                self._tensors[name] = TensorInfo(tuple(weight.shape), dtype, label)

    def read(self, name: str) -> np.ndarray:
        array = self._weights[name].value
        if self[name].dtype == "bfloat16":
            array = keras.ops.cast(array, "float32")
        # Copy: on some backends the array shares the weight's memory.
        return np.array(keras.ops.convert_to_numpy(array))


def keras_hub_spec(
    model: keras.Model, tower: str | None
) -> tuple[PublishedTensors, _spec.ConversionSpec]:
    if isinstance(model, _PAIRS):
        if tower is None:
            return _both_towers(model)
        layers = _layers(model, tower)
        file = KerasHubModel(model, {"": layers})
        spec = _encoder_spec(model, layers[0], file)
        other = "image" if tower == "text" else "text"
        spec.notes += (f"the {other} tower and the logits' scale are left out",)
        return file, spec
    texts = (*_TEXTS, *_LANGUAGE, *LANGUAGE_TASKS)
    own = "text" if isinstance(model, texts) else "image"
    if tower not in (None, own):
        expected = f"a model of KerasHub with a {tower} tower"
        raise unfit(expected, f"{type(model).__name__} {model.name!r}")
    is_task = isinstance(model, (_hub.ViTImageClassifier, *LANGUAGE_TASKS))
    file = KerasHubModel(model)
    return file, _encoder_spec(model, model.backbone if is_task else model, file)


def _layers(model, tower):
    """Returns the layers of a tower: its encoder, and CLIP's projection."""
    name = "vision" if tower == "image" else "text"
    layers = [getattr(model, f"{name}_encoder")]
    if isinstance(model, _hub.CLIPBackbone):
        layers.append(getattr(model, f"{name}_projection"))
    return layers


def _both_towers(model):
    """Returns the weights of both towers, whose paths would collide."""
    layers = {tower: _layers(model, tower) for tower in ("image", "text")}
    is_clip = isinstance(model, _hub.CLIPBackbone)
    head = model.clip_head if is_clip else model.siglip_head
    parts = {f"{tower}/": layers[tower] for tower in layers}
    file = KerasHubModel(model, {**parts, "": [head]})
    specs = {}
    for tower, (encoder, *_) in layers.items():
        own = [name for name in file if name.startswith(f"{tower}/")]
        specs[tower] = _encoder_spec(model, encoder, own)
    scalars = [
        next((x for x in file if x.endswith(end)), None) for end in _spec.LOGIT_NAMES
    ]
    return file, _spec.pair_spec(file, **specs, log_scale=scalars[0], bias=scalars[1])


def _encoder_spec(model, encoder, names):
    has_head = isinstance(model, (_hub.ViTImageClassifier, _hub.CLIPBackbone))
    around = model if has_head else None
    if isinstance(encoder, _TEXTS):
        spec = _text_spec(encoder, around)
    elif isinstance(encoder, _hub.ViTBackbone):
        spec = _vit_spec(encoder, around)
    elif isinstance(encoder, _LANGUAGE):
        preprocessor = getattr(model, "preprocessor", None)
        is_llama = isinstance(encoder, _LLAMA)
        spec = (_llama_spec if is_llama else _gpt2_spec)(encoder, preprocessor)
        if preprocessor is not None:
            tokenizer, length = preprocessor.tokenizer, spec.arguments["max_length"]
            start = tokenizer.start_token_id if preprocessor.add_start_token else None
            end = tokenizer.end_token_id
            spec.tokenizer = TextTokenizer(tokenizer, length, start, end)
    else:
        spec = _image_spec(encoder, around, _probe(names))
    full = _full_names(names)
    spec.ignored = {full.get(x, x): reason for x, reason in spec.ignored.items()}
    # Zero biases are equivalent to layers without biases.
    present = {
        path: rule
        for path, rule in spec.rules.items()
        if not path.endswith("bias") or set(rule.names) <= set(full)
    }
    rules = _rules.renamed(present, lambda name: full.get(name, name))
    spec.rules = {**dict.fromkeys(spec.rules, _rules.Filled()), **rules}
    if "image_shape" in spec.arguments:
        preprocessor = getattr(model, "preprocessor", None)
        spec.preprocessing, notes = _preprocessing(preprocessor)
        spec.notes += notes
    if type(encoder.dtype_policy) is keras.DTypePolicy:
        spec.arguments["dtype"] = encoder.dtype_policy.name
    return spec


def _full_names(names):
    full = {}
    for name in names:
        if match := re.search(rf"(?:^|[_/])((?:{_ROOTS}).*)$", name):
            full.setdefault(match[1], name)
    return full


def _probe(names):
    """Returns the short name of SigLIP's probe, which KerasHub leaves unnamed."""
    found = [name for name in _full_names(names) if re.fullmatch(r"head/[^/]+", name)]
    return (found or ["head/variable"])[0]


def _hub_norm(path, name):
    return _rules.norm(path, name, "gamma", "beta")


def _attention(path, name):
    rules = {}
    for part in _PROJECTIONS:
        rules.update(_rules.direct(f"{path}/{part}", f"{name}/{part}/"))
    return rules


def _block(path, block, names):
    first, second, attention, hidden, output = (f"{block}/{name}" for name in names)
    return {
        **_hub_norm(f"{path}/mixer_norm", f"{first}/"),
        **_hub_norm(f"{path}/feed_forward_norm", f"{second}/"),
        **_rules.direct(f"{path}/mlp/hidden", f"{hidden}/"),
        **_rules.direct(f"{path}/mlp/output", f"{output}/"),
        **_attention(f"{path}/attention", attention),
    }


def _encoder(encoder, is_clip):
    """Returns rules and arguments of the blocks of a CLIP or SigLIP."""
    names = _CLIP_BLOCK if is_clip else _SIGLIP_BLOCK
    rules = _hub_norm("final_norm", "layer_norm/" if is_clip else "post_layer_norm/")
    for i in range(encoder.num_layers):
        rules.update(_block(f"block_{i}", f"encoder_block_{i}", names))
    activation = encoder.intermediate_activation
    return rules, {
        "mlp_dim": encoder.intermediate_dim,
        "activation": "gelu_tanh" if activation == "gelu_approximate" else activation,
        "layer_norm_epsilon": _CLIP_EPSILON if is_clip else encoder.layer_norm_epsilon,
    }


def _hub_patches(name, has_bias):
    return _rules.patches(
        f"{name}kernel", f"{name}bias" if has_bias else None, torch=False
    )


def _sizes(encoder):
    return {k: getattr(encoder, k) for k in ("hidden_dim", "num_layers", "num_heads")}


def _image_sizes(encoder):
    shape, patch_size = tuple(encoder.image_shape), encoder.patch_size
    if getattr(encoder, "data_format", "channels_last") == "channels_first":
        shape = (*shape[1:], shape[0])
    if isinstance(patch_size, list):
        patch_size = tuple(patch_size)
    return {"image_shape": shape, "patch_size": patch_size, **_sizes(encoder)}


def _text_sizes(encoder):
    return {
        "vocabulary_size": encoder.vocabulary_size,
        "max_length": encoder.max_sequence_length,
        **_sizes(encoder),
        "mlp_dim": encoder.intermediate_dim,
    }


def _vit_spec(encoder, classifier):
    embedding = "vit_patching_and_embedding/"
    rules = {
        **_hub_patches(f"{embedding}patch_embedding/", encoder.use_patch_bias),
        "position_embedding/embedding": _rules.Positions(
            f"{embedding}position_embedding/embeddings", axes=1
        ),
        **_hub_norm("final_norm", "vit_encoder/ln/"),
    }
    if encoder.use_class_token:
        rules["class_token/token"] = _rules.Direct(f"{embedding}class_token")
    for i in range(encoder.num_layers):
        block = f"vit_encoder/transformer_block_{i + 1}"
        rules.update(_block(f"block_{i}", block, _VIT_BLOCK))
    task = None
    if classifier is not None:
        task = _classifier_arguments(classifier, encoder)
        rules.update(_rules.direct("predictions", "predictions/"))
        if classifier.intermediate_dim is not None:
            rules.update(_rules.direct("pre_logits", "pre_logits/"))
    arguments = {
        **_image_sizes(encoder),
        "mlp_dim": encoder.mlp_dim,
        "class_token": encoder.use_class_token,
        "activation": "gelu",
        "layer_norm_epsilon": encoder.layer_norm_epsilon,
        "dropout_rate": encoder.dropout_rate,
        "attention_dropout": encoder.attention_dropout,
    }
    return _spec.ConversionSpec(
        _KERAS_HUB, "ViT", "ViTBackbone", arguments, rules, task
    )


def _gpt2_spec(encoder, preprocessor):
    rules = {
        "token_embedding/embeddings": _rules.Direct("token_embedding/embeddings"),
        "text_positions/embedding": _rules.Direct(
            "position_embedding/embeddings", axes=1
        ),
        **_hub_norm("final_norm", "layer_norm/"),
    }
    for i in range(encoder.num_layers):
        rules.update(_block(f"block_{i}", f"transformer_layer_{i}", _GPT2_BLOCK))
    arguments = {
        **_spec.GPT2,
        **_text_sizes(encoder),
        "activation": "gelu_tanh",
        "layer_norm_epsilon": 1e-5,
        "tied_embeddings": True,
        "dropout_rate": encoder.dropout,
        "attention_dropout": encoder.dropout,
    }
    return _spec.ConversionSpec(
        _KERAS_HUB, "GPT-2", "DecoderBackbone", arguments, rules, {}
    )


def _llama_spec(encoder, preprocessor):
    kind = type(encoder).__name__.removesuffix("Backbone")
    heads, dim = encoder.num_query_heads, encoder.hidden_dim
    is_llama = isinstance(encoder, _hub.LlamaBackbone)
    if not is_llama and encoder.head_dim not in (None, dim / heads):
        expected = f"a {kind} with head_dim={dim // heads} (hidden_dim / num_heads)"
        raise unfit(expected, head_dim=encoder.head_dim)
    if is_llama and encoder.rope_frequency_adjustment_factor is not None:
        raise ValueError(
            f"Expected a {kind} whose rotary positions have one scale, such as Llama 2 "
            "or 3; received: rope_frequency_adjustment_factor="
            f"{encoder.rope_frequency_adjustment_factor}"
        )
    # Within its window, a token attends to all earlier ones.
    window = getattr(encoder, "sliding_window", None)
    window = getattr(encoder, "sliding_window_size", window)
    length = getattr(preprocessor, "sequence_length", None) or _USUAL_LENGTH
    arguments = {
        "vocabulary_size": encoder.vocabulary_size,
        "max_length": min(length, window or length),
        "hidden_dim": dim,
        "num_layers": encoder.num_layers,
        "num_heads": heads,
        "num_key_value_heads": encoder.num_key_value_heads,
        "mlp_dim": encoder.intermediate_dim,
        "activation": "silu",
        "layer_norm_epsilon": encoder.layer_norm_epsilon,
        "rope_theta": float(encoder.rope_max_wavelength),
        # KerasHub's Llama has a factor, too, which changes nothing.
        "rope_scaling": 1.0 if is_llama else float(encoder.rope_scaling_factor),
        "tied_embeddings": encoder.token_embedding.tie_weights,  # pyright: ignore[reportOptionalMemberAccess]
        "query_key_norm": isinstance(encoder, _hub.Qwen3Backbone),
        "dropout_rate": encoder.dropout,
        "attention_dropout": encoder.dropout,
    }
    names = {
        "token_embedding/embeddings": "token_embedding/embeddings",
        "final_norm/scale": "sequence_output_layernorm/scale",
    }
    if not arguments["tied_embeddings"]:
        names["token_embedding/reverse_embeddings"] = (
            "token_embedding/reverse_embeddings"
        )
    layers = {
        **{f"attention/{x}/kernel": f"self_attention/{x}/kernel" for x in _PROJECTIONS},
        "mlp/hidden/kernel": "feedforward_intermediate_dense/kernel",
        "mlp/gate/kernel": "feedforward_gate_dense/kernel",
        "mlp/output/kernel": "feedforward_output_dense/kernel",
        "mixer_norm/scale": "self_attention_layernorm/scale",
        "feed_forward_norm/scale": "feedforward_layernorm/scale",
    }
    if arguments["query_key_norm"]:
        for part in ("query", "key"):
            name = f"self_attention/{part}_dense_layernorm/scale"
            layers[f"attention/{part}_norm/scale"] = name
    for i in range(encoder.num_layers):
        for path, name in layers.items():
            names[f"block_{i}/{path}"] = f"transformer_layer_{i}/{name}"
    rules = {path: _rules.Direct(name) for path, name in names.items()}
    notes = ()
    if arguments["query_key_norm"]:
        notes = (
            "queries and keys are normalised with the epsilon of the other norms; "
            "KerasHub's have 1e-5",
        )
    return _spec.ConversionSpec(
        _KERAS_HUB, kind, "DecoderBackbone", arguments, rules, {}, notes=notes
    )


def _classifier_arguments(classifier, encoder):
    activation = classifier.activation
    if callable(activation):
        activation = keras.activations.serialize(activation)
    arguments = {
        "num_classes": classifier.num_classes,
        "pooling": {"token": "class_token", "gap": "average"}[classifier.pooling],
        "output_activation": None if activation == "linear" else activation,
        "multi_label": activation == "sigmoid",
        "representation_dim": classifier.intermediate_dim,
        "dropout": classifier.dropout,
    }
    policy = classifier.output_dense.dtype_policy
    if type(policy) is keras.DTypePolicy and policy != encoder.dtype_policy:
        arguments["head_dtype"] = policy.name
    return arguments


def _image_spec(encoder, clip, probe):
    is_clip = isinstance(encoder, _hub.CLIPVisionEncoder)
    blocks, sizes = _encoder(encoder, is_clip)
    rules = {
        **_hub_patches("embedding/patch_embedding/", not is_clip),
        "position_embedding/embedding": _rules.Positions(
            "embedding/position_embedding/embeddings",
            axes=1,
            ids="embedding/position_ids",
        ),
        **blocks,
    }
    if is_clip:
        rules["class_token/token"] = _rules.Direct("embedding/class_embedding", axes=2)
        rules.update(_hub_norm("embedding_norm", "pre_layer_norm/"))
    else:
        rules.update(
            {
                "pooler/probe": _rules.Direct(probe),
                **_attention("pooler/attention", "head/attention"),
                **_hub_norm("pooler/norm", "head/layernorm/"),
                **_rules.direct("pooler/mlp/hidden", "head/mlp/fc1/"),
                **_rules.direct("pooler/mlp/output", "head/mlp/fc2/"),
                **_rules.without_projection(),
            }
        )
    task = None if is_clip else {"num_classes": encoder.hidden_dim, "pooling": "map"}
    if clip is not None:
        rules["predictions/kernel"] = _rules.Direct("vision_projection/kernel")
        rules["predictions/bias"] = _rules.Filled()
        task = {"num_classes": clip.projection_dim, "pooling": "class_token"}
    arguments = {
        **_image_sizes(encoder),
        **sizes,
        "class_token": is_clip,
        "embedding_norm": is_clip,
    }
    name = "CLIP" if is_clip else "SigLIP"
    return _spec.ConversionSpec(_KERAS_HUB, name, "ViTBackbone", arguments, rules, task)


def _text_spec(encoder, clip):
    is_clip = isinstance(encoder, _hub.CLIPTextEncoder)
    blocks, sizes = _encoder(encoder, is_clip)
    rules = {
        "token_embedding/embeddings": _rules.Direct(
            "embedding/token_embedding/embeddings"
        ),
        "text_positions/embedding": _rules.Direct(
            "embedding/position_embedding/embeddings", axes=1
        ),
        **blocks,
    }
    arguments = {**_text_sizes(encoder), **sizes}
    notes = ()
    if is_clip:
        notes = ("the last norm has epsilon 1e-5, as in CLIP; KerasHub's has 1e-6",)
        if clip is not None:
            arguments["projection_dim"] = clip.projection_dim
            rules["projection/kernel"] = _rules.Direct("text_projection/kernel")
    else:
        arguments.update(causal=False, pooling="last", mask_padding=False)
        arguments.update(projection_dim=encoder.projection_dim, projection_bias=True)
        rules.update(_rules.direct("projection", "head/"))
    name = "CLIP" if is_clip else "SigLIP"
    spec = _spec.ConversionSpec(_KERAS_HUB, name, "TextBackbone", arguments, rules)
    spec.ignored, spec.notes = {"embedding/position_ids": _spec.POSITION_IDS}, notes
    return spec


def _preprocessing(preprocessor):
    if preprocessor is None:
        return None, ()
    converter = getattr(preprocessor, "image_converter", None)
    if converter is None or converter.scale is None:
        return None, (
            "the task's preprocessor is not carried over: the model takes the images "
            "that it made",
        )
    # Pixels x in [0, 1] become 255 x scale + offset.
    std = 1.0 / (255.0 * np.asarray(converter.scale, "float64"))
    mean = -std * np.asarray(0.0 if converter.offset is None else converter.offset)
    arguments, notes = _spec.interpolation(converter.interpolation)
    if arguments["interpolation"] == "bilinear":
        arguments["antialias"] = bool(converter.antialias)
    pads = getattr(converter, "pad_to_aspect_ratio", False)
    if pads:
        notes += ("preprocessor: the middle of the image, which the source pads",)
    arguments.update(
        mean=mean.ravel().tolist(),
        std=std.ravel().tolist(),
        center_crop=1.0 if converter.crop_to_aspect_ratio or pads else None,
    )
    return arguments, (
        *notes,
        "the task's preprocessor has become model.preprocessor, which classify "
        "applies; fit and predict do not",
    )
