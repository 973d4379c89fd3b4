"""Distributions of programs that train or evaluate on many devices."""

import argparse
from typing import Any

import keras

from keras_moe import distribution
from keras_moe.cli.overrides import FIRST, model_overrides

# Arguments of `distribution.auto`.
OWN = {
    "model_or_preset": FIRST,
    "devices": "--devices",
    "expert_parallel": "--expert-parallel",
    "model_parallel": "--model-parallel",
    "batch_size": "the size of a batch",
    "auto_shard_dataset": "this program",
}


def start_processes(args: argparse.Namespace) -> None:
    """Joins the other processes, if there are any: before all else."""
    processes = (args.coordinator, args.num_processes, args.process_id)
    if all(value is None for value in processes):
        return
    if any(value is None for value in processes):
        raise ValueError(
            "Expected --coordinator, --num-processes and --process-id together; "
            f"received: {processes}"
        )
    keras.distribution.initialize(*processes)


def set_devices(
    args: argparse.Namespace, preset: str, batch_size: int, overrides: dict[str, Any]
) -> keras.distribution.ModelParallel | None:
    """Sets the distribution for a model to be made, if --devices asks for one."""
    if args.devices is None:
        if args.num_processes is not None:
            raise ValueError(
                "Expected --devices with several processes, each of which would train "
                "a model of its own"
            )
        if args.expert_parallel is not None or args.model_parallel != 1:
            raise ValueError(
                "Expected --devices with --expert-parallel and --model-parallel"
            )
        return None
    if args.num_processes is not None:
        # Each process reads images of its own: all its devices, and no model of which
        # another has a part.
        count = len(keras.distribution.list_devices())
        own = count // args.num_processes
        if args.devices not in ("all", count) or own % args.model_parallel:
            raise ValueError(
                f"Expected all {count} devices of the processes, and "
                f"--model-parallel to divide the {own} of each; received: "
                f"--devices {args.devices}, --model-parallel {args.model_parallel}"
            )
    overrides = model_overrides(overrides.items(), OWN)
    # Other backends than JAX have none to list; `auto` says what works there.
    devices = None
    if keras.backend.backend() == "jax" and args.devices != "all":
        devices = keras.distribution.list_devices()
        if args.devices > len(devices):
            raise ValueError(
                f"Expected at most {len(devices)} devices; "
                f"received: --devices {args.devices}"
            )
        devices = devices[: args.devices]
    chosen = distribution.auto(
        preset,
        devices,
        args.expert_parallel,
        args.model_parallel,
        batch_size,
        # A recipe gives each process its own part of a batch.
        auto_shard_dataset=False,
        **overrides,
    )
    keras.distribution.set_distribution(chosen)
    return chosen
