"""KerasHub's ViT and the image towers of its CLIP and SigLIP."""

import re

import keras
import keras_hub

from keras_moe.models.conversion.keras_hub_parts import (
    Names,
    activation_of,
    attention_rules,
    block_rules,
    resolved,
)
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.timm_names import patches
from keras_moe.models.conversion.weight_rules import (
    Direct,
    Filled,
    Positions,
    Squeezed,
    direct,
    norm,
)

_hub = keras_hub.models


def vit_plan(encoder, classifier, names: Names) -> ConversionPlan:
    """The plan for a ViT."""
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
            block_rules(
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
        resolved(rules, names),
        task,
    )


def _image_shape(encoder):
    shape = tuple(encoder.image_shape)
    if getattr(encoder, "data_format", "channels_last") == "channels_first":
        return (*shape[1:], shape[0])
    return shape


def image_tower_plan(encoder, clip, names: Names) -> ConversionPlan:
    """The plan for an image tower of CLIP or SigLIP."""
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
        rules.update(block_rules(f"block_{i}", *places))
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
                **attention_rules("pooler/attention", "head/attention/"),
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
            "activation": activation_of(encoder.intermediate_activation),
            "layer_norm_epsilon": 1e-5 if is_clip else encoder.layer_norm_epsilon,
        },
        resolved(rules, names),
        task,
    )


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
