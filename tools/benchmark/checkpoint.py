"""A run's checkpoint against plain copies of the same bytes: save and restore.

    python tools/benchmark/checkpoint.py --preset vit_b16 --folder /data/scratch

Saving is `save_checkpoint`: checksums, a check for NaN, and everything on the disk
before the rename. The plain copy is `np.save` and `fsync` of each array. Restoring is
`find_checkpoint`, which verifies the checksums, and `Checkpoint.restore`; the plain one
`np.load` and `assign`. A file that was written lately is read from memory.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse
import tempfile
from pathlib import Path

import keras
import numpy as np
from runner import Report, run

from keras_moe import models, training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="vit_b16")
    parser.add_argument("--folder", type=Path, help="where to write; it is left clean")


def measure(args: argparse.Namespace, report: Report) -> None:
    model = models.from_preset(args.preset, num_classes=1000)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        compare(model, Path(folder), report)


def compare(model: keras.Model, folder: Path, report: Report) -> None:
    groups = {"model": model.variables}
    size = sum(keras.ops.convert_to_numpy(v).nbytes for v in model.variables) / 1e6
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
        training.find_checkpoint(folder / "run").restore(groups)

    def read():
        for index, variable in enumerate(model.variables):
            variable.assign(np.load(plain / f"{index}.npy", allow_pickle=False))

    title = f"{model.name}, {size:.0f} MB in {len(model.variables)} arrays"
    for action, candidates in (
        ("save", {"np.save + fsync": copy, "save_checkpoint": save}),
        ("restore", {"np.load": read, "Checkpoint.restore": restore}),
    ):
        report.compare(
            f"{title}: {action}", candidates, next(iter(candidates)), MB=size
        )


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=7)
