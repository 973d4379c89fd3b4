"""Arguments of an image classifier, from its source and overrides."""

import dataclasses
from typing import Any

from keras_moe.models.conversion.plan import HEAD, POOLING
from keras_moe.models.image_preprocessor import ImagePreprocessor
from keras_moe.models.model_sources import (
    ARCHITECTURE,
    PUBLISHED,
    SAVED,
    ModelSource,
    TaskConfig,
)
from keras_moe.models.quantization import new_head_dtype


def classifier_config(
    source: ModelSource, overrides: dict[str, Any], backbone_config: dict[str, Any]
) -> TaskConfig:
    """The arguments of an image classifier, from its source and overrides.

    With `num_classes` the head is new, and arguments of the source's head are dropped.
    """
    is_new = "num_classes" in overrides
    if not is_new and not source.is_trained:
        raise ValueError(
            f"Expected num_classes, since {source.name!r} carries no trained task; "
            "received: num_classes=None"
        )
    if not is_new and overrides.get("head") is not None:
        raise ValueError(
            "Expected num_classes beside a new head; received: "
            f"head={overrides['head']}"
        )
    config, new_weights = dict(source.task_config()), ()
    preprocessor = _preprocessor(source, config, backbone_config)
    if source.kind == ARCHITECTURE:
        config = _fitted(config, source, overrides, backbone_config)
    elif is_new:
        adapt = {SAVED: _new_head, PUBLISHED: _without_head}[source.kind]
        config, new_weights = adapt(config, overrides)
    config.update({"preprocessor": preprocessor, **overrides})
    if is_new and isinstance(config["preprocessor"], ImagePreprocessor):
        config["preprocessor"] = _renamed(config, source, overrides)
    return TaskConfig(config, new_weights)


def _preprocessor(source, config, backbone_config):
    """The source's preprocessor for images of the model's size, or the default one."""
    shape = backbone_config["image_shape"]
    if "preprocessor" not in config:
        return ImagePreprocessor(shape, class_names=source.class_names)
    preprocessor = config["preprocessor"]
    if isinstance(preprocessor, ImagePreprocessor):
        return preprocessor.adapted(shape)
    return preprocessor


def _renamed(config, source, overrides):
    """The preprocessor without the names of other classes than the new head's."""
    preprocessor = config["preprocessor"]
    if "preprocessor" in overrides:
        return preprocessor
    if source.kind == SAVED:
        # The classes are others, even where there are as many.
        return dataclasses.replace(preprocessor, class_names=None)
    return preprocessor.adapted(num_classes=config["num_classes"])


def _fitted(config, source, overrides, backbone_config):
    """A preset's arguments of the head that fit what is overridden.

    A representation layer as wide as the backbone follows its width. It and the bias of
    V-MoE's dense head are left out where a final muMoE takes this head's place.
    """
    config = dict(config)
    hidden_dim = source.config.get("hidden_dim")
    if config.get("representation_dim") == hidden_dim:
        config["representation_dim"] = backbone_config.get("hidden_dim")
    if overrides.get("head") and overrides.get("head_position", "final") == "final":
        # Its experts have biases of their own.
        config.pop("head_bias", None)
        config.pop("representation_dim", None)
    return config


def _new_head(config, overrides):
    """A saved task's arguments for a head of other classes."""
    config = dict(config)
    # A quantised head's layers are not those of a new one.
    config["head_dtype"] = new_head_dtype(config.get("head_dtype"))
    if config.get("head") and config.get("head_position") == "final":
        # The head has as many units as there are classes now; edits concerned others.
        head = config["head"]
        units = {"units": overrides["num_classes"], "edited_outputs": ()}
        config["head"] = {**head, "config": {**head["config"], **units}}
    return config, (*HEAD, *POOLING)


def _without_head(config, overrides):
    """Published arguments for a new head on the source's pooling, if that stays."""
    config, new_weights = dict(config), HEAD
    config.pop("representation_dim", None)
    theirs = config.get("pooling")
    if overrides.get("pooling", theirs) != theirs or "pooled_norm" in overrides:
        new_weights = (*HEAD, *POOLING)
        config.pop("pooled_norm", None)
    return config, new_weights
