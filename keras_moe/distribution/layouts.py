"""Sharding rules: which weight and activation axes are split over which devices.

Axes: B batch, N tokens, D hidden, H mlp, G groups, E experts, C capacity.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from keras_moe._checks import check_integer, unfit
from keras_moe.layers import MLP, Attention, MoE
from keras_moe.models.loading.blueprint import resolve

BATCH, EXPERT, MODEL = "batch", "expert", "model"
# Batch sub-axis over devices that hold the same experts.
REPLICA = "replica"

# Tables of path -> axes, without model and block names.
ATTENTION_WEIGHTS = {
    "attention/(query|key|value)/kernel": (None, MODEL, None),
    "attention/(query|key|value)/bias": (MODEL, None),
    "attention/attention_output/kernel": (MODEL, None, None),
}
ATTENTION_ACTIVATIONS = {
    "attention/(query|key|value)/output": (BATCH, None, MODEL, None),
    "attention/output": (BATCH, None, None),
}
# Also matches a Mixer's token MLPs, whose second axis is the tokens.
MLP_WEIGHTS = {
    "{mlp}/(hidden|gate)/kernel": (None, MODEL),
    "{mlp}/(hidden|gate)/bias": (MODEL,),
    "{mlp}/output/kernel": (MODEL, None),
}
MLP_ACTIVATIONS = {
    "{mlp}/(hidden|gate)/output": (BATCH, None, MODEL),
    "{mlp}/output": (BATCH, None, None),
}
# Includes the weights of LoRA and int8.
EXPERT_WEIGHTS = {
    "experts/(hidden|gate)_(kernel|lora_b)": (EXPERT, None, MODEL),
    "experts/(hidden|gate)_(bias|scale)": (EXPERT, MODEL),
    "experts/output_(kernel|lora_a)": (EXPERT, MODEL, None),
    "experts/output_(bias|scale)": (EXPERT, None),
    "experts/(hidden_lora_a|gate_lora_a|output_lora_b)": (EXPERT, None, None),
}
# All-to-all between the tokens' devices and the experts' devices.
EXPERT_ACTIVATIONS = {
    "experts/slots/(input|output)": (REPLICA, EXPERT, None, None),  # (G, E, C, D)
    "experts/slots/(dispatched|returned)": (BATCH, None, None, None),
    # Keep the residual stream in place while routing gathers and sorts.
    "feed_forward_norm/output": (BATCH, None, None),
    "stochastic_depth/output": (BATCH, None, None),
}


class Layouts(NamedTuple):
    """The sharding of a model.

    Attributes:
        mesh: dict from axis name to size, for data and all weights except experts.
        expert_mesh: the same; if experts are split over part of the batch axis, that
            axis becomes `"replica"` and `"expert"`.
        weights: dict from path regex to axes; other weights are replicated.
        activations: the same for layer outputs.

    Example:

    >>> from keras_moe import distribution
    >>> rules = distribution.layouts("vmoe_b16", 8, expert_parallel=4)
    >>> rules.mesh, rules.expert_mesh
    ({'batch': 8}, {'replica': 2, 'expert': 4})
    """

    mesh: dict
    expert_mesh: dict
    weights: dict
    activations: dict


def layouts(
    model_or_preset: object,
    num_devices: int,
    expert_parallel: int | str | None = None,
    model_parallel: int = 1,
    *,
    batch_size: int | None = None,
    load_weights: bool = True,
    **overrides: Any,
) -> Layouts:
    """Returns the sharding rules of `auto` without devices or weights.

    Args:
        num_devices: number of devices; the other arguments are those of `auto`.

    Example:

    >>> from keras_moe import distribution
    >>> rules = distribution.layouts("vmoe_b16", 8, model_parallel=2)
    >>> rules.mesh
    {'batch': 4, 'model': 2}
    >>> rules.weights["(.*/)?experts/output_(kernel|lora_a)"]
    ('batch', 'model', None)
    """
    with resolve(
        model_or_preset, overrides, load_weights=load_weights, counts_only=True
    ) as blueprint:
        blocks = blueprint.unbuilt_blocks()
    return layouts_of_blocks(
        blocks, num_devices, expert_parallel, model_parallel, batch_size
    )


def layouts_of_blocks(
    blocks: list,
    num_devices: int,
    expert_parallel: int | str | None = None,
    model_parallel: int = 1,
    batch_size: int | None = None,
) -> Layouts:
    """Returns the `Layouts` of a list of blocks."""
    num_devices = check_integer("num_devices", num_devices)
    model_parallel = check_integer("model_parallel", model_parallel)
    if num_devices % model_parallel:
        expected = f"model_parallel to divide the {num_devices} devices"
        raise unfit(expected, f"model_parallel={model_parallel}")
    batch_devices = num_devices // model_parallel
    parts = [part for block in blocks for part in split_parts(block)]
    if batch_size is not None and check_integer("batch_size", batch_size) % (
        batch_devices
    ):
        raise ValueError(
            f"Expected a batch_size that the {batch_devices} devices of the batch axis "
            f"divide, such as {-(-batch_size // batch_devices) * batch_devices}; "
            f"received: batch_size={batch_size}"
        )
    experts = sorted({part.num_experts for kind, part in parts if kind == "experts"})
    ways = _expert_devices(expert_parallel, batch_devices, experts)
    _check_model_parallel(model_parallel, parts)

    model_axis = {} if model_parallel == 1 else {MODEL: model_parallel}
    mesh = expert_mesh = {BATCH: batch_devices, **model_axis}
    # From the tables' axes to mesh axes; None if not split.
    names = {BATCH: BATCH, EXPERT: BATCH, REPLICA: None, MODEL: None}
    if model_axis:
        names[MODEL] = MODEL
    if ways == 1:
        names[EXPERT] = None
    elif ways < batch_devices:
        replicas = batch_devices // ways
        expert_mesh = {REPLICA: replicas, EXPERT: ways, **model_axis}
        names.update({EXPERT: EXPERT, REPLICA: REPLICA})

    kinds = {kind for kind, _ in parts}
    weights, activations = {}, {}
    if model_parallel > 1:
        if "attention" in kinds:
            weights.update(ATTENTION_WEIGHTS)
            activations.update(ATTENTION_ACTIVATIONS)
        for mlp in sorted(kinds & {"mlp", "token_mlp", "shared_experts"}):
            for path, axes in MLP_WEIGHTS.items():
                weights[path.format(mlp=mlp)] = axes
            for path, axes in MLP_ACTIVATIONS.items():
                activations[path.format(mlp=mlp)] = axes
    if "experts" in kinds:
        weights.update(EXPERT_WEIGHTS)
    if ways > 1:
        activations.update(EXPERT_ACTIVATIONS)
    return Layouts(
        mesh, expert_mesh, _on_mesh(weights, names), _on_mesh(activations, names, True)
    )


def split_parts(block: keras.layers.Layer) -> Iterator[tuple[str, keras.layers.Layer]]:
    """Yields the layers of a block that can be split, with their kinds."""
    if isinstance(block.token_mixer, Attention):
        yield "attention", block.token_mixer
    elif isinstance(block.token_mixer, MLP):
        yield "token_mlp", block.token_mixer
    if isinstance(block.feed_forward, MLP):
        yield "mlp", block.feed_forward
    elif isinstance(block.feed_forward, MoE):
        yield "experts", block.feed_forward.experts
        if block.feed_forward.shared_experts is not None:
            yield "shared_experts", block.feed_forward.shared_experts


def _expert_devices(expert_parallel, batch_devices, experts):
    """Returns the number of devices to split the experts over."""
    if expert_parallel is None:
        return math.gcd(batch_devices, *experts) if experts else 1
    if expert_parallel == BATCH:
        expert_parallel = batch_devices
    expert_parallel = check_integer("expert_parallel", expert_parallel)
    fits = all(count % expert_parallel == 0 for count in (batch_devices, *experts))
    if expert_parallel > 1 and not (experts and fits):
        raise ValueError(
            f"Expected expert_parallel to divide the {batch_devices} devices of the "
            "batch axis and the experts to which tokens are dispatched (in a muMoE "
            "block every expert takes part); received: "
            f"expert_parallel={expert_parallel}, num_experts={experts}"
        )
    return expert_parallel


def _check_model_parallel(model_parallel, parts):
    if model_parallel > 1 and not parts:
        expected = "model_parallel=1 for a model without weights to split"
        raise unfit(expected, f"model_parallel={model_parallel}")
    for kind, part in parts:
        name = "mlp_dim"
        if kind == "attention":
            grouped = part.num_key_value_heads < part.num_heads
            name = "num_key_value_heads" if grouped else "num_heads"
        if (size := getattr(part, name)) % model_parallel:
            expected = f"model_parallel to divide {name} of the {kind}"
            raise unfit(expected, f"model_parallel={model_parallel}, {name}={size}")


def _on_mesh(table, names, keep_whole=False):
    """Renames axes to mesh axes and drops rules that split nothing."""
    rules = {}
    for path, axes in table.items():
        axes = tuple(names.get(axis) for axis in axes)
        # Activations may have to be replicated.
        if keep_whole or any(axes):
            rules[f"(.*/)?{path}"] = axes
    return rules
