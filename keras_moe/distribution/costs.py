"""The arithmetic of a training step on many devices, without any of them.

Axes: D hidden, E experts.
"""

import math
import re
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from keras_moe.checks import check_integer, check_one_of, check_positive
from keras_moe.distribution.block_costs import (
    Share,
    activation_bytes,
    expert_slots,
    model_parallel_bytes,
)
from keras_moe.distribution.chips import CHIPS, Chip
from keras_moe.distribution.layouts import BATCH, MODEL, layouts_of_blocks
from keras_moe.layers import MoE
from keras_moe.models.blueprint import resolve
from keras_moe.ops.cost import under

# Length of a weight's two largest axes from which Adafactor keeps their sums.
FACTORED_FROM = 32
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes that an optimizer keeps for a weight of a shape.
OPTIMIZERS = {
    "sgd": lambda shape: 0,
    "momentum": lambda shape: 4 * math.prod(shape),
    "adam": lambda shape: 8 * math.prod(shape),
    "adafactor": lambda shape: 2 * math.prod(shape) + 4 * _factored(shape),
}


class Costs(NamedTuple):
    """The costs of a training step for each device.

    Attributes:
        name: name of the preset.
        chip: `Chip` of each device.
        num_devices: number of devices.
        layout: mesh and options, in words.
        batch_size: images of all devices together.
        parameters: parameters of the model.
        device_parameters: parameters on one device.
        memory: dict from part to bytes on one device.
        traffic: dict from purpose to bytes that leave one device in a step.
        flops: floating-point operations of one device in a step.
        seconds: dict from `"compute"` and each purpose of `traffic` to seconds.
        utilization: share of the chip's peak that `seconds` assumes.
    """

    name: str
    chip: Chip
    num_devices: int
    layout: str
    batch_size: int
    parameters: int
    device_parameters: int
    memory: dict
    traffic: dict
    flops: float
    seconds: dict
    utilization: float

    @property
    def memory_bytes(self) -> int:
        """All bytes on one device."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the chip has as much memory."""
        return self.memory_bytes <= self.chip.memory

    @property
    def all_to_all_bytes(self) -> int:
        """Bytes that all devices together send to experts and back in a step."""
        return self.num_devices * self.traffic["all-to-all (tokens)"]

    @property
    def communication_seconds(self) -> float:
        """The seconds of all traffic, one purpose after the other."""
        return sum(self.seconds.values()) - self.seconds["compute"]

    @property
    def step_seconds(self) -> tuple[float, float]:
        """A step's time if sending hides behind computing, and if it does not."""
        compute, sending = self.seconds["compute"], self.communication_seconds
        return max(compute, sending), compute + sending

    def print(self, console: Console | None = None) -> None:
        """Prints memory, traffic and time as tables."""
        console = console or Console()
        console.print(
            f"{self.name} on {self.num_devices} x {self.chip.name}, {self.layout}",
            style="bold",
            highlight=False,
        )
        memory = Table(title="memory of a device")
        memory.add_column("part")
        memory.add_column("GiB", justify="right")
        for part, size in self.memory.items():
            memory.add_row(part, f"{size / 2**30:.2f}")
        memory.add_section()
        memory.add_row("all", f"{self.memory_bytes / 2**30:.2f}")
        verdict = "fits" if self.fits else "does not fit"
        memory.add_row(f"the chip ({verdict})", f"{self.chip.memory / 2**30:.2f}")
        console.print(memory)
        step = Table(title=f"a step of {self.batch_size:,} images, on a device")
        step.add_column("what")
        for column in ("amount", "at", "ms"):
            step.add_column(column, justify="right")
        peak = self.chip.peak_flops * self.utilization / 1e12
        step.add_row(
            "compute",
            f"{self.flops / 1e12:,.2f} TFLOP",
            f"{peak:,.0f} TFLOP/s ({self.utilization:.0%} of peak)",
            f"{1e3 * self.seconds['compute']:,.1f}",
        )
        for name, size in self.traffic.items():
            seconds = self.seconds[name]
            rate = f"{size / seconds / 1e9:,.0f} GB/s" if seconds else ""
            step.add_row(name, f"{size / 1e9:,.3f} GB", rate, f"{1e3 * seconds:,.1f}")
        step.add_section()
        hidden, exposed = self.step_seconds
        for name, seconds in (
            ("step, sending behind computing", hidden),
            ("step, one after the other", exposed),
        ):
            rate = f"{self.batch_size / seconds:,.0f} images/s"
            step.add_row(name, "", rate, f"{1e3 * seconds:,.1f}")
        console.print(step)


