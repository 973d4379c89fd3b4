"""Costs of a step by the compiler of TPUs or GPUs, without one.

libtpu compiles for any topology on a CPU, and its program says what it needs: memory,
cycles of each operation, and what is sent between chips. JAX's CUDA plugin does the
same for GPUs, without cycles. Needs JAX.
"""

import math
from typing import Any, NamedTuple

import keras
from rich.console import Console

from keras_moe._checks import argument_names, check_integer, check_one_of, unfit
from keras_moe._compat import flatten_layers
from keras_moe._tables import numbers_table
from keras_moe.distribution._program import Program
from keras_moe.distribution.auto import auto
from keras_moe.distribution.chips import GENERATIONS, GIB
from keras_moe.distribution.costs import STEP_NAMES, memory_table
from keras_moe.models import registry
from keras_moe.models.loading.blueprint import resolve

STEPS = ("train", "predict", "generate")


class CompiledCosts(NamedTuple):
    """Costs of one step on each device, as estimated by the compiler.

    Attributes:
        name: name of the model.
        topology: name of the topology.
        num_devices: number of devices; a TPU 7x chip has two.
        step: `"train"`, `"predict"` or `"generate"`.
        batch_size: global batch size.
        memory: dict from part to bytes on one device: `"weights"`, `"optimizer"`,
            `"batch"`, `"padding"`, `"activations and gradients"` and `"program"`.
        capacity: bytes of memory of one device.
        flops: FLOPs of one device, as the program runs them; on GPUs those of products
            of matrices.
        model_flops: FLOPs of one device without repetition and padding: those of
            `describe`, times three in training.
        seconds: dict from part to seconds: `"experts"`, `"dispatch"`, `"router"`,
            `"attention"`, `"MLPs"`, `"optimizer"`, `"other"` and `"collectives"`; the
            last may overlap the others. None for GPUs, whose compiler has no times.
        utilization: `model_flops` over the peak FLOPs of a step; None if `seconds` is
            not complete.
        collectives: dict from kind to the number and bytes of one device's results.
        operations: the ten longest operations, those of all blocks together, a dict
            each; empty for GPUs.
        num_untimed: number of grouped matmuls (experts without a capacity). The
            compiler's estimate for them is wrong, so that `seconds` leaves them out.
        changes: dict of arguments that `fit=True` changed.
        compile_seconds: time that compilation took.
        num_open_loops: number of loops that end by their data, whose time is that of
            one round.

    Example:

    >>> from keras_moe.distribution import CompiledCosts
    >>> "memory" in CompiledCosts._fields
    True
    """

    name: str
    topology: str
    num_devices: int
    step: str
    batch_size: int
    memory: dict
    capacity: float
    flops: float
    model_flops: float
    seconds: dict | None
    utilization: float | None
    collectives: dict
    operations: list
    num_untimed: int
    changes: dict
    compile_seconds: float
    num_open_loops: int = 0

    @property
    def memory_bytes(self) -> int:
        """Total bytes on one device."""
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """Time of a step with and without communication overlapping compute."""
        if self.seconds is None:
            return None
        sending = self.seconds["collectives"]
        computing = sum(self.seconds.values()) - sending
        return max(computing, sending), computing + sending

    def print(self, console: Console | None = None) -> None:
        """Prints memory, time, collectives and the longest operations as tables."""
        console = console or Console()
        sent = [
            (kind, number, f"{size / 1e9:.3f}")
            for kind, (number, size) in self.collectives.items()
        ]
        shown = [
            f"{self.name}, {self.step} step of {self.batch_size:,} on {self.topology} "
            f"({self.num_devices} devices)",
            memory_table(self.memory, {"the device": self.capacity}),
        ]
        if self.seconds is not None and self.step_seconds is not None:
            shown.append(self._time_table(self.seconds, self.step_seconds))
        if sent:
            columns = ("kind", "number", "GB")
            shown.append(numbers_table("collectives on a device", columns, sent))
        if self.operations:
            shown.append(self._operations_table())
        for each in (*shown, *self._remarks()):
            is_text = isinstance(each, str)
            console.print(each, highlight=False, markup=False, soft_wrap=is_text)

    def _time_table(self, seconds, steps):
        times = [
            (part, f"{1e3 * time:.2f}", f"{time / steps[1]:.0%}")
            for part, time in seconds.items()
        ]
        total = [(name, f"{1e3 * x:.2f}", "") for name, x in zip(STEP_NAMES, steps)]
        known = self.utilization is not None
        share = f"{self.utilization:.0%}" if known else "unknown"
        total.append(("model FLOPs utilisation", "", share))
        return numbers_table("time of a step", ("part", "ms", "share"), times, total)

    def _operations_table(self):
        longest = [
            (f"{x['part']}: {x['operation']}", x["runs"], f"{1e3 * x['seconds']:.2f}")
            for x in self.operations
        ]
        columns = ("operation", "runs", "ms")
        return numbers_table("longest operations", columns, longest)

    def _remarks(self):
        """What a reader of the tables must know."""
        if self.changes:
            changes = ", ".join(f"{k}={v}" for k, v in self.changes.items())
            yield f"It fits with {changes}."
        device = "TPU"
        if self.seconds is None:
            device = "GPU"
            yield (
                f"A device runs {self.flops / 1e12:.3g} TFLOP; the model needs "
                f"{self.model_flops / 1e12:.3g}. The time is unknown: this compiler "
                "has no estimate."
            )
        elif self.num_untimed:
            yield (
                f"The time does not include {self.num_untimed} grouped matmuls of "
                "experts without a capacity: the compiler's estimate for them is wrong."
            )
        if self.seconds is not None and self.num_open_loops:
            what = " (one token)" if self.step == "generate" else ""
            yield (
                f"The time has one round{what} of each of {self.num_open_loops} loops "
                "that end by their data."
            )
        yield (
            f"The compiler's estimates, made in {self.compile_seconds:.0f} s; nothing "
            f"ran on a {device}."
        )


