"""A run's checkpoint against plain copies of the same bytes: save and restore.

    python tools/benchmark/checkpoint.py --preset vit_b16 --folder /data/scratch

Saving is `save_checkpoint`: checksums, a check for NaN, everything on the disk before
the rename, and read again. The plain copy is `np.save` and `fsync` of each array.
Restoring is `find_checkpoint`, which verifies the checksums, and `restore_checkpoint`;
the plain one `np.load` and `assign`. What was written lately is read from memory.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse
import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
from rich.console import Console
from timing import interleaved, print_ratios

from keras_moe import models, training


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="vit_b16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; it is left clean")
    args = parser.parse_args()

    model = models.from_preset(args.preset, num_classes=1000)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        measure(model, folder, args.rounds)
    finally:
        shutil.rmtree(folder)


def measure(model: keras.Model, folder: Path, rounds: int) -> None:
    groups = {"model": model.variables}
    size = sum(np.asarray(v.value).nbytes for v in model.variables) / 1e6
    plain = folder / "plain"
    plain.mkdir()

    def save():
        training.save_checkpoint(folder / "run", 1, groups, {}, keep=1)

    def copy():
        for index, variable in enumerate(model.variables):
            with open(plain / f"{index}.npy", "wb") as file:
                np.save(file, keras.ops.convert_to_numpy(variable.value))
                file.flush()
                os.fsync(file.fileno())

    def restore():
        training.restore_checkpoint(training.find_checkpoint(folder / "run"), groups)

    def read():
        for index, variable in enumerate(model.variables):
            variable.assign(np.load(plain / f"{index}.npy", allow_pickle=False))

    console = Console()
    console.print(f"{model.name}: {size:.0f} MB in {len(model.variables)} arrays")
    for title, candidates in (
        ("save", {"np.save + fsync": copy, "save_checkpoint": save}),
        ("restore", {"np.load": read, "restore_checkpoint": restore}),
    ):
        seconds = interleaved(candidates, rounds)
        print_ratios(title, seconds, next(iter(candidates)))
        for name, value in seconds.items():
            console.print(f"{name:<20} {size / value:6.0f} MB/s", highlight=False)


if __name__ == "__main__":
    main()
