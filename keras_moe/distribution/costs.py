"""Estimates memory, traffic and time of a training step on many devices.

Axes: B batch, N tokens, D hidden, H mlp, E experts, C capacity, S group_size.
"""

import math
import re
from typing import Any, NamedTuple

import keras
from rich.console import Console
from rich.table import Table

from keras_moe._checks import check_integer, check_one_of, check_positive, unfit
from keras_moe._tables import numbers_table
from keras_moe.distribution.chips import CHIPS, Chip
from keras_moe.distribution.layouts import BATCH, MODEL, layouts_of_blocks, split_parts
from keras_moe.models.loading.blueprint import resolve
from keras_moe.ops._row_blocks import rows_per_round
from keras_moe.ops.cost import under

# Adafactor factors the moment of a weight whose two largest axes reach this length.
FACTORED_FROM = 32
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes of optimizer state for a weight of a given shape.
OPTIMIZERS = {
    "sgd": lambda shape: 0,
    "momentum": lambda shape: 4 * math.prod(shape),
    "adam": lambda shape: 8 * math.prod(shape),
    "adafactor": lambda shape: 2 * math.prod(shape) + 4 * _factored(shape),
}


class Kept(NamedTuple):
    """Numbers that a block keeps for the backward pass."""

    per_token: float  # and D
    per_pair: float  # of tokens, and head
    per_hidden_unit: float  # one more with a gate
    per_slot: float  # and D
    # Keys are padded to a multiple of these.
    lanes: int = 1


# By the compilers: on TPUs in bfloat16, where attention keeps one array of weights and
# activation functions are computed again, and elsewhere.
KEPT_ON_TPUS = Kept(9, 1, 1, 2.5, lanes=128)
KEPT = Kept(11, 3, 3, 2)
# float32 logits, noisy logits and gates of a router.
ROUTING_BYTES = 3 * 4
ALL_TO_ALL = "all-to-all (tokens)"
# Weights that are not autocast, so that their gradients are float32.
FLOAT32_GRADIENTS = re.compile(r"(.*/)?(router|\w*norm)/.*")
# The rows of `step_seconds`.
STEP_NAMES = "step, sending while computing", "step, one after the other"


