"""The front door: models by name, from a preset, a folder or published weights.

A source becomes, with its overrides, a `Blueprint`: from there on no code asks where a
model comes from.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras

from keras_moe.checks import argument_names, check_bool, check_one_of
from keras_moe.models import registry
from keras_moe.models.conversion import (
    HEAD,
    POOLING,
    ConversionReport,
    check_convertible,
    is_convertible,
)
from keras_moe.models.description import Description
from keras_moe.models.overrides import (
    apply_overrides,
    complete_config,
    nested_config,
    split_overrides,
    tower_families,
)
from keras_moe.models.preset_folder import HUB_MODELS
from keras_moe.models.source import SAVED, Weights, open_model_source
from keras_moe.ops.initializers import skip_init

BACKBONE = "backbone"
# The towers of models of pairs, by the kinds of their inputs.
TOWERS = ("image", "text")


class UnbuiltTower(NamedTuple):
    """One tower of a backbone before it is made.

    Attributes:
        prefix: beginning of its weights' paths, such as `"text/"`; `""` for a backbone
            of one tower.
        blocks: blocks without weights.
        sequences: tokens of each sequence of an example, which attend to each other.
        hidden_dim: D.
    """

    prefix: str
    blocks: list
    sequences: tuple[int, ...]
    hidden_dim: int


@dataclass(frozen=True)
class Blueprint:
    """The parts of a model before it is made: no weight is allocated.

    A `with` statement closes its source at once.

    Args:
        backbone: class of the backbone.
        config: arguments of the backbone.
        task: class of the task around it, or None for a backbone alone.
        task_config: arguments of the task beside its backbone.
        weights: source of the weights; None for initial ones.
        name: name of the source, for descriptions.

    Example:

    >>> from keras_moe import models
    >>> blueprint = models.resolve("vmoe_b32", {"num_experts": 8})
    >>> blueprint.backbone.__name__, blueprint.task
    ('ViTBackbone', None)
    >>> blueprint.unbuilt_blocks()[1].feed_forward.experts.num_experts
    8
    >>> blueprint.describe().parameters < models.describe("vmoe_b32").parameters
    True
    """

    backbone: type
    config: dict[str, Any]
    task: type | None = None
    task_config: dict[str, Any] = field(default_factory=dict)
    weights: Weights | None = None
    name: str = ""

    @classmethod
    def of_model(cls, model: keras.Model) -> "Blueprint":
        """The blueprint of a model, without its weights.

        Args:
            model: backbone of a registered family, or task around one.
        """
        backbone = getattr(model, "backbone", model)
        if not registry.is_registered(type(backbone)):
            raise ValueError(
                f"Expected a model with one of {registry.backbone_names()}; "
                f"received: {type(model).__name__}"
            )
        config = backbone.get_config()
        if model is backbone:
            return cls(type(backbone), config, name=model.name)
        task_config = {**model.get_config(), "preprocessor": model.preprocessor}
        del task_config["backbone"]
        return cls(type(backbone), config, type(model), task_config, None, model.name)

    def describe(self) -> Description:
        """The costs of the model, from its configuration."""
        with self._explained():
            parts, num_tokens, dim = self.backbone.describe_parts(**self._sizes())
            if self.task is not None:
                parts = parts + self.task.describe_parts(
                    self.config, num_tokens, dim, **self.task_config
                )
            if self.weights is not None:
                self.weights.check()
        return Description(self.name, num_tokens, parts, dim, self.backbone.example)

    def unbuilt_blocks(self) -> list[keras.layers.Layer]:
        """The blocks of the backbone as layers without weights."""
        with self._explained():
            return self.backbone.unbuilt_blocks(**self._sizes())

    def unbuilt_towers(self) -> list[UnbuiltTower]:
        """The towers of the backbone, each with its blocks and its tokens."""
        families = tower_families(self.backbone)
        with self._explained():
            config = complete_config(self.backbone, self.config)
            towers = {"": (self.backbone, config)}
            if families:
                towers = {f"{k}/": (cls, config[k]) for k, cls in families.items()}
            return [
                UnbuiltTower(
                    prefix,
                    cls.unbuilt_blocks(**config),
                    cls.sequence_lengths(**config),
                    config["hidden_dim"],
                )
                for prefix, (cls, config) in towers.items()
            ]

    def build(self) -> keras.Model:
        """The model, with the source's weights if they are wanted."""
        return self.build_with_report()[0]

    def build_with_report(
        self, progress: Callable[[int, int, str], None] | None = None
    ) -> tuple[keras.Model, Any]:
        """The model, and a report on published weights.

        Args:
            progress: called with (done, all, name) before each weight that is
                converted.

        Returns:
            The model, and a `ConversionReport` or None.
        """
        with self._explained():
            model, report = self._new(), None
            if self.weights is not None:
                report = self.weights.load(model, progress)
        return model, report

    def _new(self):
        task_config = dict(self.task_config)
        # A task may be given a backbone of its own.
        backbone = task_config.pop("backbone", None)
        weights = self.weights
        if backbone is None:
            with skip_init(weights is not None and weights.fills_backbone()):
                backbone = self.backbone.from_config(self.config)
        if self.task is None:
            return backbone
        with skip_init(weights is not None and weights.fills_head()):
            return self.task(backbone, **task_config)

    def _sizes(self):
        """The arguments that costs follow from: they are the same under each dtype."""
        not_sizes = ("name", "trainable", "dtype")
        return {k: v for k, v in self.config.items() if k not in not_sizes}

    def _explained(self):
        if self.weights is None:
            return contextlib.nullcontext()
        return self.weights.explained()

    def close(self) -> None:
        """Closes the source; the blueprint cannot be built afterwards."""
        if self.weights is not None:
            self.weights.close()

    def __enter__(self) -> "Blueprint":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def resolve(
    source: Any,
    overrides: dict[str, Any] | None = None,
    *,
    task: str | None = None,
    cls: type | None = None,
    load_weights: bool = True,
    counts_only: bool = False,
    tower: str | None = None,
) -> Blueprint:
    """The blueprint of a model from any source, with overrides of any argument.

    This is the one place where sources and overrides become a model's arguments:
    `from_preset` of functions and classes, `describe`, `convert`, `upcycle` and
    `keras_moe.distribution` read it.

    Args:
        source: name of a preset, folder, handle, published weights or a model; see
            `keras_moe.models.from_preset` and `convert`.
        overrides: arguments of the backbone or of the task, by name; `num_classes`
            may be None for no new head.
        task: name of a task, `"backbone"`, or None for the source's own: with
            `num_classes` its image classifier, with a trained task that one, and
            otherwise the backbone.
        cls: class that the model must have, or None for any.
        load_weights: whether the model gets the source's weights.
        counts_only: whether the blueprint serves descriptions alone: no weight is
            read, and a task's arguments may be there without the task, as those of a
            model that is yet to get its head.
        tower: `"image"` or `"text"` for one tower of published weights of pairs; None
            for that of `cls` or `task`, and where they imply none for all of them.

    Example:

    >>> from keras_moe import models
    >>> overrides = {"num_classes": 10, "activation": "gelu"}
    >>> blueprint = models.resolve("vmoe_digits", overrides)
    >>> blueprint.config["activation"], blueprint.task.__name__
    ('gelu', 'ViTImageClassifier')
    """
    overrides = dict(overrides or {})
    if overrides.get("num_classes", 0) is None:
        del overrides["num_classes"]
    check_bool("load_weights", load_weights)
    if task is not None:
        check_one_of("task", task, (None, BACKBONE, *registry.task_names()))
    if task == BACKBONE and "num_classes" in overrides:
        raise ValueError(
            "Expected no num_classes for task='backbone'; "
            f"received: num_classes={overrides['num_classes']}"
        )
    if isinstance(source, keras.Model) and not is_convertible(source):
        if overrides:
            raise ValueError(
                f"Expected no further arguments with a model; received: {overrides}"
            )
        return Blueprint.of_model(source)
    check_one_of("tower", tower, (None, *TOWERS))
    tower = tower or _tower_of(task, cls, "num_classes" in overrides)
    opened = open_model_source(source, overrides, load_weights, counts_only, tower)
    try:
        return _resolved(opened, overrides, task, cls, counts_only)
    except BaseException:
        if weights := opened.weights():
            weights.close()
        raise


