"""Start-up: the import of the models, and the peak memory of making one.

    KERAS_BACKEND=jax python tools/benchmark/start_up.py

Each import and each model has a process of its own. The limit of the import is that of
KerasHub, on which the models stand, and Keras; that of the peak is the weights.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner import Report, run

MIB = 2**20
IMPORTS = {
    "keras_moe.models": "import keras_moe.models",
    "keras_moe.layers": "import keras_moe.layers",
    "keras_hub": "import keras_hub",
    "keras": "import keras",
}
SAVE = """
import sys
from keras_moe import models
sizes = {"num_layers": 4, "num_experts": 16, "moe_layers": "every_2"}
models.from_preset(sys.argv[1], **sizes).save_to_preset(sys.argv[2])
"""
# VmHWM begins anew in each program, where `ru_maxrss` begins with its parent's.
LOAD = """
import gc, re, sys
from pathlib import Path
from keras_moe import models

def status(name):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", text)[1])

# The code and the buffers of the libraries are no model's.
models.from_preset("vmoe_digits", num_classes=10, load_weights=False)
gc.collect()
before = status("VmRSS")
models.from_preset(sys.argv[1])
print(status("VmHWM") - before)
"""


def imports(names: list[str]) -> dict[str, Callable[[], Any]]:
    """Programs that import a module and end.

    Args:
        names: names among `IMPORTS`.
    """
    return {name: lambda code=IMPORTS[name]: program(code) for name in names}


def peak(preset: str = "vmoe_b32") -> dict[str, float]:
    """MiB that loading a model adds to the peak of its process, and of its weights.

    Args:
        preset: name of the preset, which is cut to 4 blocks and 16 experts.
    """
    with tempfile.TemporaryDirectory() as folder:
        program(SAVE, preset, folder)
        peak = int(program(LOAD, folder).split()[-1])
        weights = sum(path.stat().st_size for path in Path(folder).glob("*.h5"))
    return {"from_preset": peak / MIB, "weights": weights / MIB}


def program(code: str, *arguments: str) -> str:
    """The output of a program in a process of its own, on this one's backend."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    return done.stdout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="vmoe_b32")


def measure(args: argparse.Namespace, report: Report) -> None:
    report.compare("imports", imports(list(IMPORTS)), "keras")
    row = peak(args.preset)
    row["ratio"] = row["from_preset"] / row["weights"]
    report.table(f"MiB of {args.preset}", [row], dict.fromkeys(row, ".2f"))


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=3)
