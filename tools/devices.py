"""Arguments by which programs train on many devices, and what they do."""

import argparse

import keras

from keras_moe import distribution


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --devices and what goes with it."""
    group = parser.add_argument_group("many devices, on JAX")
    group.add_argument("--devices", type=_count, help="how many, or 'all'")
    group.add_argument(
        "--expert-parallel", type=_parallel, help="'batch', or over how many devices"
    )
    group.add_argument("--model-parallel", type=int, default=1)
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="of several processes; there is no look at routers and no few-shot then",
    )
    group.add_argument("--num-processes", type=int)
    group.add_argument("--process-id", type=int)


def start_processes(args: argparse.Namespace) -> None:
    """Joins the other processes, if there are any: before all else.

    Raises:
        ValueError: if only some of the three arguments are given.
    """
    given = (args.coordinator, args.num_processes, args.process_id)
    if all(value is None for value in given):
        return
    if any(value is None for value in given):
        raise ValueError(
            "Expected --coordinator, --num-processes and --process-id together; "
            f"received: {given}"
        )
    keras.distribution.initialize(*given)


def set_devices(args: argparse.Namespace, preset: str, batch_size: int, **overrides):
    """Sets the distribution for a model to be made, if --devices asks for one.

    Returns:
        The distribution, or None.

    Raises:
        ValueError: as `keras_moe.distribution.auto`, if there are fewer devices, or if
            a layout is asked for without --devices.
    """
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
    found = distribution.auto(
        preset,
        devices,
        args.expert_parallel,
        args.model_parallel,
        batch_size,
        # A recipe gives each process its own part of a batch.
        auto_shard_dataset=False,
        **overrides,
    )
    keras.distribution.set_distribution(found)
    return found


def _count(text: str) -> int | str:
    if text == "all":
        return text
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError("expected at least 1")
    return count


def _parallel(text: str) -> int | str:
    return text if text == "batch" else int(text)