def _tower_of(task, cls, has_classes):
    """The tower of a model of pairs that a class or a task implies, or None."""
    backbone = cls
    if cls is not None and registry.is_task(cls):
        backbone, has_classes = cls.backbone_cls, has_classes or _takes_classes(cls)
    if task not in (None, BACKBONE):
        backbone = registry.first_task(task).backbone_cls
    if has_classes:
        return TOWERS[0]
    if backbone is None or not registry.is_registered(backbone):
        return None
    return backbone.example if backbone.example in TOWERS else None


def _resolved(source, overrides, task, cls, counts_only):
    backbone = source.backbone if cls is None else _backbone_class(source, cls)
    task_cls = _task_class(source, backbone, task, cls, "num_classes" in overrides)
    owner = task_cls or (source.task if counts_only else None)
    of_backbone, of_task = split_overrides(backbone, owner, overrides, counts_only)
    with source.explained():
        if "backbone" in of_task:
            config = _config_of_own(source, of_task["backbone"], of_backbone)
        else:
            config = _config(source, backbone, of_backbone)
        task_config, new_weights = {}, (*HEAD, *POOLING)
        if task_cls is not None:
            has_task = source.task and source.task.task_name == task_cls.task_name
            own = source if has_task else source.without_task()
            task_config, new_weights = task_cls.config_from(own, of_task, config)
        weights = source.weights(new_weights)
    return Blueprint(backbone, config, task_cls, task_config, weights, source.name)


