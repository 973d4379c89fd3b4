"""Compiles a model's step for TPUs without a TPU, by JAX and libtpu."""

import contextlib
import importlib.util
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import keras
from jax.experimental import topologies

from keras_moe.compat import build_metrics, take_layout, variables_without_values
from keras_moe.distribution.program import DoesNotFit

# What libtpu asks a TPU's host for. Without a TPU it needs no lock.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# How much of a chip the compiler needs and has, in its error.
TOO_LARGE = (
    re.compile(r"Used ([\d.]+)([MG]) of ([\d.]+)([MG]) hbm"),
    re.compile(r"\(([\d.]+)([MG])\) exceeds available HBM \(([\d.]+)([MG])\)"),
)
UNITS = {"M": 2**-10, "G": 1}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hides the user's distribution, and flags of XLA that make libtpu abort."""
    flags = os.environ.pop("XLA_FLAGS", None)
    distribution = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(distribution)
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags


def topology_devices(topology: str) -> list:
    """The devices of a topology, which can be compiled for, and no more."""
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            "Expected libtpu, the compiler of TPUs: pip install 'keras-moe[tpu-plan]'"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # As on real chips, where both cores of a v4 are one device.
    options = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
    try:
        return list(topologies.get_topology_desc(topology, "tpu", **options).devices)
    except Exception as error:
        raise RuntimeError(
            "Expected a libtpu of JAX's version, and no other process that holds its "
            f"lock; received: jax {jax.__version__}, {' '.join(str(error).split())}"
        ) from error


class CompiledStep(NamedTuple):
    """A compiled step: its program's text, and what the compiler says of it."""

    text: str
    flops: float
    memory: dict
    optimizer: str | None
    seconds: float


def compile_step(
    model: keras.Model, distribution: Any, batch_size: int, step: str
) -> CompiledStep:
    """Compiles a step of a compiled model of `models.abstract` under a distribution."""
    lowered, state, batch = _lower(model, distribution, step, batch_size)
    start = time.perf_counter()
    compiled, text = _compile(lowered)
    return CompiledStep(
        text,
        compiled.cost_analysis()["flops"],
        _memory(compiled.memory_analysis(), state, batch),
        getattr(getattr(model, "optimizer", None), "name", None),
        time.perf_counter() - start,
    )


def _lower(model, distribution, step, batch_size):
    """The traced step, and the bytes of its state and batch on one device."""
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
            _build_optimizer(model)
    groups = {
        "weights": [model.trainable_variables, model.non_trainable_variables],
        "optimizer": [],
    }
    if trains:
        labels = model.label_spec()
        data = (inputs,) if labels is None else (inputs, of_data(labels))
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


def _build_optimizer(model):
    try:
        model.optimizer.build(model.trainable_variables)
    except ValueError as error:
        # Keras's Adafactor computes initial values.
        raise ValueError(
            "Expected an optimizer whose state begins with an initializer, such as "
            f"AdamW; received: optimizer={type(model.optimizer).__name__}"
        ) from error


def _device_bytes(specs):
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(specs)
    )


def _compile(lowered):
    """The compiled step, and its program as the compiler prints it."""
    # JAX itself cannot print all programs for v5p and v6e.
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            raise explained(error) from error
        (path,) = Path(folder).glob("*.after_codegen.txt")
        return compiled, path.read_text(encoding="utf-8")


def explained(error: Exception) -> Exception:
    """The compiler's error, or `DoesNotFit` with the GiB that it needs and has."""
    for pattern in TOO_LARGE:
        if found := pattern.search(str(error)):
            return DoesNotFit(*(float(found[i]) * UNITS[found[i + 1]] for i in (1, 3)))
    return error


def _memory(analysis, state, batch):
    """Bytes on one device, by part; weights are replaced in place."""
    new_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {
        **state,
        "batch": batch,
        "padding": analysis.argument_size_in_bytes - sum(state.values()) - batch,
        "activations and gradients": analysis.temp_size_in_bytes + new_outputs,
        "program": analysis.generated_code_size_in_bytes,
    }
