"""KerasHub's ViT, CLIP and SigLIP, as models in memory."""

import dataclasses
import re

import keras
import keras_hub

from keras_moe.models.conversion.keras_hub_model import KerasHubModel
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.preprocessing import keras_hub_preprocessing
from keras_moe.models.conversion.published_tensors import PublishedTensors
from keras_moe.models.conversion.timm_names import patches
from keras_moe.models.conversion.weight_rules import (
    Direct,
    Filled,
    Positions,
    Squeezed,
    direct,
    norm,
)

_ACTIVATIONS = {"gelu_approximate": "gelu_tanh"}
# This library's activations beside Keras's.
_OURS = ("gelu_tanh", "quick_gelu")
_hub = keras_hub.models
CLASSES = (
    _hub.ViTBackbone,
    _hub.ViTImageClassifier,
    _hub.CLIPVisionEncoder,
    _hub.CLIPBackbone,
    _hub.SigLIPVisionEncoder,
    _hub.SigLIPBackbone,
)
# A model's name may stand before these.
_ROOTS = (
    "vit_patching_and_embedding/|vit_encoder/|encoder_block_|embedding/|"
    "pre_layer_norm/|post_layer_norm/|layer_norm/|head/|pre_logits/|predictions/|"
    "vision_projection/"
)


def keras_hub_plan(model) -> tuple[PublishedTensors, ConversionPlan]:
    """The weights of a KerasHub model's image side, and the plan for them.

    Args:
        model: one of `CLASSES`.

    Raises:
        ValueError: if the model has parts that this library's has not.
    """
    encoder, around, layers = model, None, None
    if isinstance(model, _hub.ViTImageClassifier):
        encoder, around = model.backbone, model
    elif isinstance(model, (_hub.CLIPBackbone, _hub.SigLIPBackbone)):
        # The towers' weights have the same paths: the text tower is left out here.
        encoder = model.vision_encoder
        layers = [encoder]
        if isinstance(model, _hub.CLIPBackbone):
            around = model
            layers.append(model.vision_projection)
    file = KerasHubModel(model, layers)
    short = {}
    for name in file:
        match = re.search(rf"(?:^|[_/])((?:{_ROOTS}).*)$", name)
        if match:
            short.setdefault(match[1], name)
    if isinstance(encoder, _hub.ViTBackbone):
        plan = _vit(encoder, around, short)
    else:
        plan = _tower(encoder, around, short)
    if layers:
        plan.notes = ("the text tower and the logits' scale are left out",)
    plan.preprocessing, notes = keras_hub_preprocessing(
        getattr(model, "preprocessor", None), plan.arguments["image_shape"][2]
    )
    plan.notes += notes
    policy = encoder.dtype_policy
    if type(policy) is keras.DTypePolicy:
        plan.arguments["dtype"] = policy.name
    return file, plan


def _activation(name):
    activation = _ACTIVATIONS.get(name, name) if isinstance(name, str) else None
    try:
        known = activation in _OURS or callable(keras.activations.get(activation))
    except ValueError:
        known = False
    if activation is None or not known:
        raise ValueError(
            "Expected an activation by a name that Keras knows; received: "
            f"{name!r} in KerasHub's encoder"
        )
    return activation


def _head_activation(classifier):
    """This library's name of the activation of a classifier's outputs."""
    name = activation = classifier.activation
    if callable(activation):
        name = keras.activations.serialize(activation)
    if name not in (None, "linear", "softmax", "sigmoid"):
        raise ValueError(
            "Expected a classifier's activation of None, 'linear', 'softmax' or "
            f"'sigmoid'; received: activation={activation!r} of KerasHub's "
            f"{type(classifier).__name__}"
        )
    return None if name == "linear" else name


class _Names(dict):
    """Full paths by the short ones; a missing one stands for itself."""

    def __missing__(self, key):
        return key


def _block(target, first, second, attention, hidden, output):
    rules = {}
    for place, name in (("mixer_norm", first), ("feed_forward_norm", second)):
        rules.update(norm(f"{target}/{place}", name, "gamma", "beta"))
    rules.update(direct(f"{target}/mlp/hidden", hidden))
    rules.update(direct(f"{target}/mlp/output", output))
    rules.update(_attention(f"{target}/attention", attention))
    return rules


def _attention(place, name):
    rules = {}
    for part in ("query", "key", "value", "attention_output"):
        rules.update(direct(f"{place}/{part}", f"{name}{part}/"))
    return rules


def _resolved(rules, names):
    """The same rules with the full paths of the weights."""
    resolved = {}
    for path, rule in rules.items():
        fields = {
            field: names[getattr(rule, field)]
            for field in ("name", "ids", "bias")
            if getattr(rule, field, None) is not None
        }
        if path.endswith("bias") and fields and fields["name"] not in names.values():
            resolved[path] = Filled()  # Without biases: zeros do the same.
            continue
        resolved[path] = dataclasses.replace(rule, **fields)
    return resolved


