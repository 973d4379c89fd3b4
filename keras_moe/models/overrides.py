"""Overrides find their owner here: the backbone, or the task around it."""

from typing import Any

from keras_moe.checks import argument_names, check_argument_names

# Arguments of every model, which go to the outermost one.
_OF_MODELS = ("name", "trainable")


def override_names(backbone_cls: type) -> list[str]:
    """The names of all overrides that a backbone takes.

    Args:
        backbone_cls: class of the backbone.
    """
    return argument_names(backbone_cls)


def apply_overrides(
    backbone_cls: type, config: dict, overrides: dict[str, Any]
) -> dict[str, Any]:
    """The config of a backbone with some of its arguments replaced.

    Args:
        backbone_cls: class of the backbone.
        config: arguments of the backbone.
        overrides: arguments that replace some of them. Another `router` drops the
            saved `router_options`, which are another's.

    Raises:
        ValueError: if an override is unknown; the nearest names are listed.
    """
    names = [*override_names(backbone_cls), *_OF_MODELS]
    check_argument_names({**config, **overrides}, names, backbone_cls.__name__)
    options = {}
    if overrides.get("router", config.get("router")) != config.get("router"):
        options = {"router_options": None}
    return {**config, **options, **overrides}


def config_for_weights(backbone_cls: type, saved: dict, config: dict) -> dict:
    """A config that the weights of a saved one still fit.

    Args:
        backbone_cls: class of the backbone.
        saved: config that the weights were saved with.
        config: config of the new model.
    """
    overrides = {k: v for k, v in config.items() if k not in saved or saved[k] != v}
    return {**saved, **backbone_cls.overrides_for_weights(saved, overrides)}


def split_overrides(
    backbone_cls: type,
    task_cls: type | None,
    overrides: dict[str, Any],
    counts_only: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits overrides into those of the backbone and those of the task around it.

    A name that both have is the task's: `name`, `trainable`.

    Args:
        backbone_cls: class of the backbone.
        task_cls: class of the task, or None for a backbone alone.
        overrides: arguments by name.
        counts_only: whether no model is made, which has a name, for example: such
            arguments are refused.

    Returns:
        `(of_backbone, of_task)`.

    Raises:
        ValueError: if an override belongs to neither; the nearest names are listed.

    Example:

    >>> from keras_moe.models import ViTBackbone, ViTImageClassifier
    >>> from keras_moe.models.overrides import split_overrides
    >>> overrides = {"activation": "gelu", "output_activation": "softmax"}
    >>> split_overrides(ViTBackbone, ViTImageClassifier, overrides)
    ({'activation': 'gelu'}, {'output_activation': 'softmax'})
    """
    own = [] if task_cls is None else argument_names(task_cls)
    of_models = [*_OF_MODELS, "compile"] if own else list(_OF_MODELS)
    if counts_only:
        own = [name for name in own if name not in ("backbone", "preprocessor")]
        of_models = []
    elif own:
        own += of_models
    known = [*own, *override_names(backbone_cls), *of_models]
    check_argument_names(overrides, known, (task_cls or backbone_cls).__name__)
    of_task = {name: value for name, value in overrides.items() if name in own}
    of_backbone = {name: x for name, x in overrides.items() if name not in own}
    return of_backbone, of_task
