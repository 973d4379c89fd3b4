"""The devices and processes on which a command trains or evaluates."""

import argparse
from typing import TYPE_CHECKING, Any

import keras_moe
from keras_moe._errors import unfit
from keras_moe.cli._arguments import (
    add_count,
    add_layout,
    integer_or,
    model_overrides,
)

if TYPE_CHECKING:
    import keras

# Arguments of `distribution.auto`, which options set.
OWN = ("model_or_preset", "devices", "expert_parallel", "model_parallel")
OWN += ("batch_size", "auto_shard_dataset")


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Adds `--devices` and the arguments that split a model over them."""
    parser.set_defaults(coordinator=None, num_processes=None, process_id=None)
    group = parser.add_argument_group("several devices, on JAX")
    group.add_argument(
        "--devices", type=integer_or("all"), help="The number of devices, or 'all'."
    )
    add_layout(group)


def add_processes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes, with --devices")
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="The address of the first process."
    )
    add_count(group, "--num-processes", "The number of processes.")
    add_count(group, "--process-id", "The index of this process, from 0.", minimum=0)


def start_processes(args: argparse.Namespace) -> None:
    """Joins the other processes, if there are any, before anything else."""
    import keras

    processes = (args.coordinator, args.num_processes, args.process_id)
    if processes.count(None) in (1, 2):
        expected = "--coordinator, --num-processes and --process-id together"
        raise unfit(expected, processes)
    if None not in processes:
        keras.distribution.initialize(*processes)


def set_devices(
    args: argparse.Namespace, preset: str, batch_size: int, overrides: dict[str, Any]
) -> "keras.distribution.DataParallel | keras.distribution.ModelParallel | None":
    """Sets the distribution of a model to be made, if --devices asks for one."""
    import keras

    from keras_moe._checks import check_integer
    from keras_moe._processes import splitting_backend

    if args.devices is None:
        split = (args.num_processes, args.expert_parallel, args.model_parallel)
        if split != (None, None, 1):
            options = "--num-processes, --expert-parallel and --model-parallel"
            raise unfit(f"--devices with {options}", "none")
        return None
    if args.num_processes is not None:
        # Each process reads its own images, so all its devices take part, and no
        # model is split between processes.
        count = len(keras.distribution.list_devices())
        own = count // args.num_processes
        if args.devices not in ("all", count) or own % args.model_parallel:
            expected = f"all {count} devices, and --model-parallel to divide {own}"
            parallel = f"--model-parallel {args.model_parallel}"
            raise unfit(expected, f"--devices {args.devices}", parallel)
    overrides = model_overrides(overrides.items(), OWN)
    # `auto` says what works on backends that split no models.
    devices = None
    if splitting_backend() is not None and args.devices != "all":
        devices = keras.distribution.list_devices()
        check_integer("--devices", args.devices, 1, len(devices))
        devices = devices[: args.devices]
    chosen = keras_moe.distribution.auto(
        preset,
        devices,
        args.expert_parallel,
        args.model_parallel,
        batch_size=batch_size,
        # A recipe gives each process its own part of a batch.
        auto_shard_dataset=False,
        **overrides,
    )
    keras.distribution.set_distribution(chosen)
    return chosen
