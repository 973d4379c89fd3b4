"""Creates models by name: from presets, folders or published weights."""

import fnmatch
from typing import TYPE_CHECKING, TypeAlias, overload

from keras_moe._compat import kept_random_states
from keras_moe._types import OnProgress
from keras_moe.models import registry
from keras_moe.models.conversion import ConversionReport, check_convertible
from keras_moe.models.loading.blueprint import Description, build, resolve

if TYPE_CHECKING:
    from keras_moe.models.backbones.base import MoEBackbone
    from keras_moe.models.tasks.causal_lm import CausalLM
    from keras_moe.models.tasks.contrastive import ContrastiveModel
    from keras_moe.models.tasks.image_classifier import ImageClassifier

    Model: TypeAlias = MoEBackbone | ImageClassifier | ContrastiveModel | CausalLM


def list_presets(pattern: str = "*", trained: bool | None = None) -> dict[str, str]:
    """Returns a dict of presets, built-in and registered, with their descriptions.

    Args:
        pattern: part of the name, or a pattern such as `"vmoe_*16"`.
        trained: True for presets with weights only, False for architectures only.

    Example:

    >>> from keras_moe import models
    >>> list(models.list_presets("digits", trained=True))
    ['moepp_digits', 'mumoe_digits', 'vmoe_digits']
    >>> "trained: accuracy" in models.list_presets()["vmoe_digits"]
    True
    """
    if not isinstance(pattern, str):
        raise ValueError(f"Expected a string; received: pattern={pattern!r}")
    if not set(pattern) & set("*?["):
        pattern = f"*{pattern}*"
    return {
        name: registry.summary(x)
        for name, x in registry.presets().items()
        if fnmatch.fnmatch(name, pattern)
        and trained in (None, x["weights"] is not None)
    }


@overload
def from_preset(
    preset: object,
    task: str | None = None,
    load_weights: bool = True,
    *,
    num_classes: int,
    **overrides: object,
) -> "ImageClassifier": ...
@overload
def from_preset(
    preset: object,
    task: str | None = None,
    load_weights: bool = True,
    **overrides: object,
) -> "Model": ...
def from_preset(
    preset: object,
    task: str | None = None,
    load_weights: bool = True,
    **overrides: object,
) -> "Model":
    """Creates a model from a preset, ready for `fit` or, if trained, `predict`.

    Returns an image classifier with a new head if `num_classes` is given; otherwise the
    preset's trained task if it has one, and its backbone if not. Tasks are compiled.

    Args:
        preset: preset name (see `list_presets`; most are architectures without
            weights), local folder, or `hf://`, `kaggle://` or `gs://` handle; or
            published weights, see `convert`.
        task: `"backbone"` or a task name such as `"image_classifier"`; defaults to the
            rule above.
        load_weights: whether to load the preset's weights; arguments must then fit.
        **overrides: any argument of the backbone, its experts or the task, such as
            `num_classes=10`, `image_shape=(384, 384, 3)` or `num_experts=8`. What is
            frozen is that of the source, or all with `trainable=False`, or these parts
            of the backbone: `frozen=["patch_embedding", "block_0"]`.

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


def abstract(
    preset: object, task: str | None = None, load_weights: bool = True, **overrides
) -> "Model":
    """Creates a model whose weights have shapes and dtypes, but no values.

    It takes no memory, whatever its size: for counting, for layouts, and for compiling
    its steps (`keras_moe.distribution.compiled_costs`). Calling it on symbolic tensors
    works; its weights cannot be read. A task is compiled as by default.

    Args:
        preset: as in `from_preset`, or a model of this library. No weights are read.
        task, load_weights, **overrides: as in `from_preset`; weights must fit.

    Example:

    >>> from keras_moe import models
    >>> model = models.abstract("vmoe_h14", num_classes=1000)
    >>> f"{model.count_params() / 1e9:.1f} billion"
    '7.1 billion'
    >>> model.output_shape
    (None, 1000)
    """
    options = {"task": task, "load_weights": load_weights}
    with kept_random_states(), resolve(preset, overrides, **options) as blueprint:
        return blueprint.build_abstract()


def convert(
    source: object,
    task: str | None = None,
    load_weights: bool = True,
    progress: OnProgress | None = None,
    tower: str | None = None,
    **overrides,
) -> tuple["Model", ConversionReport]:
    """Creates a model of this library from published weights.

    Every tensor must be used or known to be unneeded, and every weight of the model
    filled. Tensors are read one at a time into a float32 model (change it with
    `dtype`), so float32 files need at most 1.3 times their size in memory.
    Half-precision files and KerasHub models need more.

    Images are in [-1, 1]: another mean and standard deviation are folded into the patch
    embedding, except for KerasHub models, which keep their input range. A classifier
    gets an `ImagePreprocessor` with the source's preprocessing and class names.

    Args:
        source: one of: a V-MoE or Soft MoE checkpoint (the common prefix of its .index
            and .data files, also `gs://vmoe_checkpoints/...`); a `.npz` of Google's ViT
            or MLP-Mixer releases (also `gs://vit_models/...`, `gs://mixer_models/...`);
            a `.safetensors` file, or a folder or `hf://` repository with one, of a timm
            ViT or Mixer, OpenCLIP, transformers' CLIP, SigLIP or DINO, SigLino, GPT-2,
            or MoE++'s language models, in several files, too; or a KerasHub ViT, CLIP,
            SigLIP, GPT-2, Llama, Mistral or Qwen 3 model or preset. Image-text models
            become a `ContrastiveModel`, with the tokenizer of CLIP or SigLIP 2 if it is
            there.
        task: `"backbone"` or a task name; None decides as in `from_preset`.
        load_weights: whether to load the weights; False creates only the architecture.
        progress: function of (done, total, name), called before each weight.
        tower: `"image"` or `"text"` to convert one tower of an image-text model.
        **overrides: any argument of the backbone or the task. `num_classes` creates a
            new head; by default the source's head is kept. Positions and the patch
            kernel are resized to another `image_shape` or `patch_size`, and channels
            folded (a Mixer must keep its number of patches). Give the number of heads,
            CLIP's `activation` and a V-MoE's `router`, `num_selected_experts` and
            `capacity_factor` if the source lacks them.

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


def describe(preset: object, load_weights: bool = True, **overrides) -> Description:
    """Counts parameters and FLOPs of a model without allocating weights.

    FLOPs are 2 per multiply-add of every matmul in one image's forward pass with no
    token dropped; norms, activations and softmaxes are not counted.

    Args:
        preset: as in `from_preset`, or a model of this library. For published weights
            only names and shapes are read; a folder's checksums are verified.
        load_weights: whether the preset's weights must fit the model.
        **overrides: any argument of the backbone or the task. Without `num_classes` a
            saved or published head is counted.

    Returns:
        A `Description` with `parameters`, `active_parameters` (used by one token) and
        `gflops` per image, in total and for each of its `parts`; with `routed_share` of
        the FLOPs, K (`selected_experts`), `tokens_per_expert` and `parameter_ratio`,
        and `findings()` on what the literature says of these.

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
