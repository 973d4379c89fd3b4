"""The front door: a `keras.distribution` object for a model."""

import re
from typing import Any

import keras

from keras_moe.checks import check_bool
from keras_moe.distribution.layouts import Layouts, layouts

INSTEAD = {
    "tensorflow": "make the model and compile it with jit_compile=False within the "
    "scope of a tf.distribute.MirroredStrategy, which is data parallel",
    "torch": "wrap the model in torch.nn.parallel.DistributedDataParallel in a "
    "training loop of your own, which is data parallel",
}


def auto(
    model_or_preset: Any,
    devices: Any = None,
    expert_parallel: Any = None,
    model_parallel: int = 1,
    batch_size: int | None = None,
    auto_shard_dataset: bool = True,
    **overrides: Any,
) -> keras.distribution.DataParallel | keras.distribution.ModelParallel:
    """A distribution under which a model trains on many devices, on JAX.

    Make the model after `keras.distribution.set_distribution(auto(...))`, or within
    its `scope()`, so that each weight is created where it stays.

    The batch is split over all devices that do not share an image by
    `model_parallel`. Experts are split over the devices of that batch axis, so that
    attention is computed once, and tokens travel to their experts and back (all-to-all)
    where experts have a capacity and whole groups lie on each device: the batch should
    have a multiple of as many groups. Without capacity (`dropless=True`, and token
    choice at inference) the numbers are the same, but every device gathers the
    experts and runs all rows; with fewer groups it gathers the tokens.

    Args:
        model_or_preset: name or folder of a preset, or a model; see
            `keras_moe.models.describe`. No weight is allocated for it.
        devices: devices of `keras.distribution.list_devices()`; None takes all.
        expert_parallel: number of devices over which experts are split: `"batch"` is
            the whole batch axis, a smaller number an axis of its own, over which other
            groups of devices have the same experts; 1 has all experts everywhere. None
            is `"batch"` where this divides the experts, else 1.
        model_parallel: number of devices over which attention's heads and the MLPs' and
            experts' hidden units are split.
        batch_size: images of all devices together, which are checked, or None.
        auto_shard_dataset: whether Keras deals the batches of a `tf.data.Dataset` among
            processes; not where each has its own part, as those of recipes do.
        **overrides: arguments of the model that differ from the preset; and
            `load_weights=False` for a model without its weights, which they need not
            fit.

    Returns:
        A `keras.distribution.ModelParallel`, or a `DataParallel` where no weight is
        split.

    Raises:
        ValueError: if the backend is not JAX; if numbers do not divide each other; or
            if there is nothing to split. muMoE blocks are not split.

    Reference:
        *GShard*, section 3; *Megatron-LM*, section 3.

    Example:

    >>> import keras
    >>> from keras_moe import distribution
    >>> if keras.backend.backend() == "jax":
    ...     devices = keras.distribution.list_devices()[:1]
    ...     keras.distribution.set_distribution(
    ...         distribution.auto("vmoe_digits", devices)
    ...     )
    ...     keras.distribution.set_distribution(None)
    """
    backend = keras.backend.backend()
    if backend != "jax":
        raise ValueError(
            "Expected the JAX backend, the only one on which Keras splits models. On "
            f"this one, {INSTEAD.get(backend, 'use one device')}; "
            f"received: backend={backend!r}"
        )
    devices = keras.distribution.list_devices() if devices is None else list(devices)
    rules = layouts(
        model_or_preset,
        len(devices),
        expert_parallel,
        model_parallel,
        batch_size,
        **overrides,
    )
    if isinstance(model_or_preset, keras.Model):
        check_paths(rules, [weight.path for weight in model_or_preset.weights])
    return _distribution(
        rules, devices, check_bool("auto_shard_dataset", auto_shard_dataset)
    )


def _distribution(rules, devices, auto_shard_dataset):
    mesh = _mesh(rules.mesh, devices)
    if not rules.weights:
        return keras.distribution.DataParallel(
            device_mesh=mesh, auto_shard_dataset=auto_shard_dataset
        )
    # JAX has an array on each of two meshes in one program, if these have the same
    # devices in the same order.
    expert_mesh = mesh
    if rules.expert_mesh != rules.mesh:
        expert_mesh = _mesh(rules.expert_mesh, devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, axes in {**rules.weights, **rules.activations}.items():
        layout_map[path] = keras.distribution.TensorLayout(
            axes, expert_mesh if rules.on_expert_mesh(axes) else mesh
        )
    return keras.distribution.ModelParallel(
        layout_map=layout_map,
        batch_dim_name=mesh.axis_names[0],
        auto_shard_dataset=auto_shard_dataset,
    )


def _mesh(sizes, devices):
    return keras.distribution.DeviceMesh(
        tuple(sizes.values()), tuple(sizes), devices=devices
    )


def check_paths(rules: Layouts, paths: list[str]) -> None:
    """Raises ValueError unless the rules and the weights of a model fit each other."""
    matched = False
    for path in paths:
        matching = [rule for rule in rules.weights if re.fullmatch(rule, path)]
        matched = matched or bool(matching)
        if len(matching) > 1:
            raise ValueError(
                f"Expected one rule for each weight; received: path={path!r}, which "
                f"matches {matching}"
            )
    if rules.weights and not matched:
        raise ValueError(
            "Expected rules of which one at least matches a weight; received: "
            f"rules={list(rules.weights)}, paths={paths}"
        )
