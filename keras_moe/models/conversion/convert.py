"""Weights of others become a model of ours, one tensor at a time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import keras_hub
import numpy as np

from keras_moe.checks import check_pair
from keras_moe.layers import fold_channels, resize_positions
from keras_moe.models.conversion.layouts import Filled, PatchKernel, Plan
from keras_moe.models.conversion.report import (
    ConversionReport,
    ConvertedWeight,
    licence,
)
from keras_moe.models.conversion.sources import open_source
from keras_moe.models.conversion.tensor_file import FLOATS
from keras_moe.models.image_preprocessor import ImagePreprocessor
from keras_moe.models.overrides import apply_overrides, nested_config
from keras_moe.models.preset_loading import split_arguments

# Parts of a classifier, by the start of their weights' paths: what a new head replaces,
# and what a backbone has not.
_HEAD = ("predictions/", "pre_logits/")
_POOLING = ("pooler/", "pooled_norm/")
_KERNEL, _POSITIONS = "patch_embedding/kernel", "position_embedding/embedding"


def convert(
    source: Any,
    num_classes: int | None = None,
    task: str | None = None,
    load_weights: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
    **overrides,
) -> tuple[Any, ConversionReport]:
    """Makes a model of ours from weights that others have published.

    Every tensor of the source must be used or be known not to be the image model's,
    and every weight of the model must be filled; names, shapes and sizes are checked
    before anything is read.

    One tensor at a time is in memory beside the model, which is float32 unless `dtype`
    says otherwise: files of float32 need at most 1.3 times their size. Files of half
    precision need more, since the model alone is twice their size; and so does a
    KerasHub model, or a preset of one, since both models are in memory.

    Images are in [-1, 1], as for all our models: where the source's config, or CLIP's
    habit, says of another mean and standard deviation, they become part of the patch
    embedding. A KerasHub model takes the images that it took. A classifier's
    `preprocessor` is an `ImagePreprocessor` with what the source says of its images and
    of its classes' names.

    Args:
        source: a V-MoE or Soft MoE checkpoint (the prefix of its `.index` and `.data`
            files, also `gs://vmoe_checkpoints/...`); a ViT or MLP-Mixer `.npz` of
            Google's releases (also `gs://vit_models/...`, `gs://mixer_models/...`); a
            folder or `hf://` of a timm ViT or Mixer, of OpenCLIP, or of
            transformers' CLIP or SigLIP, with `.safetensors` weights, or such a file;
            or a KerasHub ViT, CLIP or SigLIP: a model or a preset.
        num_classes: classes of a new head. Without, the source's head is taken: its
            classes, the embedding of CLIP and SigLIP, or none.
        task: `"backbone"` or `"image_classifier"` to say it outright.
        load_weights: False for the architecture alone.
        progress: called with (done, all, name) before each weight.
        **overrides: any argument of the backbone or the task. With another
            `image_shape` or `patch_size` positions and the patch kernel are resized,
            and channels folded (a Mixer keeps its number of patches). The number of
            heads, CLIP's `activation` and a V-MoE's `router`,
            `num_selected_experts` and `capacity_factor` are to be given where the
            source does not tell them.

    Returns:
        The model, a compiled task or a backbone, and a `ConversionReport`.

    Raises:
        ImportError: without the package that reads the source:
            `pip install 'keras-moe[convert]'`.
        ValueError: naming file and tensor, if a file is not whole, a tensor is
            missing, left over or of another shape, or the source is of a kind that is
            refused.

    Example:

    >>> import keras_hub
    >>> from keras_moe import models
    >>> hub = keras_hub.models.ViTBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, num_layers=1, num_heads=2,
    ...     hidden_dim=8, mlp_dim=16,
    ... )
    >>> backbone, report = models.convert(hub)
    >>> type(backbone).__name__, report.scheme
    ('ViTBackbone', 'ViT (KerasHub)')
    """
    if num_classes is not None:
        overrides["num_classes"] = num_classes
    return convert_to(None, source, overrides, task, load_weights, progress)


def convert_to(
    cls: type | None,
    source: Any,
    overrides: dict,
    task: str | None = None,
    load_weights: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[Any, ConversionReport]:
    """`convert` to a model of a class: a backbone's or a task's, or None for any.

    Raises:
        ValueError: as `convert`, and if the source is no model of the class.
    """
    file, plan = open_source(source, overrides, load_weights)
    with file:
        arguments = model_arguments(plan, overrides, task, cls)
        model, replaced = arguments.build(), arguments.replaced
        weights = [w for w in model.weights if keras.backend.is_float_dtype(w.dtype)]
        steps, new, ignored = _match(file, plan, weights, replaced)
        done, nbytes = [], 0
        for number, (weight, layout, shape) in enumerate(steps):
            if not load_weights:
                break
            if progress is not None:
                progress(number, len(steps), weight.path)
            layout = _resized(layout, plan, model)
            value = layout.make(functools.partial(_read, file), shape)
            value, how = _fit(value, weight, plan, model)
            value = np.asarray(value, "float32", order="C")
            if not _is_finite(value):
                raise ValueError(
                    f"Expected finite values for {weight.path!r}; received others, "
                    f"made of {list(layout.names)} in {file.path}"
                )
            weight.assign(value)
            del value
            sources = {name: file[name].shape for name in layout.names}
            nbytes += sum(file[name].nbytes for name in layout.names)
            how = how or _how(layout)
            done.append(ConvertedWeight(weight.path, tuple(weight.shape), sources, how))
        label = source if isinstance(source, str) else file.path
    notes = list(plan.notes)
    normalization = getattr(plan.layouts.get(_KERNEL), "normalization", None)
    if normalization is not None:
        notes.append(
            "images are in [-1, 1]: the source's normalisation, "
            f"mean={normalization.mean} and std={normalization.std} of [0, 1], has "
            "become part of the patch embedding"
        )
    report = ConversionReport(
        str(label),
        plan.scheme,
        licence(plan.scheme),
        plan.backbone,
        plan.arguments,
        done,
        new,
        ignored,
        notes,
        nbytes,
    )
    return model, report


def _is_finite(array):
    """Whether all values are numbers that float32 holds."""
    if not array.size:
        return True
    largest = float(np.finfo("float32").max)
    # A NaN is neither; extremes need no memory.
    return -largest <= float(array.min()) and float(array.max()) <= largest


def _read(file, name, rows=None):
    """The values of a tensor; refuses what is no number."""
    array = file.read(name, rows)
    if not _is_finite(array):
        raise ValueError(
            f"Expected finite values of float32's range as {name!r} in "
            f"{file[name].file}; received NaN, infinity or a larger value"
        )
    return array


class ModelArguments(NamedTuple):
    """What a model is made with.

    Attributes:
        backbone_cls: its backbone's class.
        backbone: arguments of that.
        classifier_cls: the class of classifiers on it.
        task: arguments of that; None for a backbone alone.
        replaced: the starts of the paths of weights that the source does not fill.
        preprocessor: an `ImagePreprocessor` as the source has it, or None.
    """

    backbone_cls: type
    backbone: dict
    classifier_cls: type
    task: dict | None
    replaced: tuple[str, ...]
    preprocessor: ImagePreprocessor | None = None

    def build(self) -> Any:
        """The model with initial weights."""
        backbone = self.backbone_cls(**self.backbone)
        if self.task is None:
            return backbone
        task = dict(self.task)
        if self.preprocessor is not None:
            preprocessor = self.preprocessor.adapted(
                backbone.image_shape, task["num_classes"]
            )
            task.setdefault("preprocessor", preprocessor)
        return self.classifier_cls(backbone, **task)


def model_arguments(
    plan: Plan, overrides: dict, task: str | None = None, cls: type | None = None
) -> ModelArguments:
    """The arguments of the model that a plan and its overrides make.

    Raises:
        ValueError: if they contradict each other, or the plan's model is none of `cls`.
    """
    # Not above: that module imports this one.
    from keras_moe.models.presets import BACKBONES, IMAGE_CLASSIFIERS, TASKS

    if task is not None and task not in TASKS:
        raise ValueError(
            f"Expected task to be None or one of {TASKS}; received: task={task!r}"
        )
    backbone_cls = BACKBONES[plan.backbone]
    classifier_cls = next(
        c for c in IMAGE_CLASSIFIERS.values() if c.backbone_cls is backbone_cls
    )
    if cls is not None:
        is_task = issubclass(cls, keras_hub.models.Task)
        wanted = cls.backbone_cls if is_task else cls
        if not issubclass(wanted, backbone_cls):
            raise ValueError(
                f"Expected weights of a {wanted.__name__} for {cls.__name__}; "
                f"received: those of a {plan.backbone}, by the names of {plan.scheme}"
            )
        backbone_cls, task = wanted, "backbone"
        if is_task:
            classifier_cls, task = cls, "image_classifier"
    overrides = dict(overrides)
    activation = _pop_activation(overrides)
    of_backbone, of_task = split_arguments(classifier_cls, overrides)
    of_backbone.update(activation)
    if task is None:
        wants = "num_classes" in of_task or plan.task_arguments is not None
        task = "image_classifier" if wants else "backbone"
    if "backbone" in of_task:
        raise ValueError(
            "Expected no backbone=, since the weights make one; received: "
            f"backbone={of_task['backbone']!r}"
        )
    if task == "backbone":
        own = {k: of_task.pop(k) for k in ("name", "trainable") if k in of_task}
        if of_task:
            name, value = next(iter(of_task.items()))
            raise ValueError(
                "Expected arguments of a backbone for weights without a head; "
                f"received: {name}={value!r}"
            )
        of_backbone.update(own)
    saved = nested_config(backbone_cls, plan.arguments)
    router = (saved.get("moe") or {}).get("router")
    if of_backbone.get("router") == router:
        of_backbone.pop("router", None)
    arguments = apply_overrides(backbone_cls, saved, of_backbone)
    arguments = backbone_cls.config_for_weights(saved, arguments)
    if task == "backbone":
        parts = (*_HEAD, *_POOLING)
        return ModelArguments(backbone_cls, arguments, classifier_cls, None, parts)
    task_arguments = dict(plan.task_arguments or {})
    replaced = ()
    if "num_classes" in of_task:
        replaced = _HEAD
        task_arguments.pop("representation_dim", None)
        theirs = task_arguments.get("pooling")
        if of_task.get("pooling", theirs) != theirs or "pooled_norm" in of_task:
            replaced = (*_HEAD, *_POOLING)
            task_arguments.pop("pooled_norm", None)
    elif plan.task_arguments is None:
        raise ValueError(
            "Expected num_classes, since the weights have no head; received: "
            "num_classes=None"
        )
    task_arguments.update(of_task)
    preprocessor = None
    if plan.preprocessing is not None:
        shape = plan.arguments["image_shape"]
        preprocessor = ImagePreprocessor(shape, **plan.preprocessing)
    return ModelArguments(
        backbone_cls, arguments, classifier_cls, task_arguments, replaced, preprocessor
    )


def _pop_activation(overrides):
    """The backbone's activation: the task has an argument of the same name."""
    if overrides.get("activation") in (None, "softmax", "sigmoid"):
        return {}
    return {"activation": overrides.pop("activation")}


