"""Costs of a step as the TPU compiler sees them, without a TPU.

libtpu compiles for any topology on a CPU, and its program says what it needs: memory,
cycles of each operation, and what is sent between chips. Needs JAX.
"""

import contextlib
import importlib.util
import math
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import keras
from rich.console import Console
from rich.table import Table

from keras_moe.checks import argument_names, check_integer, check_one_of
from keras_moe.compat import build_metrics, take_layout, variables_without_values
from keras_moe.distribution.auto import auto, check_backend
from keras_moe.distribution.chips import CHIPS
from keras_moe.distribution.program import Program
from keras_moe.models import registry
from keras_moe.models.source import resolve

STEPS = ("train", "predict")
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
# Names of libtpu, and for each generation the chip and the FLOPs of a device in a cycle
# of its matrix units.
GENERATIONS = {
    "v4": ("tpu_v4", 2**17, CUBES),
    "v5e": ("tpu_v5e", 2**17, FLAT),
    "v5p": ("tpu_v5p", 2**18, ("1x1x1", *CUBES)),
    "v6e": ("tpu_v6e", 2**19, FLAT),
    "tpu7x": ("tpu_7x", 2**19, CUBES),
}
TOPOLOGIES = tuple(
    f"{name}:{shape}" for name, (*_, shapes) in GENERATIONS.items() for shape in shapes
)
# What libtpu asks a TPU's host for. Without a TPU it needs no lock.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# How much of a chip the compiler needs and has, in its error.
TOO_LARGE = re.compile(r"Used ([\d.]+)([MG]) of ([\d.]+)([MG]) hbm")
UNITS = {"M": 2**20, "G": 2**30}


class DoesNotFit(ValueError):
    """The compiler found a step too large for a device's memory."""


class CompiledCosts(NamedTuple):
    """Costs of one step on each device, as estimated by the compiler.

    Attributes:
        name: name of the model.
        topology: name of the topology.
        num_devices: number of devices; a TPU v4 or 7x chip has two.
        step: `"train"` or `"predict"`.
        batch_size: global batch size.
        memory: dict from part to bytes on one device: `"weights"`, `"optimizer"`,
            `"batch"`, `"activations and gradients"` and `"program"`.
        capacity: bytes of memory of one device.
        flops: FLOPs of one device, as the program runs them.
        model_flops: FLOPs of one device without repetition and padding: those of
            `describe`, times three in training.
        seconds: dict from part to seconds: `"experts"`, `"dispatch"`, `"router"`,
            `"attention"`, `"MLPs"`, `"optimizer"`, `"other"` and `"collectives"`; the
            last may overlap the others.
        utilization: `model_flops` over the peak FLOPs of a step.
        collectives: dict from kind to the number and bytes of one device's results.
        operations: the ten longest operations, a dict each.
        num_untimed: number of grouped matmuls (experts without a capacity), of whose
            time the compiler has no estimate: `seconds` lacks it.
        changes: dict of arguments that `fit=True` changed.
        compile_seconds: time that compilation took.

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
    seconds: dict
    utilization: float
    collectives: dict
    operations: list
    num_untimed: int
    changes: dict
    compile_seconds: float

    @property
    def memory_bytes(self) -> int:
        """Total bytes on one device."""
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Time of a step with and without communication overlapping compute."""
        sending = self.seconds["collectives"]
        computing = sum(self.seconds.values()) - sending
        return max(computing, sending), computing + sending

    def print(self, console: Console | None = None) -> None:
        """Prints memory, time, collectives and the longest operations as tables."""
        console = console or Console()
        fastest, slowest = self.step_seconds
        gib = {name: f"{size / 2**30:.2f}" for name, size in self.memory.items()}
        verdict = {
            "all": f"{self.memory_bytes / 2**30:.2f}",
            "the device": f"{self.capacity / 2**30:.2f}",
        }
        times = {
            part: (f"{1e3 * seconds:.2f}", f"{seconds / slowest:.0%}")
            for part, seconds in self.seconds.items()
        }
        total = {
            "step, sending while computing": (f"{1e3 * fastest:.2f}", ""),
            "step, one after the other": (f"{1e3 * slowest:.2f}", ""),
            "model FLOPs utilisation": ("", f"{self.utilization:.0%}"),
        }
        sent = {
            kind: (str(number), f"{size / 1e9:.3f}")
            for kind, (number, size) in self.collectives.items()
        }
        lines = [
            (x["part"], x["operation"], x["source"] or "", f"{1e3 * x['seconds']:.2f}")
            for x in self.operations
        ]
        for shown in (
            f"{self.name}, a {self.step} step of {self.batch_size:,} on "
            f"{self.topology} ({self.num_devices} devices)",
            _table("memory of a device", ("GiB",), gib, verdict),
            _table("time of a step", ("ms", "share"), times, total),
            *(
                [_table("collectives on a device", ("number", "GB"), sent)]
                if sent
                else []
            ),
            _longest(lines),
            *self._remarks(),
        ):
            console.print(shown, highlight=False, soft_wrap=isinstance(shown, str))

    def _remarks(self):
        """What a reader of the tables must know."""
        if self.changes:
            changes = ", ".join(f"{k}={v}" for k, v in self.changes.items())
            yield f"It fits with {changes}."
        if self.num_untimed:
            yield (
                f"The time lacks {self.num_untimed} grouped matmuls of experts without "
                "a capacity, for which the compiler has no estimate."
            )
        yield (
            f"The compiler's estimates, made in {self.compile_seconds:.0f} s; nothing "
            "ran on a TPU."
        )


