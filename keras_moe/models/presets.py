"""The front door: models by name, from a preset, a folder or published weights."""

from collections.abc import Callable
from typing import Any

from keras_moe.models import registry
from keras_moe.models.conversion import ConversionReport, check_convertible
from keras_moe.models.description import Description
from keras_moe.models.source import build, resolve


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

    Every tensor of the source must be used, or be known to belong to another part, and
    every weight of the model must be filled. Names, shapes and sizes are checked before
    anything is read.

    Besides the model, one tensor at a time is in memory. The model is float32 unless
    `dtype` says otherwise, so float32 files need at most 1.3 times their size. Files of
    half precision need more, and so do KerasHub models, since both are in memory.

    Images are in [-1, 1], as for all models of this library: if the source normalises
    by another mean and standard deviation, these become part of the patch embedding. A
    KerasHub model takes the same images as before. A classifier's `preprocessor` is an
    `ImagePreprocessor` with the source's preparation of images and its class names.

    Args:
        source: a V-MoE or Soft MoE checkpoint (the prefix of its .index and .data
            files, also `gs://vmoe_checkpoints/...`); a ViT or MLP-Mixer `.npz` of
            Google's releases (also `gs://vit_models/...`, `gs://mixer_models/...`); a
            folder or `hf://` of a timm ViT or Mixer, of OpenCLIP, or of
            transformers' CLIP, SigLIP or DINOv2, with `.safetensors` weights, or such a
            file; a folder with one such checkpoint; or a KerasHub ViT, CLIP or SigLIP:
            a model or a preset. Images and texts become a `CLIPBackbone`.
        task: `"backbone"` or `"image_classifier"`; None decides as above.
        load_weights: whether to load the weights; False makes only the architecture.
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
