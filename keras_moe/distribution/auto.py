"""`auto`: a `keras.distribution` object for a model."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_moe import _processes
from keras_moe._checks import unfit
from keras_moe.distribution.layouts import EXPERT, REPLICA, layouts

INSTEAD = {
    "tensorflow": "make the model and compile it with jit_compile=False within the "
    "scope of a tf.distribute.MirroredStrategy, which is data parallel",
    "torch": "wrap the model in torch.nn.parallel.DistributedDataParallel in your own "
    "training loop, which is data parallel",
}


def auto(
    model_or_preset: object,
    devices: Sequence[object] | None = None,
    expert_parallel: int | str | None = None,
    model_parallel: int = 1,
    *,
    batch_size: int | None = None,
    auto_shard_dataset: bool = True,
    **overrides: Any,
) -> keras.distribution.DataParallel | keras.distribution.ModelParallel:
    """Returns a distribution to train a model on many devices, with JAX.

    Create the model after `keras.distribution.set_distribution(auto(...))`, or inside
    its `scope()`, so that each weight is allocated where it stays.

    The batch is split over all devices (groups of `model_parallel` devices share an
    image), and experts are split over the same axis: attention is data-parallel, and
    tokens travel to their experts and back by all-to-all. With a capacity that needs
    whole groups on each device, so make the number of groups a multiple of the number
    of devices; with too few, results are the same, but every device gathers the tokens.
    Without a capacity (`dropless=True`, and token choice at inference) a device takes
    1.25 times its share of tokens at once, in as many rounds as the busiest one needs.
    muMoE blocks are not split.

    Args:
        model_or_preset: preset name or folder, or a model, as in
            `keras_moe.models.describe`. No weights are allocated for it.
        devices: a list from `keras.distribution.list_devices()`; defaults to all.
        expert_parallel: number of devices to split the experts over: `"batch"` for the
            whole batch axis; a smaller number adds a replica axis. Defaults to the
            largest number that divides the axis and the experts.
        model_parallel: number of devices to split attention heads and hidden units over
            (tensor parallelism).
        batch_size: optional global batch size, checked against the mesh.
        auto_shard_dataset: whether Keras splits a `tf.data.Dataset` over processes. Use
            False if each process already reads its own part, as recipes do.
        **overrides: arguments of the model that differ from the preset, and
            `load_weights=False` if the preset's weights need not fit.

    Reference: *GShard*, section 3; *Megatron-LM*, section 3.

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
    if _processes.splitting_backend() is None:
        backend = keras.backend.backend()
        expected = "the JAX backend, the only one on which Keras splits models. On this"
        instead = INSTEAD.get(backend, "use one device")
        raise unfit(f"{expected} one, {instead}", backend=backend)
    devices = keras.distribution.list_devices() if devices is None else list(devices)
    rules = layouts(
        model_or_preset,
        len(devices),
        expert_parallel,
        model_parallel,
        batch_size=batch_size,
        **overrides,
    )
    mesh = _mesh(rules.mesh, devices)
    if not rules.weights:
        return keras.distribution.DataParallel(
            device_mesh=mesh, auto_shard_dataset=auto_shard_dataset
        )
    # JAX allows two meshes in one program if the devices are in the same order.
    expert_mesh = mesh
    if rules.expert_mesh != rules.mesh:
        expert_mesh = _mesh(rules.expert_mesh, devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, axes in {**rules.weights, **rules.activations}.items():
        of_experts = EXPERT in axes or REPLICA in axes
        layout_map[path] = keras.distribution.TensorLayout(
            axes, expert_mesh if of_experts else mesh
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


def gathered(variable: keras.Variable) -> np.ndarray:
    """Returns the full value of a distributed variable as an array on every process.

    All processes must call this for the same variables in the same order. The full
    value is temporarily on every device.

    Args:
        variable: `keras.Variable` on any devices.

    Example:

    >>> import keras
    >>> from keras_moe import distribution
    >>> distribution.gathered(keras.Variable([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    value = variable.value
    distribution = keras.distribution.distribution()
    if distribution is not None:
        everywhere = keras.distribution.TensorLayout(
            [None] * len(variable.shape), distribution.device_mesh
        )
        value = keras.distribution.distribute_tensor(value, everywhere)
    return keras.ops.convert_to_numpy(value)