def _config(source, backbone, overrides):
    """The arguments of the backbone, such that the weights fit if they are wanted."""
    config = apply_overrides(backbone, source.config, overrides)
    if source.must_fit:
        saved = nested_config(backbone, source.config)
        config = backbone.config_for_weights(saved, config)
    return config


def _config_of_own(source, backbone, of_backbone):
    """The arguments of a backbone that the caller has made."""
    if source.kind != SAVED:
        raise ValueError(
            f"Expected no backbone=, since {source.name!r} makes one; received: "
            f"backbone={backbone!r}"
        )
    if of_backbone:
        raise ValueError(
            "Expected backbone= or arguments of one, not both; received: "
            f"{next(iter(of_backbone))}="
        )
    if not isinstance(backbone, keras.Model):
        raise ValueError(f"Expected a backbone; received: backbone={backbone!r}")
    return backbone.get_config()


def _backbone_class(source, cls):
    """The class of the backbone, where the model's class is prescribed."""
    wanted = cls.backbone_cls if registry.is_task(cls) else cls
    if wanted is None or issubclass(source.backbone, wanted):
        return source.backbone
    if issubclass(wanted, source.backbone):
        return wanted
    raise ValueError(
        f"Expected {source.label_of(wanted)} for {cls.__name__}; received: "
        f"{source.label}"
    )


def _task_class(source, backbone, task, cls, has_classes):
    """The class of the task, or None for a backbone alone."""
    if cls is not None:
        return _closest_task(source, backbone, cls) if registry.is_task(cls) else None
    if task == BACKBONE:
        return None
    if task is not None:
        return _first_task(source, backbone, lambda x: x.task_name == task, task)
    if has_classes:
        return _first_task(source, backbone, _takes_classes, "num_classes")
    return source.task if source.is_trained else None


def _closest_task(source, backbone, cls):
    """The source's own task if it is one of the class, or else the class."""
    if source.task is not None and issubclass(source.task, cls):
        return source.task
    if cls.backbone_cls is not None:
        return cls
    return _first_task(source, backbone, lambda x: issubclass(x, cls), cls.__name__)


def _first_task(source, backbone, matches, label):
    if source.task is not None and matches(source.task):
        return source.task
    task = registry.task_class(backbone, matches)
    if task is None:
        raise ValueError(
            f"Expected a task that is registered for {backbone.__name__}; received: "
            f"{label}"
        )
    return task


def _takes_classes(cls):
    return "num_classes" in argument_names(cls)


def build(source: Any, overrides: dict[str, Any] | None = None, **options) -> Any:
    """The model of a source that is no model of this library itself."""
    if isinstance(source, keras.Model) and not is_convertible(source):
        raise ValueError(
            f"Expected the name of a preset; received: {source!r}. {HUB_MODELS}"
        )
    with resolve(source, overrides, **options) as blueprint:
        return blueprint.build()


def list_presets() -> dict[str, str]:
    """The presets that are known by name, with a line about each.

    Returns:
        A dict from name to description: the built-in ones, and those of
        `register_presets`. The line of a preset with weights says what they reach.

    Example:

    >>> from keras_moe import models
    >>> presets = models.list_presets()
    >>> "trained: accuracy" in presets["vmoe_digits"]
    True
    >>> "trained" in presets["vmoe_b32"]
    False
    """
    return {name: registry.summary(x) for name, x in registry.presets().items()}


