"""The plan for a model of pairs, made of the plans for its two towers."""

from typing import Any

import numpy as np

from keras_moe.losses.temperature import TEMPERATURES
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.weight_rules import Filled, Scalar

_PROJECTION = ("projection_dim", "projection_bias")


def pair_plan(
    file: Any,
    image: ConversionPlan,
    text: ConversionPlan,
    log_scale: str,
    bias: str | None = None,
) -> ConversionPlan:
    """The plan for a `CLIPBackbone`."""
    task = dict(image.task_arguments or {})
    pooling = task.pop("pooling", None)
    size = task.pop("num_classes", image.arguments["hidden_dim"])
    if task:
        raise ValueError(
            f"Expected an image tower of {file.path} whose pooled vector is projected "
            f"at once; received: {task}"
        )
    rules = {}
    for path, rule in image.rules.items():
        rules["image/" + path.replace("predictions/", "projection/")] = rule
    rules.update({f"text/{path}": rule for path, rule in text.rules.items()})
    is_pooled = rules.get("image/projection/kernel", Filled("identity")) == Filled(
        "identity"
    )
    text_arguments = dict(text.arguments)
    shared = {"projection_dim": None}
    if is_pooled:
        for name in ("kernel", "bias"):
            rules.pop(f"image/projection/{name}", None)
    else:
        _add_projection(rules, text_arguments, shared, size, file)
    rules["logit_scale/log_scale"] = _scalar(file, log_scale)
    temperature = TEMPERATURES["clip" if bias is None else "siglip"]
    if bias is not None:
        rules["logit_scale/bias"] = _scalar(file, bias)
    image_arguments = dict(image.arguments)
    dtypes = {part.pop("dtype", None) for part in (image_arguments, text_arguments)}
    if len(dtypes) > 1:
        raise ValueError(
            f"Expected towers of one dtype policy in {file.path}; received: {dtypes}"
        )
    if None not in dtypes:
        (shared["dtype"],) = dtypes
    used = {name for rule in rules.values() for name in rule.names}
    left = {**(image.ignored or {}), **(text.ignored or {})}
    return ConversionPlan(
        image.scheme,
        "CLIPBackbone",
        {
            "image": image_arguments,
            "text": text_arguments,
            "image_pooling": pooling if pooling == "map" else None,
            "temperature": temperature._asdict(),
            **shared,
        },
        rules,
        ignored={name: reason for name, reason in left.items() if name not in used},
        notes=tuple(dict.fromkeys((*image.notes, *text.notes))),
        preprocessing=image.preprocessing,
    )


def _add_projection(rules, text, shared, size, file):
    """Makes the two projections arguments of the pair."""
    if text.get("projection_dim") != size:
        raise ValueError(
            f"Expected projections of one size in {file.path}; received: images to "
            f"{size}, texts to {text.get('projection_dim')}"
        )
    biases = [f"{place}/projection/bias" for place in ("image", "text")]
    has_bias = any(not isinstance(rules.get(x, Filled()), Filled) for x in biases)
    for name in biases:
        # A bias of zeros stands beside another tower's own.
        rule = rules.pop(name, Filled())
        if has_bias:
            rules[name] = rule
    for name in _PROJECTION:
        text.pop(name, None)
    shared.update(projection_dim=size, projection_bias=has_bias)


def _scalar(file, name):
    shape = file[name].shape if name in file else ()
    if np.prod(shape, dtype="int64") != 1:
        raise ValueError(
            f"Expected one number as {name!r} in {file.path}; received: shape={shape}"
        )
    return Scalar(name, shape)