def costs(
    model_or_preset: Any,
    num_devices: int,
    batch_size: int,
    chip: Any = "tpu_v4",
    expert_parallel: Any = None,
    model_parallel: int = 1,
    optimizer: str = "adam",
    dtype: str = "bfloat16",
    utilization: float = 0.4,
    text_tokens: int = 0,
    num_classes: int | None = None,
    load_weights: bool = True,
    **overrides: Any,
) -> Costs:
    """The costs of a training step under a layout of `auto`, on paper.

    Memory: float32 weights, gradients of the same size, the optimizer's state, and the
    activations kept for the gradient (`block_costs.activation_bytes`); with
    `rematerialize=True` the inputs of blocks alone, and all of one block at a time. A
    compiler may need less, as it fuses, or more, for its own copies.

    Traffic: tokens travel to experts and back, for the gradient again, and once more
    with `rematerialize`: a device sends (n - 1) / n of its slots' tokens, if n devices
    deal the experts among them. The sum of gradients over n devices makes 2 (n - 1) / n
    of a gradient's bytes leave each, which float32 has.

    Time: forward FLOPs as `describe` counts them times three, and for blocks once more
    with `rematerialize`, at a share of the peak that you assume; traffic at the links'
    bandwidth (`Chip.all_to_all_bandwidth`).

    Args:
        model_or_preset: argument of `auto`.
        num_devices: number of chips.
        batch_size: images of all of them together.
        chip: name in `CHIPS`, or a `Chip`.
        expert_parallel: argument of `auto`.
        model_parallel: argument of `auto`.
        optimizer: name of the optimizer, `"sgd"`, `"momentum"`, `"adam"` (two float32
            moments) or `"adafactor"` (a bfloat16 moment; the sums of second moments
            over rows and columns where both are 32 at least). Embeddings and heads are
            counted as if they were not factored.
        dtype: dtype of tokens and products, `"bfloat16"` under mixed precision, or
            `"float32"`; weights stay float32.
        utilization: share of the chip's peak that matmuls reach; measure it.
        text_tokens: tokens of a text that goes through the same blocks with each image,
            whose embedding is not counted; 0 for models of pairs, which have texts of
            their own length.
        num_classes: number of classes of a head, which is counted, too.
        load_weights: argument of `auto`.
        **overrides: arguments of the model that differ from the preset.

    Returns:
        `Costs`.

    Raises:
        ValueError: see `layouts`; if groups of tokens do not lie whole on each device;
            if `text_tokens` goes with a model of texts;
            if experts without capacity would be gathered on several devices; or for
            muMoE blocks, whose intermediates are not counted.

    Reference:
        *GShard*, section 3; *Megatron-LM*, section 3; *Reducing Activation
        Recomputation in Large Transformer Models*, equation 1, for the counting.

    Example:

    >>> from keras_moe import distribution
    >>> whole, split = (
    ...     distribution.costs("vmoe_h14", 256, 4096, expert_parallel=parallel)
    ...     for parallel in (1, 32)
    ... )
    >>> whole.fits, split.device_parameters < whole.device_parameters / 8
    (False, True)
    """
    if not isinstance(chip, Chip):
        chip = CHIPS[check_one_of("chip", chip, CHIPS)]
    check_one_of("optimizer", optimizer, OPTIMIZERS)
    itemsize = ITEMSIZES[check_one_of("dtype", dtype, ITEMSIZES)]
    if check_positive("utilization", utilization) > 1:
        raise ValueError(
            f"Expected a share of the peak; received: utilization={utilization!r}"
        )
    check_integer("text_tokens", text_tokens, minimum=0)
    batch_size = check_integer("batch_size", batch_size)
    overrides["num_classes"] = num_classes
    options = {"load_weights": load_weights, "counts_only": True}
    with resolve(model_or_preset, overrides, **options) as blueprint:
        towers, model = blueprint.unbuilt_towers(), blueprint.describe()
    if text_tokens and model.example != "image":
        raise ValueError(
            "Expected text_tokens=0 for a model that has texts of its own; received: "
            f"text_tokens={text_tokens}"
        )
    blocks = [block for tower in towers for block in tower.blocks]
    layouts = layouts_of_blocks(
        blocks, num_devices, expert_parallel, model_parallel, batch_size
    )
    batch_devices = layouts.mesh[BATCH]
    _check_capacity(blocks, batch_devices)
    # Each block with the share of its tower.
    shared, shapes, block_flops, described_flops = [], {}, 0, 0
    for tower in towers:
        dim, num_tokens = tower.hidden_dim, sum(tower.sequences)
        sequences = (*tower.sequences, *((text_tokens,) if text_tokens else ()))
        share = Share(
            batch_size // batch_devices,
            batch_size,
            sequences,
            num_tokens,
            dim,
            model_parallel,
            itemsize,
        )
        for block in tower.blocks:
            shared.append((block, share))
            block_shapes = block.weight_shapes((num_tokens, dim))
            shapes.update(under(f"{tower.prefix}{block.name}", block_shapes))
            flops = [block.cost((n, dim)).flops for n in sequences]
            block_flops += sum(flops)
            described_flops += sum(flops[: len(tower.sequences)])

    # Weights of blocks, which a layout may split, by path; the rest as one vector.
    listed = sum(map(math.prod, shapes.values()))
    shapes["rest"] = (model.parameters - listed,)
    weights = _split(shapes, layouts, OPTIMIZERS[optimizer])

    rematerialize = any(block.rematerialize for block in blocks)
    kept = [activation_bytes(block, share) for block, share in shared]
    if rematerialize:
        inputs = sum(share.tokens * share.dim for _, share in shared) * itemsize
        activations = inputs + max(kept)
    else:
        activations = sum(kept)
    memory = {
        "weights": 4 * weights.parameters,
        "gradients": 4 * weights.parameters,
        f"optimizer ({optimizer})": weights.state_bytes,
        "activations": activations,
    }

    # Forward, again if rematerialised, and for the gradient.
    passes = 3 if rematerialize else 2
    sent = sum(expert_slots(block, share) * share.dim for block, share in shared)
    tokens_sent = 2 * passes * sent * itemsize
    summed = sum(model_parallel_bytes(block, share) for block, share in shared)
    expert_devices = weights.expert_devices
    traffic = {
        "all-to-all (tokens)": tokens_sent * (expert_devices - 1) // expert_devices,
        "all-reduce (gradients)": round(weights.summed_bytes),
        "all-reduce (heads, hidden units)": round(
            passes * summed * _ring(model_parallel)
        ),
    }
    other_flops = sum(part.flops for part in model.parts) - described_flops
    flops = 3 * other_flops + (4 if rematerialize else 3) * block_flops
    flops *= batch_size / num_devices
    rates = [
        chip.all_to_all_bandwidth(expert_devices, num_devices),
        chip.bandwidth,
        chip.bandwidth,
    ]
    seconds = {"compute": flops / (chip.peak_flops * utilization)}
    seconds.update(
        {name: size / rate for (name, size), rate in zip(traffic.items(), rates)}
    )
    layout = f"experts over {expert_devices}, heads over {model_parallel}"
    if rematerialize:
        layout += ", rematerialised"
    return Costs(
        model.name,
        chip,
        num_devices,
        layout,
        batch_size,
        model.parameters,
        weights.parameters,
        memory,
        traffic,
        flops,
        seconds,
        utilization,
    )


