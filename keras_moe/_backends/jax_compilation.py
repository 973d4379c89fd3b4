"""Compiles a model's step for TPUs and GPUs without having one, by JAX's plugins."""

import contextlib
import functools
import importlib
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import keras
from jax.experimental import topologies

from keras_moe import _compat
from keras_moe._backends.jax import enable_cache
from keras_moe._checks import unfit
from keras_moe._errors import install

ENVIRONMENT = {
    # What libtpu asks a TPU's host for. Without a TPU it needs no lock.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # To compile takes none of CUDA's libraries.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
# Distributions of the compilers, and what installs them.
EXTRAS = {"libtpu": "tpu-plan", "jax-cuda13-plugin": "cuda-plan"}
# Autotuning needs a GPU, and what Triton does without it takes memory of its own.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# How much of a chip the compiler needs and has, in its error.
TOO_LARGE = (
    re.compile(r"Used ([\d.]+)([MG]) of ([\d.]+)([MG]) hbm"),
    re.compile(r"\(([\d.]+)([MG])\) exceeds available HBM \(([\d.]+)([MG])\)"),
)
UNITS = {"M": 2**-10, "G": 1}
_LOCK = threading.RLock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keeps the user's distribution, environment and random states as they are."""
    # JAX's own devices read the flags once, when they start.
    jax.devices()
    with _LOCK, _compat.kept_random_states():
        distribution = keras.distribution.distribution()
        config: Any = jax.config
        cached = config.jax_enable_compilation_cache
        before = {name: os.environ.get(name) for name in (*ENVIRONMENT, "XLA_FLAGS")}
        try:
            for name, value in ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            # Compilers abort over flags that they do not know.
            os.environ.pop("XLA_FLAGS", None)
            keras.distribution.set_distribution(None)
            # A program from the cache is not printed.
            enable_cache(False)
            yield
        finally:
            enable_cache(cached)
            keras.distribution.set_distribution(distribution)
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def topology_devices(topology: str) -> list:
    """The devices of a topology, which can be compiled for, and no more."""
    name, _, shape = topology.partition(":")
    description = Path(__file__).with_name(f"{name}.txtpb")
    if description.exists():
        options = {
            "topology_name": "",
            "platform": "cuda",
            # Slices, hosts of a slice and GPUs of a host.
            "topology": f"1x{shape}" if "x" in shape else f"1x1x{shape}",
            "target_config": description.read_text(encoding="utf-8"),
        }
        return _devices("jax-cuda13-plugin", options)
    options = {"topology_name": topology, "platform": "tpu"}
    if name == "v4":
        # As on real chips, where both cores are one device.
        options["chip_config_name"] = "megacore"
    return _devices("libtpu", options)


def _devices(package, options):
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise ImportError(
            f"Expected {package}, which compiles: {install(EXTRAS[package])}"
        ) from error
    try:
        try:
            found = topologies.get_topology_desc(**options)
        except NotImplementedError:
            # JAX looked for its plugins before, and left this one out for want of CUDA.
            importlib.import_module("jax_plugins.xla_cuda13").initialize()
            found = topologies.get_topology_desc(**options)
        return list(found.devices)
    except Exception as error:
        raise _no_compiler(package, " ".join(str(error).split())) from error


def _no_compiler(package, message):
    """The compiler's error in plain words: another process, or another version."""
    if "already in use" in message or "lockfile" in message:
        return OSError(
            "Expected no other process with libtpu while ALLOW_MULTIPLE_LIBTPU_LOAD="
            f"{os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD']}; received: {message}"
        )
    # Such as "libtpu==0.0.42.*; extra == 'tpu'".
    wanted = [x.partition(";")[0] for x in metadata.requires("jax") or ()]
    wanted = min((x for x in wanted if x.startswith(package)), key=len, default=package)
    versions = [f"{x} {metadata.version(x)}" for x in ("jax", "jaxlib", package)]
    return ImportError(
        f"Expected a {package} of JAX's version: pip install '{wanted}'; received: "
        f"{', '.join(versions)}: {message}"
    )


class CompiledStep(NamedTuple):
    """A compiled step: its program's text, and what the compiler says of it."""

    text: str
    flops: float | None
    memory: dict
    optimizer: str | None
    seconds: float


def compile_step(
    model: keras.Model, distribution: Any, batch_size: int, step: str
) -> CompiledStep:
    """Compiles a step of a compiled model of `models.abstract` under a distribution."""
    lowered, state, batch = lower_step(model, distribution, step, batch_size)
    optimizer = getattr(model, "optimizer", None)
    # Within a loss scale.
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    start = time.perf_counter()
    platform = distribution.device_mesh.backend_mesh.devices.flat[0].platform
    compiled, text = compile_lowered(lowered, platform)
    return CompiledStep(
        text,
        (compiled.cost_analysis() or {}).get("flops"),
        _memory(compiled.memory_analysis(), state, batch),
        getattr(optimizer, "name", None),
        time.perf_counter() - start,
    )


def lower_step(model, distribution, step, batch_size):
    """The traced step, and the bytes of its state and batch on one device."""
    backbone = getattr(model, "backbone", model)
    if step == "generate" and not hasattr(model, "generate_step"):
        raise unfit("a CausalLM for step='generate'", model=type(model).__name__)

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
    with distribution.scope(), _compat.variables_without_values():
        for variable in model.variables:
            _compat.take_layout(variable)
        if trains:
            try:
                model.optimizer.build(model.trainable_variables)
            except ValueError as error:
                # Keras's Adafactor computes initial values.
                expected = "an optimizer whose state begins with an initializer"
                name = type(model.optimizer).__name__
                raise unfit(f"{expected}, such as AdamW", optimizer=name) from error
    groups = {
        "weights": [model.trainable_variables, model.non_trainable_variables],
        "optimizer": [],
    }
    if trains:
        labels = model.label_spec()
        data = (inputs,) if labels is None else (inputs, of_data(labels))
        _compat.build_metrics(model, data)
        groups["optimizer"] = [model.optimizer.variables, model.metrics_variables]
    elif step == "generate":
        data = inputs
        groups["weights"].append(model.sampler.variables)
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
            generates = functools.partial(_generate, model)
            function = generates if step == "generate" else model.predict_step
            function = jax.jit(function)
        lowered = function.lower(state, data)
    sizes = {name: _device_bytes(group) for name, group in specs.items()}
    return lowered, sizes, _device_bytes(data)


def _generate(model, state, inputs):
    """KerasHub's generation with all state as an argument."""
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.sampler.variables,
    )
    pairs = [
        pair for group, values in zip(groups, state) for pair in zip(group, values)
    ]
    with keras.StatelessScope(pairs) as scope:
        outputs = model.generate_step(inputs)
    return outputs, [scope.get_current_value(x) for x in model.sampler.variables]


def _device_bytes(specs):
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(specs)
    )


def compile_lowered(lowered, platform):
    """The compiled step, and its program as the compiler prints it."""
    try:
        if platform != "tpu":
            compiled = lowered.compile(compiler_options=UNTUNED)
            return compiled, compiled.as_text()
        # JAX itself cannot print all programs for v5p and v6e.
        with tempfile.TemporaryDirectory() as folder:
            options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            compiled = lowered.compile(compiler_options=options)
            (path,) = Path(folder).glob("*.after_codegen.txt")
            return compiled, path.read_text(encoding="utf-8")
    except jax.errors.JaxRuntimeError as error:
        package = "libtpu" if platform == "tpu" else "jax-cuda13-plugin"
        raise explained(error, package) from error


def explained(error: Exception, package: str) -> Exception:
    """The compiler's error, or a MemoryError with the GiB that it needs and has."""
    if "StableHLO" in str(error):
        # An older compiler does not read JAX's programs.
        return _no_compiler(package, " ".join(str(error).split()))
    for pattern in TOO_LARGE:
        if found := pattern.search(str(error)):
            return MemoryError(*(float(found[i]) * UNITS[found[i + 1]] for i in (1, 3)))
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