def _table(title, columns, rows, last=None):
    """A table of one or several numbers by name, the last rows apart."""
    table = Table("", title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for part in (rows, last or {}):
        for name, values in part.items():
            table.add_row(name, *((values,) if isinstance(values, str) else values))
        table.add_section()
    return table


def _longest(lines):
    table = Table("part", "operation", "source", title="longest operations")
    table.add_column("ms", justify="right")
    for line in lines:
        table.add_row(*line)
    return table


def compiled_costs(
    model_or_preset: Any,
    topology: str,
    batch_size: int,
    step: str = "train",
    expert_parallel: Any = None,
    model_parallel: int = 1,
    dtype: str = "mixed_bfloat16",
    num_classes: int | None = None,
    fit: bool = False,
    **overrides: Any,
) -> CompiledCosts:
    """Compiles a step for TPUs under a layout of `auto`, and returns its costs.

    No TPU is needed and no weights are allocated. It takes seconds for a few blocks,
    minutes for a deep model. The numbers are the compiler's: memory is what it will
    reserve, time is its model of each operation (sorts and gathers have none), and the
    time of collectives is their bytes over the links' bandwidth.

    Args:
        model_or_preset: as in `auto`. A compiled model is measured with its own
            optimizer and loss; a backbone gets its first registered task.
        topology: generation and shape, such as `"v5e:4x4"` or `"v5p:2x4x4"`.
        batch_size: global batch size.
        step: `"train"` or `"predict"`.
        expert_parallel: as in `auto`.
        model_parallel: as in `auto`.
        dtype: dtype policy of a preset.
        num_classes: number of classes of a new head. Defaults to 1000 where a backbone
            gets a classifier.
        fit: whether to try again what does not fit: a preset with `rematerialize=True`,
            and then with half the batch, down to one example for each device.
        **overrides: arguments of the model that differ from the preset.

    Raises:
        ImportError: libtpu is not installed.
        DoesNotFit: the step needs more memory than a device has. A ValueError.

    Example:

    >>> from keras_moe import distribution
    >>> distribution.compiled_costs("vmoe_b16", "v5e:3x3", 256)
    Traceback (most recent call last):
    ...
    ValueError: Expected topology to be one of ...; received: topology='v5e:3x3'...
    """
    check_one_of("topology", topology, TOPOLOGIES)
    check_one_of("step", step, STEPS)
    check_integer("batch_size", batch_size)
    check_backend()
    is_model = isinstance(model_or_preset, keras.Model)
    if not is_model:
        overrides["dtype"] = dtype
    if num_classes is not None:
        overrides["num_classes"] = num_classes
    with _without_xla_flags():
        chip, devices = _chip_and_devices(topology)
        changes = {}
        while True:
            arguments = {**overrides, **changes}
            size = arguments.pop("batch_size", batch_size)
            try:
                name, model, flops = _abstract(model_or_preset, step, arguments)
                layouts = auto(model, devices, expert_parallel, model_parallel, size)
                found = _compiled(name, model, layouts, topology, size, step)
                break
            except DoesNotFit:
                if not fit:
                    raise
                if (
                    step == "train"
                    and not is_model
                    and not arguments.get("rematerialize")
                ):
                    changes["rematerialize"] = True
                elif size % (2 * len(devices) // model_parallel) == 0:
                    changes["batch_size"] = size // 2
                else:
                    raise
    return _costs(found, chip, flops, changes)


@contextlib.contextmanager
def _without_xla_flags():
    """Hides flags of XLA on CPUs and GPUs, over which libtpu ends the process."""
    flags = os.environ.pop("XLA_FLAGS", None)
    try:
        yield
    finally:
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags


class _Compiled(NamedTuple):
    """A compiled step and what is known about it."""

    name: str
    topology: str
    num_devices: int
    step: str
    batch_size: int
    compiled: Any
    text: str
    memory: dict
    optimizer: str | None
    seconds: float


def _compiled(name, model, layouts, topology, batch_size, step):
    lowered, state, batch = _lower(model, layouts, step, batch_size)
    start = time.perf_counter()
    compiled, text = _compile(lowered, name, topology)
    return _Compiled(
        name,
        topology,
        layouts.device_mesh.devices.size,
        step,
        batch_size,
        compiled,
        text,
        _memory(compiled.memory_analysis(), state, batch),
        getattr(getattr(model, "optimizer", None), "name", None),
        time.perf_counter() - start,
    )


def _costs(found, chip, flops, changes):
    """Reads the costs of a compiled program."""
    devices = found.num_devices
    # A device may be a part of a chip.
    share = devices / _num_chips(found.topology)
    peak = chip.peak_flops / share
    clock = peak / GENERATIONS[found.topology.partition(":")[0]][1]
    program = Program(found.text, found.optimizer)
    seconds = {part: x / clock for part, x in program.cycles_by_part().items()}
    collectives = program.collectives()
    sending = _sending_seconds(collectives, chip, devices)
    total = max(sum(seconds.values()), sending)
    passes = 3 if found.step == "train" else 1
    model_flops = passes * flops * found.batch_size / devices
    return CompiledCosts(
        found.name,
        found.topology,
        devices,
        found.step,
        found.batch_size,
        found.memory,
        chip.memory / share,
        found.compiled.cost_analysis()["flops"],
        model_flops,
        {**seconds, "collectives": sending},
        model_flops / (peak * total),
        collectives,
        [
            {**each._asdict(), "seconds": each.cycles / clock}
            for each in program.longest(10)
        ],
        program.num_untimed(),
        changes,
        found.seconds,
    )


def _chip_and_devices(topology):
    """The chip of a topology, and its devices, which can only be compiled for."""
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            "Expected libtpu, the compiler of TPUs: pip install 'keras-moe[tpu-plan]'"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import jax
    from jax.experimental import topologies

    try:
        devices = list(topologies.get_topology_desc(topology, "tpu").devices)
    except Exception as error:
        raise RuntimeError(
            "Expected a libtpu of JAX's version, and no other process that holds its "
            f"lock; received: jax {jax.__version__}, {' '.join(str(error).split())}"
        ) from error
    return CHIPS[GENERATIONS[topology.partition(":")[0]][0]], devices


def _num_chips(topology):
    return math.prod(map(int, topology.partition(":")[2].split("x")))


def _abstract(source, step, overrides):
    """Name, compiled model without weights, and FLOPs of an example's forward pass."""
    options = {"load_weights": overrides.pop("load_weights", True)}
    is_model = isinstance(source, keras.Model)
    with resolve(source, overrides, **options) as blueprint:
        backbone = blueprint.backbone
        if blueprint.task is not None or step == "predict":
            return _parts(blueprint, source if is_model else None)
    task = None if is_model else registry.task_class(backbone)
    if task is None:
        raise ValueError(
            "Expected a task, such as an ImageClassifier, for step='train'; received: "
            f"a {backbone.__name__}"
        )
    if "num_classes" in argument_names(task):
        overrides = {"num_classes": 1000, **overrides}
    with resolve(source, overrides, task=task.task_name, **options) as blueprint:
        return _parts(blueprint)


def _parts(blueprint, compiled_like=None):
    model = blueprint.build_abstract(compiled_like)
    return blueprint.name, model, sum(x.flops for x in blueprint.describe().parts)


def _lower(model, distribution, step, batch_size):
    """The traced step, and the bytes of its state and batch on one device."""
    import jax

    backbone = getattr(model, "backbone", model)

    def spec(shape, dtype, layout):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.backend_layout)

    def of_variable(variable):
        layout = distribution.get_variable_layout(variable)
        return spec(variable.shape, variable.dtype, layout)

    def of_data(x):
        # The length of texts may be open.
        lengths = (backbone.max_length if n is None else n for n in x.shape[1:])
        shape = (batch_size, *lengths)
        return spec(shape, x.dtype, distribution.get_data_layout(shape))

    inputs = keras.tree.map_structure(of_data, model.input)
    trains = step == "train"
    with distribution.scope(), variables_without_values():
        for variable in model.variables:
            take_layout(variable)
        if trains:
            model.optimizer.build(model.trainable_variables)
    groups = {
        "weights": [model.trainable_variables, model.non_trainable_variables],
        "optimizer": [],
    }
    if trains:
        data = (inputs, *map(of_data, _labels(model)))
        build_metrics(model, data)
        groups["optimizer"] = [model.optimizer.variables, model.metrics_variables]
    else:
        data = (inputs,)
    with distribution.scope():
        specs = {
            name: [[of_variable(x) for x in group] for group in lists]
            for name, lists in groups.items()
        }
        state = tuple(specs["weights"] + specs["optimizer"])
        layouts = jax.tree.map(lambda x: x.sharding, state)
        if trains:
            function = jax.jit(
                model.train_step, donate_argnums=0, out_shardings=(None, layouts)
            )
        else:
            function = jax.jit(model.predict_step)
        lowered = function.lower(state, data)
    sizes = {name: _device_bytes(group) for name, group in specs.items()}
    return lowered, sizes, _device_bytes(data)


def _labels(model):
    """The symbolic labels of a task's training step, in a list; [] for pairs."""
    spec = getattr(model, "label_spec", lambda: None)()
    return [] if spec is None else [spec]


def _device_bytes(specs):
    import jax

    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(specs)
    )


