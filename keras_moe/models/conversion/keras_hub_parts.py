"""The names and rules that the plans for KerasHub's models share."""

import dataclasses
import re

import keras

from keras_moe.models.conversion.weight_rules import Filled, direct, norm

_ACTIVATIONS = {"gelu_approximate": "gelu_tanh"}
# This library's activations beside Keras's.
_OURS = ("gelu_tanh", "quick_gelu")
# A model's name may stand before these.
_ROOTS = (
    "vit_patching_and_embedding/|vit_encoder/|encoder_block_|embedding/|"
    "pre_layer_norm/|post_layer_norm/|layer_norm/|head/|pre_logits/|predictions/|"
    "vision_projection/|text_projection/"
)


class Names(dict):
    """The paths of a model's weights by short ones; a missing one stands for itself."""

    def __init__(self, paths):
        super().__init__()
        for name in paths:
            match = re.search(rf"(?:^|[_/])((?:{_ROOTS}).*)$", name)
            if match:
                self.setdefault(match[1], name)

    def __missing__(self, key):
        return key


def activation_of(name):
    """This library's name of an encoder's activation."""
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


def block_rules(target, first, second, attention, hidden, output):
    """Rules of an encoder block, from the names of its parts."""
    rules = {}
    for place, name in (("mixer_norm", first), ("feed_forward_norm", second)):
        rules.update(norm(f"{target}/{place}", name, "gamma", "beta"))
    rules.update(direct(f"{target}/mlp/hidden", hidden))
    rules.update(direct(f"{target}/mlp/output", output))
    rules.update(attention_rules(f"{target}/attention", attention))
    return rules


def attention_rules(place, name):
    """Rules of an attention, from the start of its weights' names."""
    rules = {}
    for part in ("query", "key", "value", "attention_output"):
        rules.update(direct(f"{place}/{part}", f"{name}{part}/"))
    return rules


def resolved(rules, names):
    """The same rules with the full paths of the weights."""
    full = {}
    for path, rule in rules.items():
        fields = {
            field: names[getattr(rule, field)]
            for field in ("name", "ids", "bias")
            if getattr(rule, field, None) is not None
        }
        if path.endswith("bias") and fields and fields["name"] not in names.values():
            full[path] = Filled()  # Without biases: zeros do the same.
            continue
        full[path] = dataclasses.replace(rule, **fields)
    return full
