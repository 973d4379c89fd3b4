"""XLA's flags for quick compilation; XLA ends a process over one that it lacks."""

import functools
import importlib.util
import mmap
import os
from pathlib import Path

# A small test is mostly compilation, and without optimization a quarter less. Programs
# are compiled in one piece: pieces are for several cores, and each costs something.
# Without the newest emitters, which JAX 0.12 always uses, the rest takes half the time.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": "false",
}
# The files that hold XLA. That of TensorFlow reads the flags in processes on JAX, too.
FILES = {
    "jaxlib": ("*jax_common.*", "xla_extension.*"),
    "tensorflow": ("*tensorflow_framework.*",),
}


def quick(**others: object) -> str:
    """Those of `QUICK` that the installed XLAs know, and others."""
    flags = {name: value for name, value in QUICK.items() if is_known(name)}
    return " ".join(f"--{name}={value}" for name, value in (flags | others).items())


@functools.cache
def is_known(flag: str, packages: tuple[str, ...] = tuple(FILES)) -> bool:
    """Whether the XLA of each package that is installed has a flag of this name."""
    # Of former flags the name is left in descriptions, where no zero precedes it.
    name = b"\0" + flag.encode() + b"\0"
    specs = {package: importlib.util.find_spec(package) for package in packages}
    return all(
        any(
            _contains(path, name)
            for folder in spec.submodule_search_locations
            for pattern in FILES[package]
            for path in Path(folder).glob(pattern)
        )
        for package, spec in specs.items()
        if spec is not None
    )


def _contains(path, text):
    if not os.path.getsize(path):
        return False
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return content.find(text) >= 0