class Costs(NamedTuple):
    """Estimated costs of a training step on each device.

    Attributes:
        name: name of the preset.
        chip: `Chip` of each device.
        num_devices: number of devices.
        layout: mesh and options, as text.
        batch_size: global batch size.
        parameters: number of parameters of the model.
        device_parameters: number of parameters on one device.
        memory: dict from part to bytes on one device.
        traffic: dict from purpose to bytes sent by one device per step.
        flops: FLOPs of one device per step.
        seconds: dict from `"compute"` and each purpose of `traffic` to seconds.
        utilization: assumed share of the chip's peak FLOP/s.
        example: what a batch has so many of.
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
    example: str

    @property
    def memory_bytes(self) -> int:
        """Total bytes on one device."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the chip has enough memory."""
        return self.memory_bytes <= self.chip.memory

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Time of a step with and without communication overlapping compute."""
        compute = self.seconds["compute"]
        sending = sum(self.seconds.values()) - compute
        return max(compute, sending), compute + sending

    def print(self, console: Console | None = None) -> None:
        """Prints memory, traffic and time as tables."""
        console = console or Console()
        console.print(
            f"{self.name} on {self.num_devices} x {self.chip.name}, {self.layout}",
            style="bold",
            highlight=False,
            markup=False,
        )
        verdict = "fits" if self.fits else "does not fit"
        capacity = {f"the chip ({verdict})": self.chip.memory}
        console.print(memory_table(self.memory, capacity))
        title = f"a step of {self.batch_size:,} {self.example}s, on a device"
        peak = self.chip.peak_flops * self.utilization / 1e12
        rows = [
            (
                "compute",
                f"{self.flops / 1e12:,.2f} TFLOP",
                f"{peak:,.0f} TFLOP/s ({self.utilization:.0%} of peak)",
                f"{1e3 * self.seconds['compute']:,.1f}",
            )
        ]
        for name, size in self.traffic.items():
            seconds = self.seconds[name]
            rate = f"{size / seconds / 1e9:,.0f} GB/s" if seconds else ""
            rows.append((name, f"{size / 1e9:,.3f} GB", rate, f"{1e3 * seconds:,.1f}"))
        steps = []
        for name, seconds in zip(STEP_NAMES, self.step_seconds):
            rate = f"{self.batch_size / seconds:,.0f} examples/s"
            steps.append((name, "", rate, f"{1e3 * seconds:,.1f}"))
        console.print(numbers_table(title, ("what", "amount", "at", "ms"), rows, steps))


def memory_table(memory: dict[str, int], capacity: dict[str, float]) -> Table:
    """Memory by part, their sum, and what a device has by what it is called."""
    last = {"all": sum(memory.values()), **capacity}
    rows, last = (
        [(name, f"{size / 2**30:.2f}") for name, size in sizes.items()]
        for sizes in (memory, last)
    )
    return numbers_table("memory of a device", ("part", "GiB"), rows, last)


def costs(
    model_or_preset: object,
    num_devices: int,
    batch_size: int,
    chip: str | Chip = "tpu_v4",
    expert_parallel: int | str | None = None,
    model_parallel: int = 1,
    *,
    optimizer: str = "adam",
    dtype: str = "bfloat16",
    utilization: float = 0.4,
    text_tokens: int = 0,
    num_classes: int | None = None,
    load_weights: bool = True,
    **overrides: Any,
) -> Costs:
    """Estimates the costs of a training step under a layout of `auto`.

    Memory is the float32 weights, the gradients, the optimizer state and the
    activations kept for the backward pass, with `rematerialize=True` the inputs of all
    blocks and the activations of one. On TPUs in bfloat16, gradients take the place of
    activations that are no longer needed. Compilers may need less or more.

    Traffic: tokens travel to experts and back, again in the backward pass, and once
    more with `rematerialize`. With experts split over n devices, a device sends (n - 1)
    / n of its slots, or of its tokens' choices without a capacity; an all-reduce of
    gradients (in `dtype`, those of routers and norms in float32) over n devices sends
    2 (n - 1) / n of their bytes.

    Time: forward FLOPs as counted by `describe`, times three (blocks: times four with
    `rematerialize`), at `utilization` of the peak; traffic at the links' bandwidth
    (`Chip.all_to_all_bandwidth`).

    Args:
        num_devices: number of chips; arguments without a line here are those of `auto`.
        batch_size: global batch size.
        chip: name in `CHIPS`, or a `Chip`.
        optimizer: `"sgd"`, `"momentum"`, `"adam"` (two float32 moments) or
            `"adafactor"` (a bfloat16 moment, and factored second moments where both
            axes are at least 32; embeddings and heads count as unfactored).
        dtype: dtype of activations, `"bfloat16"` for mixed precision or `"float32"`.
        utilization: share of peak FLOP/s that matmuls reach; measure it.
        text_tokens: length of a text that goes through the same blocks with each image.
            Use 0 for image-text models, which have their own text length.
        num_classes: number of classes of a head to count, if any.

    Reference: *GShard*, section 3; *Megatron-LM*, section 3;
        *Reducing Activation Recomputation in Large Transformer Models*, equation 1.

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
        raise unfit("a share of the peak", utilization=utilization)
    overrides["num_classes"] = num_classes
    with resolve(
        model_or_preset, overrides, load_weights=load_weights, counts_only=True
    ) as blueprint:
        towers, model = blueprint.unbuilt_towers(), blueprint.describe()
    check_integer("text_tokens", text_tokens, minimum=0)
    if text_tokens and model.example != "image":
        expected = "text_tokens=0 for a model that has its own texts"
        raise unfit(expected, f"text_tokens={text_tokens}")
    texts = (text_tokens,) if text_tokens else ()
    # Blocks with the lengths of their sequences, those of each member of an ensemble.
    blocks = [
        (tower, block, members * tower.sequences)
        for tower in towers
        for block, members in zip(tower.blocks, tower.members)
    ]
    layouts = layouts_of_blocks(
        [block for _, block, _ in blocks],
        num_devices,
        expert_parallel,
        model_parallel,
        batch_size,
    )
    on_tpus = chip.torus > 0 and dtype == "bfloat16"
    weights = _device_weights(towers, model, layouts, OPTIMIZERS[optimizer], itemsize)
    shares = [
        _BlockShare(
            block,
            batch_size // layouts.mesh[BATCH],
            batch_size,
            (*sequences, *texts),
            sum(sequences),
            tower.hidden_dim,
            model_parallel,
            weights.expert_devices,
            itemsize,
        )
        for tower, block, sequences in blocks
    ]
    rematerialize = any(block.rematerialize for _, block, _ in blocks)
    memory = _memory(weights, optimizer, shares, rematerialize, on_tpus)
    traffic = _traffic(shares, weights, model_parallel, rematerialize)
    flops = _flops(blocks, model, texts, rematerialize) * batch_size / num_devices
    rates = dict.fromkeys(traffic, chip.bandwidth)
    rates[ALL_TO_ALL] = chip.all_to_all_bandwidth(weights.expert_devices, num_devices)
    seconds = {
        "compute": flops / (chip.peak_flops * utilization),
        **{name: size / rates[name] for name, size in traffic.items()},
    }
    layout = f"experts over {weights.expert_devices}, heads over {model_parallel}"
    layout += ", rematerialised" if rematerialize else ""
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
        model.example,
    )


