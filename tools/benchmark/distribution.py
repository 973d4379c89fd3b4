"""`fit` under a distribution: over `fit` without one, and on 1, 2, 4 and 8 devices.

    python tools/benchmark/distribution.py
    python tools/benchmark/distribution.py --parts overhead --rounds 15

On JAX, on CPU. The devices are virtual, and share the machine's cores: a step's time on
several of them shows what splitting costs, never what it gains. Each count of devices
runs in processes of its own, in a shuffled order.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import random
import statistics
import time
from pathlib import Path

import keras
import numpy as np
from runner import Report, rows_of_process, run

from keras_moe import distribution, models

PARTS = ("overhead", "devices")
# On several devices: whole groups on each of 8.
SPLIT = {
    "image_shape": (64, 64, 3),
    "patch_size": 8,
    "hidden_dim": 128,
    "num_layers": 4,
    "num_heads": 4,
    "mlp_dim": 512,
    "moe_layers": "every_2",
    "num_experts": 8,
    "examples_per_group": 2,
}
BATCH_SIZE, STEPS = 32, 8
# Name to preset, overrides, batch size and steps: many of the small ones, so that the
# work of a call of `fit` is spread as it is in a real epoch.
CASES = {
    "vmoe_digits": ("vmoe_digits", {}, 16, 64),
    "4 blocks, D=128": ("vit_s16", SPLIT, BATCH_SIZE, STEPS),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--devices", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N"
    )
    parser.add_argument(
        "--processes", type=int, default=3, help="for each count of devices"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="on several devices")
    parser.add_argument(
        "--blocks", type=int, default=SPLIT["num_layers"], help="on several devices"
    )
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)


def measure(args: argparse.Namespace, report: Report) -> None:
    if args.child:
        row = measured(args.child, args.steps, args.blocks)
        report.table(f"{args.child} devices", [row], {})
        return
    if "overhead" in args.parts:
        for case in CASES:
            overhead(case, report)
    if "devices" in args.parts:
        on_devices(args.devices, args.processes, args.steps, args.blocks, report)


def compiled(preset: str, **overrides) -> keras.Model:
    model = models.from_preset(preset, num_classes=10, load_weights=False, **overrides)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[],
    )
    return model


def examples(model: keras.Model, count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    images = generator.normal(size=(count, *model.backbone.image_shape))
    return images.astype("float32"), generator.integers(10, size=count)


def overhead(case: str, report: Report) -> None:
    """Compares `fit` under a distribution over one device with `fit` without."""
    preset, overrides, batch_size, steps = CASES[case]
    devices = keras.distribution.list_devices()[:1]
    chosen = distribution.auto(preset, devices, batch_size=batch_size, **overrides)
    plain = compiled(preset, **overrides)
    with chosen.scope():
        distributed = compiled(preset, **overrides)
    images, labels = examples(plain, batch_size * steps)

    def fit(model):
        model.fit(images, labels, batch_size=batch_size, shuffle=False, verbose=0)

    def fit_distributed():
        with chosen.scope():
            fit(distributed)

    report.compare(
        f"{case}, batch {batch_size}, {steps} steps",
        {
            "fit": lambda: fit(plain),
            "fit, one device's distribution": fit_distributed,
        },
        "fit",
    )


def on_devices(
    counts: list[int], processes: int, steps: int, blocks: int, report: Report
) -> None:
    """Adds a step's time and memory by the number of virtual devices."""
    order = [count for count in counts for _ in range(processes)]
    random.Random(0).shuffle(order)
    by_count = {count: [] for count in counts}
    for count in order:
        by_count[count] += rows_of_process(
            f"--child={count}",
            f"--steps={steps}",
            f"--blocks={blocks}",
            XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} "
            f"--xla_force_host_platform_device_count={count}",
        )
    medians = {
        count: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for count, runs in by_count.items()
    }
    rows = [
        {
            "devices": count,
            "ms per step": 1e3 * median["seconds"],
            f"over {counts[0]}": median["seconds"] / medians[counts[0]]["seconds"],
            "MiB per device": median["device_bytes"] / 2**20,
            "on paper": median["paper_bytes"] / 2**20,
            "process GiB": median["process_bytes"] / 2**30,
        }
        for count, median in medians.items()
    ]
    formats = {"ms per step": ".0f", f"over {counts[0]}": ".2f"}
    formats |= {"MiB per device": ".1f", "on paper": ".1f", "process GiB": ".2f"}
    report.table(
        f"batch {BATCH_SIZE} on virtual CPU devices, experts on the batch's devices, "
        f"{os.cpu_count()} cores for all",
        rows,
        formats,
    )


def measured(count: int, steps: int, blocks: int) -> dict:
    """A step's time, and the bytes of a device and of this process."""
    import jax

    devices = keras.distribution.list_devices()
    if len(devices) != count:
        raise ValueError(f"Expected {count} devices; received: {devices}")
    sizes = {**SPLIT, "num_layers": blocks}
    chosen = distribution.auto("vit_s16", devices, batch_size=BATCH_SIZE, **sizes)
    with chosen.scope():
        model = compiled("vit_s16", **sizes)
        images, labels = examples(model, BATCH_SIZE * steps)

        def fit():
            begin = time.perf_counter()
            model.fit(images, labels, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
            return (time.perf_counter() - begin) / steps

        fit()  # compiles
        seconds = [fit() for _ in range(3)]
    held = dict.fromkeys(jax.devices(), 0)
    for variable in (*model.variables, *model.optimizer.variables):
        for shard in variable.value.addressable_shards:
            held[shard.device] += shard.data.nbytes
    costs = distribution.costs(
        "vit_s16", count, BATCH_SIZE, dtype="float32", num_classes=10, **sizes
    )
    return {
        "seconds": statistics.median(seconds),
        "device_bytes": max(held.values()),
        "paper_bytes": costs.memory["weights"] + costs.memory["optimizer (adam)"],
        "process_bytes": peak_memory(),
    }


def peak_memory() -> int:
    """The peak memory of this process, without its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise ValueError("Expected VmHWM in /proc/self/status")


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