def _match(file, plan, weights, replaced):
    """Who becomes what, and what is left: all is compared, nothing is read."""
    steps, new, used = [], [], set()
    for weight in weights:
        if weight.path.startswith(replaced):
            new.append(weight.path)
            continue
        layout = plan.layouts.get(weight.path)
        if layout is None:
            raise ValueError(
                f"Expected a tensor of {file.path} for each weight; received: none for "
                f"{weight.path!r} with shape {tuple(weight.shape)}"
            )
        shape = _source_shape(weight, plan)
        for name, expected in layout.shapes(shape).items():
            _check_tensor(file, name, expected, weight)
        used.update(layout.names)
        steps.append((weight, layout, shape))
    ignored = dict(plan.ignored or {})
    for path, layout in plan.layouts.items():
        if path.startswith(replaced):
            for name in layout.names:
                if name not in used:
                    ignored.setdefault(name, "of a head that is not wanted")
    left = sorted(set(file) - used - set(ignored))
    if left:
        raise ValueError(
            "Expected a weight of ours for each tensor; received: "
            f"{len(left)} left over in {file[left[0]].file}: {left[:5]}"
        )
    return steps, new, {name: ignored[name] for name in sorted(ignored) if name in file}


def _check_tensor(file, name, expected, weight):
    if name not in file:
        raise ValueError(
            f"Expected the tensor {name!r} for {weight.path!r} in {file.path}; "
            "received: none"
        )
    info = file[name]
    if info.shape != tuple(expected):
        raise ValueError(
            f"Expected shape {tuple(expected)} of {name!r} for {weight.path!r} in "
            f"{info.file}; received: shape={info.shape}"
        )
    if info.dtype not in FLOATS and not name.endswith("position_ids"):
        raise ValueError(
            f"Expected floats as {name!r} for {weight.path!r} in {info.file}; "
            f"received: dtype={info.dtype}"
        )