def _memory(weights, optimizer, shares, rematerialize, on_tpus):
    """Bytes on one device, by part."""
    per = KEPT_ON_TPUS if on_tpus else KEPT
    activations = [share.activation_bytes(per) for share in shares]
    kept = sum(activations)
    if rematerialize:
        # The inputs of all blocks plus the activations of one.
        inputs = sum(share.tokens * share.dim * share.itemsize for share in shares)
        kept = inputs + max(activations)
    gradients = 4 * weights.parameters
    if on_tpus:
        # In bfloat16, and in the place of activations that are no longer needed.
        gradients = max(0, gradients // 2 - kept)
    return {
        "weights": 4 * weights.parameters,
        "gradients": gradients,
        f"optimizer ({optimizer})": weights.state_bytes,
        "activations": kept,
    }


def _traffic(shares, weights, model_parallel, rematerialize):
    """Bytes sent by a device per step, by purpose."""
    # Forward, backward, and forward again if rematerialised.
    passes = 3 if rematerialize else 2
    # To the experts and back.
    dispatched = sum(share.sent_rows * share.dim * share.itemsize for share in shares)
    sent = 2 * passes * dispatched
    summed = sum(share.model_parallel_bytes() for share in shares)
    devices = weights.expert_devices
    return {
        ALL_TO_ALL: sent * (devices - 1) // devices,
        "all-reduce (gradients)": round(weights.summed_bytes),
        "all-reduce (heads, hidden units)": round(
            passes * summed * _ring(model_parallel)
        ),
    }


def _flops(blocks, model, texts, rematerialize):
    """FLOPs of a training step for one image and its texts."""
    block_flops = described_flops = 0
    for tower, block, sequences in blocks:
        flops = [block.cost((n, tower.hidden_dim)).flops for n in (*sequences, *texts)]
        block_flops += sum(flops)
        described_flops += sum(flops[: len(sequences)])
    other_flops = sum(part.flops for part in model.parts) - described_flops
    # Backward costs twice the forward pass; rematerialised blocks run forward again.
    return 3 * other_flops + (4 if rematerialize else 3) * block_flops


class _DeviceWeights(NamedTuple):
    """A device's weights, and the bytes that it sends to all-reduce their gradients."""

    parameters: int
    state_bytes: int
    summed_bytes: float
    expert_devices: int


def _device_weights(towers, model, layouts, state_of_shape, itemsize):
    # Block weights, which a layout may split, by path; all others as one vector.
    shapes = {}
    for tower in towers:
        for block in tower.blocks:
            own = block.weight_shapes((sum(tower.sequences), tower.hidden_dim))
            shapes.update(under(f"{tower.prefix}{block.name}", own))
    shapes["rest"] = (model.parameters - sum(map(math.prod, shapes.values())),)
    sizes = {None: 1, **layouts.mesh, **layouts.expert_mesh}
    parameters = state_bytes = summed_bytes = 0
    expert_devices = 1
    for path, shape in shapes.items():
        matching = (
            x for rule, x in layouts.weights.items() if re.fullmatch(rule, path)
        )
        axes = next(matching, (None,) * len(shape))
        parts = [sizes[axis] for axis in axes]
        local = tuple(size // part for size, part in zip(shape, parts))
        parameters += math.prod(local)
        state_bytes += state_of_shape(local)
        model_devices = math.prod(sizes[axis] for axis in axes if axis == MODEL)
        dealt = math.prod(parts) // model_devices
        if "/experts/" in path:
            expert_devices = dealt
        same_weights = layouts.mesh[BATCH] // dealt
        size = 4 if FLOAT32_GRADIENTS.fullmatch(path) else itemsize
        summed_bytes += size * math.prod(local) * _ring(same_weights)
    return _DeviceWeights(parameters, state_bytes, summed_bytes, expert_devices)


def _ring(num_devices):
    """Bytes sent by a device in a ring all-reduce, per byte of gradient."""
    return 2 * (num_devices - 1) / num_devices


def _factored(shape):
    size = math.prod(shape)
    rows, columns = [1, 1, *sorted(shape)][-2:]
    if rows < FACTORED_FROM:
        return size
    return size // rows + size // columns


class _BlockShare(NamedTuple):
    """A block and a device's share of the batch; `grouped` is the image's sequences."""

    block: keras.layers.Layer
    examples: int
    batch_size: int
    sequences: tuple[int, ...]
    grouped: int
    dim: int
    model_parallel: int
    expert_devices: int
    itemsize: int

    @property
    def tokens(self) -> int:
        return self.examples * sum(self.sequences)

    @property
    def sent_rows(self) -> int:
        """Slots for the device's tokens in training, or choices without a capacity."""
        moe = self.block.feed_forward
        if "experts" not in dict(split_parts(self.block)):
            return 0
        router, size = moe.router, sum(self.sequences)
        if router.groups_per_example(True):
            return self.examples * router.total_slots(size)
        examples = self.batch_size
        if moe.group_size is not None:
            examples = min(examples, moe.group_size // self.grouped)
        # Images together with their texts.
        size *= examples
        capacity = router.group_capacity(size, True)
        if capacity is None:
            if not moe.experts.is_plain(True) and self.examples < self.batch_size:
                raise ValueError(
                    "Expected a capacity for experts with dropout or an activation "
                    "layer, since without one every device runs all rows; received: "
                    "dropless=True"
                )
            return router.total_slots(self.tokens)
        num_groups, rest = divmod(self.tokens, size)
        if rest:
            raise ValueError(
                f"Expected whole groups on each device, such as by {self._fitting()}; "
                f"received: batch_size={self.batch_size}, {self.examples} examples on "
                f"each device, groups of {examples}"
            )
        return num_groups * moe.experts.num_experts * capacity

    @property
    def slots(self) -> int:
        """Slots of the device's experts, or the rows that they take at a time."""
        router = self.block.feed_forward.router if self.sent_rows else None
        if router is None or router.groups_per_example(True):
            return self.sent_rows
        if router.group_capacity(self.tokens, True) is not None:
            return self.sent_rows
        return rows_per_round(self.sent_rows, self.expert_devices)

    def _fitting(self):
        """What would give each device whole groups."""
        size = self.block.feed_forward.group_size
        own = size and size // self.grouped
        parts = range(1, min(own or self.examples, self.examples) + 1)
        smaller = max(part for part in parts if self.examples % part == 0)
        step = own and own * (self.batch_size // self.examples)
        larger = step and f"batch_size={-(-self.batch_size // step) * step} or "
        return f"{larger or ''}examples_per_group={smaller}"

    def activation_bytes(self, per: Kept) -> int:
        """Bytes that the block keeps for the backward pass."""
        split, dim, routing = self.model_parallel, self.dim, 0
        parts = dict(split_parts(self.block))
        if len(parts) < 2:
            raise ValueError(
                "Expected blocks of attention, MLPs and MoE layers; received: "
                f"{type(self.block.token_mixer).__name__}, "
                f"{type(self.block.feed_forward).__name__}"
            )
        numbers = per.per_token * dim * self.tokens
        for kind, layer in parts.items():
            if kind == "attention":
                keys = (n * -(-n // per.lanes) * per.lanes for n in self.sequences)
                pairs = self.examples * sum(keys)
                numbers += per.per_pair * layer.num_heads * pairs // split
                continue
            units = per.per_hidden_unit * layer.mlp_dim
            if kind == "token_mlp":
                numbers += units * dim * self.examples // split
                continue
            units += layer.gated * layer.mlp_dim
            if kind in ("mlp", "shared_experts"):
                numbers += units * self.tokens // split
                continue
            numbers += self.slots * units // split + self.slots * per.per_slot * dim
            num_experts = self.block.feed_forward.router.num_experts
            routing = self.tokens * num_experts * ROUTING_BYTES
        return round(numbers) * self.itemsize + routing

    def model_parallel_bytes(self) -> int:
        """Bytes of token mixer and MLP outputs that tensor parallelism all-reduces."""
        return (
            (self.tokens + (self.sent_rows or self.tokens)) * self.dim * self.itemsize
        )
