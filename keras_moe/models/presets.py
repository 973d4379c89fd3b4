"""The front door: models by name."""

import contextlib
import os
from typing import Any

import keras
import keras_hub
from keras_hub.src.utils.preset_utils import (
    check_file_exists,
    get_preset_loader,
    load_json,
)

from keras_moe.checks import check_argument_names, check_bool
from keras_moe.models.builtin import builtin_presets, builtin_task_config
from keras_moe.models.classifying import with_new_arguments
from keras_moe.models.conversion import (
    convert,
    is_convertible,
    model_arguments,
    open_source,
)
from keras_moe.models.description import Description
from keras_moe.models.mixer import MixerBackbone, MixerImageClassifier
from keras_moe.models.overrides import apply_overrides, override_names
from keras_moe.models.preset_folder import readable
from keras_moe.models.preset_loading import (
    argument_names,
    check_preset,
    explained,
    split_arguments,
)
from keras_moe.models.vit import ViTBackbone, ViTImageClassifier
from keras_moe.models.weights_checksums import compare_preset

BACKBONES = {cls.__name__: cls for cls in (ViTBackbone, MixerBackbone)}
IMAGE_CLASSIFIERS = {
    cls.__name__: cls for cls in (ViTImageClassifier, MixerImageClassifier)
}
TASKS = ("backbone", "image_classifier")
# The arguments of a task that its costs follow from.
_TASK_SIZES = (
    "num_classes",
    "pooling",
    "pooling_query_key_norm",
    "pooled_norm",
    "representation_dim",
    "head",
    "head_position",
)


def list_presets() -> dict[str, str]:
    """The built-in presets: their names, with a line about each.

    Returns:
        A dict from name to description.

    Example:

    >>> from keras_moe import models
    >>> "vmoe_b32" in models.list_presets()
    True
    """
    return {name: preset["description"] for name, preset in builtin_presets().items()}


def from_preset(
    preset: str,
    num_classes: int | None = None,
    task: str | None = None,
    load_weights: bool = True,
    **overrides,
) -> Any:
    """Makes a model from a preset, ready for `fit`.

    With `num_classes` it is an image classifier with a new head. Without, a preset
    that carries a trained task gives that task, and any other its backbone.

    Args:
        preset: the name of a built-in preset (see `list_presets`; an architecture
            without weights), a local folder, or an `hf://`, `kaggle://` or
            `gs://` handle; or weights that others have published, see `convert`.
        num_classes: classes of a new head.
        task: `"backbone"` or `"image_classifier"` to say it outright.
        load_weights: load the preset's weights, if it has any.
        **overrides: any argument of the backbone or the task, such as
            `image_shape=(384, 384, 3)`, `num_experts=8`, `capacity_factor=2.0`.

    Returns:
        A compiled task, or a backbone.

    Raises:
        ValueError: if the preset is unknown or not whole, an argument is unknown, or
            the arguments contradict each other.

    Example:

    >>> from keras_moe import models
    >>> model = models.from_preset("vmoe_digits", num_classes=10, num_experts=4)
    >>> model.output_shape
    (None, 10)
    """
    check_bool("load_weights", load_weights)
    if task is not None and task not in TASKS:
        raise ValueError(
            f"Expected task to be None or one of {TASKS}; received: task={task!r}"
        )
    if task == "backbone" and num_classes is not None:
        raise ValueError(
            "Expected no num_classes for task='backbone'; "
            f"received: num_classes={num_classes}"
        )
    if num_classes is not None:
        overrides["num_classes"] = num_classes
    builtin = builtin_presets().get(preset) if isinstance(preset, str) else None
    if builtin:
        backbone_cls, classifier_cls = _classes(builtin)
        has_task = False
    elif is_convertible(preset):
        return convert(preset, task=task, load_weights=load_weights, **overrides)[0]
    else:
        preset = check_preset(preset)
        with explained(preset):
            backbone_cls = get_preset_loader(preset).check_backbone_class()
            has_task = check_file_exists(preset, "task.json")
        classifier_cls = keras_hub.models.ImageClassifier
        for cls in IMAGE_CLASSIFIERS.values():
            if cls.backbone_cls is backbone_cls:
                classifier_cls = cls
    if task is None:
        wants_task = num_classes is not None or has_task
        task = "image_classifier" if wants_task else "backbone"
    cls = backbone_cls if task == "backbone" else classifier_cls
    return cls.from_preset(preset, load_weights=load_weights, **overrides)