def compiled_costs(
    model_or_preset: object,
    topology: str,
    batch_size: int,
    step: str = "train",
    expert_parallel: int | str | None = None,
    model_parallel: int = 1,
    *,
    dtype: str | None = None,
    num_classes: int | None = None,
    fit: bool = False,
    **overrides: Any,
) -> CompiledCosts:
    """Compiles a step for TPUs or GPUs under a layout of `auto`, and returns its costs.

    No device is needed and no weights are allocated. It takes seconds for a few blocks,
    minutes for a deep model. The numbers are the compiler's: memory is what it will
    reserve, time is its model of each operation (sorts and gathers have none), and the
    time of collectives is their bytes over the links' bandwidth. For GPUs there are
    memory, FLOPs and collectives, and no times.

    Args:
        model_or_preset: as in `auto`. A compiled model is measured with its own
            optimizer and loss, and so is that of `Recipe.abstract_model`; a backbone
            gets its first registered task.
        topology: generation and shape, such as `"v5e:4x4"` or `"v5p:2x4x4"`; for GPUs
            their number, `"h200:8"`, or hosts and GPUs of each, `"h200:2x8"`.
        batch_size: global batch size.
        step: `"train"`, `"predict"` or, for language models, `"generate"`: a prompt of
            up to `max_length` tokens, and then one token at a time with a cache.
        expert_parallel: as in `auto`, and so are `model_parallel` and `overrides`.
        dtype: dtype policy of a preset; defaults to `"mixed_bfloat16"`.
        num_classes: number of classes of a new head. Defaults to 1000 where a backbone
            gets a classifier.
        fit: whether to try again what does not fit: a preset with `rematerialize=True`,
            and then with half the batch, down to one example for each device.

    Raises:
        ImportError: the compiler (libtpu, JAX's CUDA plugin) is not installed, or not
            of JAX's version.
        OSError: another process holds libtpu.
        ValueError: the step needs more memory than a device has.

    Example:

    >>> from keras_moe import distribution
    >>> distribution.compiled_costs("vmoe_b16", "v5e:3x3", 256)
    Traceback (most recent call last):
    ...
    ValueError: Expected ... v5e: 1x1, 2x2, ...; received: topology='v5e:3x3'
    """
    chip, num_chips = _chips_of(topology)
    check_one_of("step", step, STEPS)
    check_integer("batch_size", batch_size)
    if keras.backend.backend() != "jax":
        expected = "KERAS_BACKEND=jax, which compiles for devices that are not here"
        raise unfit(expected, backend=keras.backend.backend())
    is_model = isinstance(model_or_preset, keras.Model)
    if not is_model:
        overrides["dtype"] = dtype or "mixed_bfloat16"
    elif dtype is not None:
        raise ValueError(f"Expected no dtype with a model; received: dtype={dtype!r}")
    if num_classes is not None:
        overrides["num_classes"] = num_classes
    from keras_moe._backends import jax_compilation

    changes = {}
    capacity = chip.capacity / GIB
    with jax_compilation.alone():
        devices = jax_compilation.topology_devices(topology)
        while True:
            arguments = {**overrides, **changes}
            size = arguments.pop("batch_size", batch_size)
            description, model = _abstract(model_or_preset, step, arguments)
            layouts = auto(
                model, devices, expert_parallel, model_parallel, batch_size=size
            )
            try:
                compiled = jax_compilation.compile_step(model, layouts, size, step)
                needed = sum(compiled.memory.values()) / GIB
                if needed > capacity:
                    raise MemoryError(needed, capacity)
                break
            except MemoryError as error:
                kept = step == "train" and not any(
                    getattr(x, "rematerialize", False) for x in flatten_layers(model)
                )
                if kept and not is_model:
                    change = {"rematerialize": True}
                elif size % (2 * len(devices) // model_parallel) == 0:
                    change = {"batch_size": size // 2}
                else:
                    change = None
                if not fit or change is None:
                    message = _too_large(error, topology, size, kept, fit)
                    raise ValueError(message) from error
                changes |= change
    # The backward pass costs twice the forward pass.
    passes = 3 if step == "train" else 1
    model_flops = passes * sum(part.flops for part in description.parts)
    model_flops = model_flops * size / len(devices)
    program = Program(compiled.text, compiled.optimizer)
    share = len(devices) / num_chips
    return CompiledCosts(
        name=description.name,
        topology=topology,
        num_devices=len(devices),
        step=step,
        batch_size=size,
        memory=compiled.memory,
        capacity=chip.capacity,
        flops=program.matmul_flops() if compiled.flops is None else compiled.flops,
        model_flops=model_flops,
        **_times(program, chip, num_chips, share, model_flops, step),
        collectives=program.collectives(),
        num_untimed=program.num_untimed(),
        changes=changes,
        compile_seconds=compiled.seconds,
        num_open_loops=program.num_open_loops(),
    )


def _chips_of(topology):
    """The chip of a topology, and their number."""
    generation, _, shape = str(topology).partition(":")
    allowed = (
        f"a generation, one of {', '.join(GENERATIONS)}, and a shape, such as "
        "v5e:4x4 or h200:8"
    )
    if generation in GENERATIONS:
        chip = GENERATIONS[generation]
        if shape in chip.shapes:
            return chip, math.prod(map(int, shape.split("x")))
        allowed = f"a shape of {generation}: {', '.join(chip.shapes)}"
    raise ValueError(f"Expected {allowed}; received: topology={topology!r}")


def _too_large(error, topology, size, keeps_activations, tried):
    needed, capacity = error.args
    more = ", with rematerialize=True" if keeps_activations else ""
    more += "" if tried else " (fit=True tries)"
    return (
        f"Expected a step within the {capacity:.2f} GiB of a device of {topology}; "
        f"received: batch_size={size}, which needs {needed:.2f} GiB, "
        f"{needed - capacity:.2f} more. It needs less with a smaller batch{more} "
        "or with more devices"
    )


def _times(program, chip, num_chips, share, model_flops, step):
    """What is known of time; `share` is the number of devices of a chip."""
    if chip.flops_per_cycle is None:
        return {"seconds": None, "utilization": None, "operations": []}
    peak = chip.peak_flops / share
    cycle = chip.flops_per_cycle / peak
    seconds = {part: cycle * x for part, x in program.cycles_by_part().items()}
    sending = share * _sending_seconds(program.transfers(), chip, num_chips, share)
    utilization = None
    if not program.num_untimed() and step != "generate":
        utilization = model_flops / (peak * max(sum(seconds.values()), sending))
    longest = program.longest(10)
    return {
        "seconds": {**seconds, "collectives": sending},
        "utilization": utilization,
        "operations": [{**x._asdict(), "seconds": cycle * x.cycles} for x in longest],
    }


def _abstract(source, step, overrides):
    """The `Description` of a model, and the compiled model without weights."""
    own = source if isinstance(source, keras.Model) else None
    options: dict[str, Any] = {"load_weights": overrides.pop("load_weights", True)}
    while True:
        with resolve(source, overrides, **options) as blueprint:
            if blueprint.task is not None or step == "predict":
                model = blueprint.build_abstract(own)
                # The same weights as those of the given model.
                trained, others = (
                    {x.path for x in each.trainable_variables}
                    for each in (own or model, model)
                )
                if other := trained ^ others:
                    given = f"one with other weights to train, such as {min(other)}"
                    raise unfit("a model as its config describes it", given)
                return blueprint.describe(), model
        backbone = blueprint.backbone
        task = None if own is not None else registry.task_class(backbone)
        if task is None:
            expected = f"a task, such as an ImageClassifier, for step={step!r}"
            raise unfit(expected, f"a {backbone.__name__}")
        # Once more, as the first task of the backbone.
        options["task"] = task.task_name
        if "num_classes" in argument_names(task):
            overrides.setdefault("num_classes", 1000)


def _sending_seconds(transfers, chip, num_chips, devices_per_chip):
    """Time of all collectives at the bandwidth of the links, one after the other."""
    seconds = 0.0
    for kind, group, times, size in transfers:
        rate = chip.bandwidth
        if kind.endswith("all-to-all"):
            chips = math.ceil(group / devices_per_chip) or num_chips
            rate = chip.all_to_all_bandwidth(chips, num_chips)
        # A ring sends the data of an all-reduce twice.
        seconds += (2 if kind == "all-reduce" else 1) * times * size / rate
    return seconds