def _compile(lowered, name, topology):
    """The compiled step, and its program as the compiler prints it."""
    import jax

    # JAX itself cannot print all programs for v5p and v6e.
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            raise _explained(error, name, topology) from error
        (path,) = Path(folder).glob("*.after_codegen.txt")
        return compiled, path.read_text(encoding="utf-8")


def _explained(error, name, topology):
    """The compiler's error, or `DoesNotFit` if it is one of memory."""
    found = TOO_LARGE.search(str(error))
    if found is None:
        return error
    needed, capacity = (float(found[i]) * UNITS[found[i + 1]] / 2**30 for i in (1, 3))
    return DoesNotFit(
        f"Expected a step within the {capacity:.2f} GiB of a device of {topology}; "
        f"received: {name}, which needs {needed:.2f} GiB, {needed - capacity:.2f} "
        "more. rematerialize=True, more devices, a smaller batch_size or a larger "
        "expert_parallel need less"
    )


def _memory(analysis, state, batch):
    """Bytes on one device, by part; weights are replaced in place."""
    new_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {
        **state,
        "batch": batch,
        "activations and gradients": analysis.temp_size_in_bytes + new_outputs,
        "program": analysis.generated_code_size_in_bytes,
    }


def _sending_seconds(collectives, chip, devices):
    """Time of all collectives at the bandwidth of the links, one after the other."""
    seconds = 0.0
    for kind, (_, size) in collectives.items():
        rate = chip.bandwidth
        if kind == "all-to-all":
            rate = chip.all_to_all_bandwidth(devices)
        # A ring sends the data of an all-reduce twice.
        seconds += (2 if kind == "all-reduce" else 1) * size / rate
    return seconds