def from_preset(
    preset: Any,
    task: str | None = None,
    load_weights: bool = True,
    **overrides,
) -> Any:
    """Makes a model from a preset, ready for `fit` or, if it is trained, `predict`.

    With `num_classes` it is an image classifier with a new head. Otherwise a preset
    with a trained task gives that task, and any other its backbone; a built-in preset
    without its weights is an architecture like the others.

    Args:
        preset: name of a preset (see `list_presets`, which says which are trained; the
            others are architectures), local folder, or `hf://`, `kaggle://` or
            `gs://` handle; or published weights, see `convert`.
        task: `"backbone"` or the name of a task, such as `"image_classifier"`; None
            decides as above.
        load_weights: whether to load the preset's weights, if it has any; False makes
            a model to train from scratch, whose arguments need not fit the weights.
        **overrides: any argument of the backbone, its experts or the task, such as
            `num_classes=10`, `image_shape=(384, 384, 3)`, `num_experts=8` or
            `capacity_factor=2.0`.

    Returns:
        A compiled task, or a backbone.

    Example:

    >>> from keras_moe import data, models
    >>> images, labels = data.load_digits("test", image_shape=(16, 16, 1))
    >>> model = models.from_preset("vmoe_digits")  # trained
    >>> float((model.predict(images, verbose=0).argmax(-1) == labels).mean()) > 0.98
    True
    >>> model = models.from_preset(
    ...     "vmoe_digits", num_classes=7, num_experts=4, load_weights=False
    ... )
    >>> model.output_shape
    (None, 7)
    """
    return build(preset, overrides, task=task, load_weights=load_weights)


def convert(
    source: Any,
    task: str | None = None,
    load_weights: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
    tower: str | None = None,
    **overrides,
) -> tuple[Any, ConversionReport]:
    """Makes a model of this library from published weights.

    Every tensor of the source must be used, or be known to belong to another part than
    the model, and every weight of the model must be filled. Names, shapes and
    sizes are checked before anything is read.

    One tensor at a time is in memory beside the model, which is float32 unless `dtype`
    says otherwise: files of float32 need at most 1.3 times their size. Files of half
    precision need more, since the model alone is twice their size; and so does a
    KerasHub model, or a preset of one, since both models are in memory.

    Images are in [-1, 1], as for all models of this library: where the source's config,
    or CLIP's convention, has another mean and standard deviation, they become part of
    the patch embedding. A KerasHub model takes the same images as before. A
    classifier's `preprocessor` is an `ImagePreprocessor` with the source's preparation
    of images and its classes' names.

    Args:
        source: a V-MoE or Soft MoE checkpoint (the prefix of its .index and .data
            files, also `gs://vmoe_checkpoints/...`); a ViT or MLP-Mixer `.npz` of
            Google's releases (also `gs://vit_models/...`, `gs://mixer_models/...`); a
            folder or `hf://` of a timm ViT or Mixer, of OpenCLIP, or of
            transformers' CLIP, SigLIP or DINOv2, with `.safetensors` weights, or such a
            file; a folder with one such checkpoint; or a KerasHub ViT, CLIP or SigLIP:
            a model or a preset. Images and texts become a `CLIPBackbone`.
        task: `"backbone"` or `"image_classifier"`; None decides as above.
        load_weights: whether to load the weights; False makes the architecture alone.
        progress: function of (done, all, name), called before each weight.
        tower: `"image"` or `"text"` for one tower of a model of pairs, which
            `ViTBackbone.from_preset` and `TextBackbone.from_preset` take, too.
        **overrides: any argument of the backbone or the task. `num_classes` makes a new
            head for the image tower; without it the source's head is taken: its
            classes, the embedding of an image tower, or none. With another
            `image_shape` or `patch_size` positions and the patch kernel are resized,
            and channels folded (a Mixer keeps its number of patches). The number of
            heads, CLIP's `activation` and a V-MoE's `router`,
            `num_selected_experts` and `capacity_factor` must be given where the source
            does not have them.

    Returns:
        The model, a compiled task or a backbone, and a `ConversionReport`.

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
    check_convertible(source)
    options = {"task": task, "load_weights": load_weights, "tower": tower}
    with resolve(source, overrides, **options) as blueprint:
        return blueprint.build_with_report(progress)


def describe(
    preset: Any,
    load_weights: bool = True,
    **overrides,
) -> Description:
    """The costs of a model, from its configuration: no weight is allocated.

    FLOPs count 2 per multiply-add of every matmul of one image's forward pass with
    no token dropped; normalisations, activations and softmaxes are left out.

    Args:
        preset: source as in `from_preset`, or a model of this library. Only the names
            and shapes of published weights are read; the weights of a folder with
            checksums are read once, about a second per GB, to compare them.
        load_weights: whether the model is one that the preset's weights fit.
        **overrides: any argument of the backbone or the task. Without `num_classes` a
            saved or published head is counted as it is.

    Returns:
        A `Description`: `parameters`, `active_parameters` (those that one token
        uses), `gflops` per image, and the same for each of its `parts`.

    Example:

    >>> from keras_moe import models
    >>> description = models.describe("vmoe_h14")
    >>> description.parameters > 5 * description.active_parameters
    True
    """
    with resolve(
        preset, overrides, load_weights=load_weights, counts_only=True
    ) as blueprint:
        return blueprint.describe()