def _vit(encoder, classifier, short):
    names = _Names(short)
    embedding = "vit_patching_and_embedding/"
    rules = {
        **patches(f"{embedding}patch_embedding/", encoder.use_patch_bias, False, None),
        "position_embedding/embedding": Positions(
            f"{embedding}position_embedding/embeddings", axes=1
        ),
        **norm("final_norm", "vit_encoder/ln/", "gamma", "beta"),
    }
    if encoder.use_class_token:
        rules["class_token/token"] = Direct(f"{embedding}class_token")
    for i in range(encoder.num_layers):
        block = f"vit_encoder/transformer_block_{i + 1}/"
        rules.update(
            _block(
                f"block_{i}",
                f"{block}ln_1/",
                f"{block}ln_2/",
                f"{block}mha/",
                f"{block}mlp/dense_1/",
                f"{block}mlp/dense_2/",
            )
        )
    task = None
    if classifier is not None:
        pooling = {"token": "class_token", "gap": "average"}
        activation = _head_activation(classifier)
        task = {
            "num_classes": classifier.num_classes,
            "pooling": pooling[classifier.pooling],
            "output_activation": activation,
            "multi_label": activation == "sigmoid",
            "representation_dim": classifier.intermediate_dim,
            "dropout": classifier.dropout,
        }
        policy = classifier.output_dense.dtype_policy
        if type(policy) is keras.DTypePolicy and policy != encoder.dtype_policy:
            task["head_dtype"] = policy.name
        rules.update(direct("predictions", "predictions/"))
        if classifier.intermediate_dim is not None:
            rules.update(direct("pre_logits", "pre_logits/"))
    return ConversionPlan(
        "ViT (KerasHub)",
        "ViTBackbone",
        {
            "image_shape": _image_shape(encoder),
            "patch_size": tuple(encoder.patch_size),
            "hidden_dim": encoder.hidden_dim,
            "num_layers": encoder.num_layers,
            "num_heads": encoder.num_heads,
            "mlp_dim": encoder.mlp_dim,
            "class_token": encoder.use_class_token,
            "activation": "gelu",
            "layer_norm_epsilon": encoder.layer_norm_epsilon,
            "dropout_rate": encoder.dropout_rate,
            "attention_dropout": encoder.attention_dropout,
        },
        _resolved(rules, names),
        task,
    )


def _image_shape(encoder):
    shape = tuple(encoder.image_shape)
    if getattr(encoder, "data_format", "channels_last") == "channels_first":
        return (*shape[1:], shape[0])
    return shape


def _tower(encoder, clip, short):
    names = _Names(short)
    is_clip = isinstance(encoder, _hub.CLIPVisionEncoder)
    embedding = "embedding/"
    positions = Positions(
        f"{embedding}position_embedding/embeddings",
        axes=1,
        ids=f"{embedding}position_ids",
    )
    rules = {
        **patches(f"{embedding}patch_embedding/", not is_clip, False, None),
        "position_embedding/embedding": positions,
        **norm(
            "final_norm",
            "layer_norm/" if is_clip else "post_layer_norm/",
            "gamma",
            "beta",
        ),
    }
    if is_clip:
        rules["class_token/token"] = Squeezed(f"{embedding}class_embedding", axes=2)
        rules.update(norm("embedding_norm", "pre_layer_norm/", "gamma", "beta"))
    kind = ("layer_norm_1", "layer_norm_2", "attention", "dense_1", "dense_2")
    if not is_clip:
        kind = ("layer_norm1", "layer_norm2", "self_attn", "mlp/fc1", "mlp/fc2")
    for i in range(encoder.num_layers):
        places = [f"encoder_block_{i}/{name}/" for name in kind]
        rules.update(_block(f"block_{i}", *places))
    task = None
    if clip is not None:
        rules["predictions/kernel"] = Direct("vision_projection/kernel")
        rules["predictions/bias"] = Filled()
        task = {"num_classes": clip.projection_dim, "pooling": "class_token"}
    elif not is_clip:
        if encoder.layer_norm_epsilon != 1e-6:
            raise ValueError(
                "Expected layer_norm_epsilon=1e-6, which KerasHub's last norm has "
                f"always; received: {encoder.layer_norm_epsilon}"
            )
        # The probe has no name of its own.
        probe = [name for name in names if re.fullmatch(r"head/[^/]+", name)]
        rules.update(
            {
                "pooler/probe": Direct((probe or ["head/variable"])[0]),
                **_attention("pooler/attention", "head/attention/"),
                **norm("pooler/norm", "head/layernorm/", "gamma", "beta"),
                **direct("pooler/mlp/hidden", "head/mlp/fc1/"),
                **direct("pooler/mlp/output", "head/mlp/fc2/"),
                # The pooled vector itself is the output.
                "predictions/kernel": Filled("identity"),
                "predictions/bias": Filled(),
            }
        )
        task = {"num_classes": encoder.hidden_dim, "pooling": "map"}
    return ConversionPlan(
        f"{'CLIP' if is_clip else 'SigLIP'} (KerasHub)",
        "ViTBackbone",
        {
            "image_shape": _image_shape(encoder),
            "patch_size": encoder.patch_size,
            "hidden_dim": encoder.hidden_dim,
            "num_layers": encoder.num_layers,
            "num_heads": encoder.num_heads,
            "mlp_dim": encoder.intermediate_dim,
            "class_token": is_clip,
            "embedding_norm": is_clip,
            "activation": _activation(encoder.intermediate_activation),
            "layer_norm_epsilon": 1e-5 if is_clip else encoder.layer_norm_epsilon,
        },
        _resolved(rules, names),
        task,
    )