def describe(preset: Any, num_classes: int | None = None, **overrides) -> Description:
    """What a model costs, from its configuration: no weight is allocated.

    FLOPs count 2 per multiply-add of every matmul of one image's forward pass with
    no token dropped; normalisations, activations and softmaxes are left out.

    Args:
        preset: as for `from_preset`; or a model of this library. Of weights that
            others have published, names and shapes are read alone; those of a folder
            with checksums are read once, about a second per GB, to compare them.
        num_classes: count a new head; without, a saved or published one is counted
            as it is.
        **overrides: any argument of the backbone or the task.

    Returns:
        A `Description`: `parameters`, `active_parameters` (those that one token
        meets), `gflops` per image, and the same for each of its `parts`.

    Raises:
        ValueError: as `from_preset`.

    Example:

    >>> from keras_moe import models
    >>> description = models.describe("vmoe_h14")
    >>> description.parameters > 5 * description.active_parameters
    True
    """
    overrides.pop("dtype", None)  # Counts are the same under each.
    if num_classes is not None:
        overrides["num_classes"] = num_classes
    if isinstance(preset, keras.Model) and not is_convertible(preset):
        return _describe_model(preset, overrides)
    with _explained_folder(preset):
        backbone_cls, config, classifier_cls, task, name = _architecture(
            preset, overrides
        )
        parts, num_tokens, dim = backbone_cls.describe_parts(**config)
        if "num_classes" in task:
            parts += classifier_cls.describe_parts(config, num_tokens, dim, **task)
        if _is_folder(preset):
            compare_preset(readable(preset))
    return Description(os.fspath(name), num_tokens, parts, dim)


def unbuilt_blocks(preset: Any, **overrides) -> list[keras.layers.Layer]:
    """The blocks of a model's backbone as layers without weights.

    Args:
        preset: as for `describe`.
        **overrides: any argument of the backbone or the task.

    Returns:
        An `EncoderBlock` or `MoEEncoderBlock` for each block.

    Raises:
        ValueError: as `describe`.

    Example:

    >>> from keras_moe.models.presets import unbuilt_blocks
    >>> unbuilt_blocks("vmoe_h14")[31].feed_forward.experts.num_experts
    32
    """
    if isinstance(preset, keras.Model) and not is_convertible(preset):
        backbone, config = _backbone_of(preset, overrides)
        backbone_cls = type(backbone)
        return backbone_cls.unbuilt_blocks(**config)
    with _explained_folder(preset):
        backbone_cls, config, *_ = _architecture(preset, overrides)
        return backbone_cls.unbuilt_blocks(**config)


def _explained_folder(preset):
    """Errors that name the preset, where it is no built-in one."""
    if _is_builtin(preset) or is_convertible(preset):
        return contextlib.nullcontext()
    return explained(preset)


def _is_builtin(preset):
    return isinstance(preset, str) and preset in builtin_presets()


def _is_folder(preset):
    """Whether a preset that was found is a folder of this machine."""
    elsewhere = _is_builtin(preset) or is_convertible(preset)
    return not elsewhere and "://" not in str(preset)


def _architecture(preset, overrides):
    """Classes and arguments of backbone and task, and the preset's name."""
    builtin = builtin_presets().get(preset) if isinstance(preset, str) else None
    if builtin:
        backbone_cls, classifier_cls = _classes(builtin)
        config = dict(builtin["config"])
        task = builtin_task_config(builtin, overrides)
    elif is_convertible(preset):
        file, plan = open_source(preset, overrides, load_weights=False)
        file.close()
        backbone_cls, config, classifier_cls, task, *_ = model_arguments(
            plan, overrides
        )
        overrides, task = {}, task or {}
        preset = preset if isinstance(preset, (str, os.PathLike)) else file.path
    else:
        folder = check_preset(preset)
        loader = get_preset_loader(folder)
        backbone_cls = loader.check_backbone_class()
        if backbone_cls not in BACKBONES.values():
            raise ValueError(
                f"Expected a preset of one of {sorted(BACKBONES)}; "
                f"received: {backbone_cls.__name__}"
            )
        classifier_cls = next(
            cls
            for cls in IMAGE_CLASSIFIERS.values()
            if cls.backbone_cls is backbone_cls
        )
        config, task = dict(loader.config["config"]), {}
        names = [*override_names(backbone_cls), "name", "trainable", "dtype"]
        check_argument_names(config, names, backbone_cls.__name__)
        if check_file_exists(folder, "task.json"):
            saved = load_json(folder, "task.json")["config"]
            task = with_new_arguments({**saved, **overrides})
    backbone_overrides, task_overrides = split_arguments(
        classifier_cls, overrides, is_made=False
    )
    config.pop("dtype", None)
    config = apply_overrides(backbone_cls, config, backbone_overrides)
    task = {name: task[name] for name in _TASK_SIZES if name in task} | task_overrides
    return backbone_cls, config, classifier_cls, task, preset


def _describe_model(model, overrides):
    backbone, config = _backbone_of(model, overrides)
    parts, num_tokens, dim = type(backbone).describe_parts(**config)
    if model is not backbone:
        task = {name: getattr(model, name) for name in _TASK_SIZES}
        parts += type(model).describe_parts(config, num_tokens, dim, **task)
    return Description(model.name, num_tokens, parts, dim)


def _backbone_of(model, overrides):
    """A model's backbone, and the arguments that it was made with."""
    if overrides:
        raise ValueError(
            f"Expected no further arguments with a model; received: {overrides}"
        )
    backbone = getattr(model, "backbone", model)
    if type(backbone) not in BACKBONES.values():
        raise ValueError(
            f"Expected a model with one of {sorted(BACKBONES)}; "
            f"received: {type(model).__name__}"
        )
    names = [*argument_names(type(backbone))]
    config = {k: v for k, v in backbone.get_config().items() if k in names}
    config.pop("dtype", None)
    return backbone, config


def _classes(builtin):
    return BACKBONES[builtin["backbone"]], IMAGE_CLASSIFIERS[builtin["task"]]