def _source_shape(weight, plan):
    """The shape of a weight in a model of the source's image size."""
    shape = tuple(weight.shape)
    channels = plan.arguments["image_shape"][2]
    if weight.path == _KERNEL:
        return (*_patch_size(plan), channels, shape[3])
    if weight.path == _POSITIONS:
        rows, columns = _grid(plan)
        class_token = plan.arguments.get("class_token", False)
        return (1, rows * columns + class_token, shape[2])
    return shape


def _patch_size(plan):
    return check_pair("patch_size", plan.arguments["patch_size"])


def _grid(plan):
    height, width = _patch_size(plan)
    image = plan.arguments["image_shape"]
    return image[0] // height, image[1] // width


def _resized(layout, plan, model):
    """The layout of the patch embedding for patches of our model's size."""
    backbone = getattr(model, "backbone", model)
    embedding = backbone.get_layer("patch_embedding")
    if not isinstance(layout, PatchKernel) or embedding.patch_size == _patch_size(plan):
        return layout
    return dataclasses.replace(
        layout,
        patch_size=embedding.patch_size,
        interpolation=embedding.interpolation,
    )


def _fit(value, weight, plan, model):
    """`value` for our image size, and what was done for that."""
    if weight.path == _KERNEL:
        how, channels, size = [], weight.shape[2], tuple(weight.shape[:2])
        if size != _patch_size(plan):
            how.append(f"resized from {_patch_size(plan)} to {size}")
        if value.shape[2] != channels:
            value = fold_channels(value, channels)
            how.append(f"folded to {channels} channels")
        return value, ", ".join(how)
    if weight.path == _POSITIONS:
        backbone = getattr(model, "backbone", model)
        if backbone.grid != _grid(plan):
            kind = backbone.get_config()["position_interpolation"]
            table = resize_positions(value, _grid(plan), backbone.grid, kind)
            return table, f"resized from {_grid(plan)} to {backbone.grid}, {kind}"
    return value, None


def _how(layout):
    if isinstance(layout, Filled):
        return layout.value
    if getattr(layout, "normalization", None) is not None:
        return "with the images' normalisation"
    if getattr(layout, "scale", None):
        return "with LayerScale"
    if getattr(layout, "parts", 1) > 1:
        return f"part {layout.part + 1} of {layout.parts}"
    return type(layout).__name__.lower()