class _DeviceWeights(NamedTuple):
    """The weights of one device.

    Attributes:
        parameters: number of parameters.
        state_bytes: bytes of the optimizer's state.
        summed_bytes: bytes that leave the device for the sum of the gradients.
        expert_devices: number of devices among which the experts are dealt.
    """

    parameters: int
    state_bytes: int
    summed_bytes: float
    expert_devices: int


def _split(shapes, layouts, state_of_shape):
    """The weights of one device, from the shapes of all weights by path."""
    sizes = {None: 1, **layouts.mesh, **layouts.expert_mesh}
    parameters = state_bytes = summed_bytes = 0
    expert_devices = 1
    for path, shape in shapes.items():
        axes = _axes(layouts, path, shape)
        parts = [sizes[axis] for axis in axes]
        local = tuple(size // part for size, part in zip(shape, parts))
        parameters += math.prod(local)
        state_bytes += state_of_shape(local)
        model_devices = math.prod(sizes[axis] for axis in axes if axis == MODEL)
        dealt = math.prod(parts) // model_devices
        if "/experts/" in path:
            expert_devices = dealt
        same_weights = layouts.mesh[BATCH] // dealt
        summed_bytes += 4 * math.prod(local) * _ring(same_weights)
    return _DeviceWeights(parameters, state_bytes, summed_bytes, expert_devices)


def _axes(layouts, path, shape):
    """The axes of the mesh over which a weight is split; None where it is not."""
    for rule, axes in layouts.weights.items():
        if re.fullmatch(rule, path):
            return axes
    return (None,) * len(shape)


def _ring(num_devices):
    """The bytes that leave a device for a sum over several, per byte of a summand."""
    return 2 * (num_devices - 1) / num_devices


def _factored(shape):
    """The numbers of Adafactor's second moment."""
    size = math.prod(shape)
    rows, columns = [1, 1, *sorted(shape)][-2:]
    if rows < FACTORED_FROM:
        return size
    return size // rows + size // columns


def _check_capacity(blocks, batch_devices):
    for block in blocks:
        moe = block.feed_forward
        if (
            batch_devices > 1
            and isinstance(moe, MoE)
            and not moe.router.groups_per_example(True)
            and moe.router.group_capacity(moe.group_size or 1, True) is None
        ):
            raise ValueError(
                "Expected experts with a capacity, without which every device runs all "
                f"rows; received: dropless=True, {batch_devices} devices share the "
                "batch"
            )
