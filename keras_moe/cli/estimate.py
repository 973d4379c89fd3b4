"""Estimate the memory, traffic and time of a step on many devices.

This is arithmetic: no device is needed, and nothing is allocated. Without
--expert-parallel, all layouts that the numbers allow are compared, and the one that
splits the experts most is shown in detail.

With --compile, the devices' compiler itself says what a step needs, in a minute or
more. It needs JAX with libtpu (the extra tpu-plan) or its CUDA plugin (the extra
cuda-plan), and no device.
"""

import argparse
import contextlib
from typing import TYPE_CHECKING

import keras_moe
from keras_moe._errors import unfit
from keras_moe.cli import _arguments

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from keras_moe.distribution.costs import Costs
    from keras_moe.training import Recipe

EXAMPLES = """\
keras-moe estimate vmoe_h14 --chip tpu_v4 --devices 256 --batch-size 4096
keras-moe estimate vmoe_h14 --chip h200 --devices 8 --batch-size 512
keras-moe estimate vmoe_l16 --chip tpu_v5e --devices 64 --batch-size 4096 \
--expert-parallel 32 --set rematerialize=true
keras-moe estimate vmoe_b16 --compile v5e:4x4 --batch-size 1024
keras-moe estimate --recipe vmoe_s32_i1k --compile h200:8 --num-classes 1000"""
# Arguments of `distribution.costs` and `compiled_costs`, which options set.
OWN = (
    *("model_or_preset", "num_devices", "batch_size", "chip", "expert_parallel"),
    *("model_parallel", "optimizer", "dtype", "utilization", "text_tokens"),
    *("num_classes", "topology", "step", "fit"),
)
# Policies of models, by the dtype of their activations.
POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
# Optimizers of recipes, by their state.
STATES = {"adamw": "adam", "lamb": "adam", "vitg_adafactor": "adafactor"}
# What only arithmetic takes, with its defaults.
ARITHMETIC = {
    "chip": "tpu_v4",
    "devices": None,
    "optimizer": None,
    "utilization": 0.4,
    "text_tokens": 0,
}
# The compiler's options, with their defaults.
COMPILER = {"step": "train", "fit": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments.add_preset(parser, nargs="?")
    parser.add_argument(
        "--recipe",
        help="A recipe instead of the model: a name, or a TOML or JSON file. It sets "
        "the model, its arguments and type, the optimizer and the batch of a step.",
    )
    parser.add_argument(
        "--chip",
        default=ARITHMETIC["chip"],
        help="The kind of device: tpu_v4, tpu_v5e, tpu_v5p, tpu_v6e, tpu_7x, h100, "
        "h200 or b200.",
    )
    _arguments.add_count(parser, "--devices", "The number of devices.")
    batch = "The number of examples in a step, on all devices together."
    _arguments.add_count(parser, "--batch-size", batch)
    _arguments.add_layout(parser)
    optimizer = "The optimizer: sgd, momentum, adam (the default) or adafactor."
    parser.add_argument("--optimizer", help=optimizer)
    dtype = "The type of the activations: bfloat16 (the default), float16 or float32."
    parser.add_argument("--dtype", help=dtype)
    parser.add_argument(
        "--utilization",
        type=_arguments.positive,
        default=ARITHMETIC["utilization"],
        help="The share of the chip's peak FLOPs that the model reaches.",
    )
    _arguments.add_count(
        parser, "--text-tokens", "The text tokens with each image.", 0, 0
    )
    _arguments.add_count(
        parser, "--num-classes", "Count a head for this many classes, too."
    )
    _arguments.add_overrides(parser)
    group = parser.add_argument_group("compilation")
    group.add_argument(
        "--compile",
        metavar="TOPOLOGY",
        help="Compile for these devices instead of --chip and --devices: v5e:4x4, "
        "v5p:2x4x4, v6e:8x8, h200:8.",
    )
    step = "The step to compile: train, predict, or generate (language models)."
    group.add_argument("--step", default=COMPILER["step"], help=step)
    fit = "If the step does not fit, rematerialise, and then halve the batch."
    _arguments.add_flag(group, "--fit", fit)


def run(args: argparse.Namespace, console: "Console") -> _arguments.Result:
    compiles = args.compile is not None
    for name, default in (ARITHMETIC if compiles else COMPILER).items():
        if (value := getattr(args, name)) != default:
            with_it = "with" if compiles else "without"
            raise unfit(f"no --{name.replace('_', '-')} {with_it} --compile", value)
    if (args.preset is None) == (args.recipe is None):
        raise unfit("a model or --recipe", "neither" if args.recipe is None else "both")
    recipe = None if args.recipe is None else take_recipe(args)
    if args.batch_size is None:
        raise ValueError("Expected --batch-size with a model; received: none")
    args.dtype, args.optimizer = args.dtype or "bfloat16", args.optimizer or "adam"
    if compiles:
        return compiled(args, recipe, console)
    if args.devices is None:
        raise ValueError("Expected --devices or --compile; received: neither")
    if args.expert_parallel is not None:
        chosen = costs(args, args.expert_parallel)
        return _arguments.Result({"costs": as_json(chosen)}, (chosen.print,))
    compared = layouts(args)
    chosen = compared[max(compared)]
    values = {str(parallel): as_json(each) for parallel, each in compared.items()}
    return _arguments.Result(
        {"layouts": values, "costs": as_json(chosen)},
        (comparison(args, compared), chosen.print),
    )


def take_recipe(args: argparse.Namespace) -> "Recipe":
    """Sets the arguments that a recipe has, and returns it."""
    overrides = {
        f"model.{name}": value
        for name, value in _arguments.model_overrides(args.set, OWN).items()
    }
    if args.dtype is not None:
        overrides["model.dtype"] = POLICIES.get(args.dtype, args.dtype)
    recipe = keras_moe.training.load_recipe(args.recipe).replace(**overrides)
    model, optimizer = recipe.model, recipe.optimizer
    args.preset = model.preset
    args.set = [("load_weights", model.load_weights), *model.overrides.items()]
    args.dtype = model.dtype.removeprefix("mixed_")
    if args.optimizer is None:
        has_moment = optimizer.name == "sgd" and optimizer.options.get("momentum")
        name = "momentum" if has_moment else optimizer.name
        args.optimizer = STATES.get(name, name)
    if args.batch_size is None:
        parts = optimizer.gradient_accumulation_steps
        args.batch_size = recipe.data.batch_size // parts
    if args.num_classes is None:
        try:
            args.num_classes = recipe.objective.num_classes(recipe.data)
        except OSError as error:
            expected = "--num-classes with a recipe whose data is not here"
            raise unfit(expected, f"{recipe.data.source!r} ({error})") from error
    return recipe


def compiled(
    args: argparse.Namespace, recipe: "Recipe | None", console: "Console"
) -> _arguments.Result:
    if recipe is None:
        model, options = args.preset, _arguments.model_overrides(args.set, OWN)
        options["dtype"] = POLICIES.get(args.dtype, args.dtype)
        options["num_classes"] = args.num_classes
    else:
        model, options = recipe.abstract_model(args.num_classes), {}
    with console.status(f"compiling {args.preset} for {args.compile}"):
        found = keras_moe.distribution.compiled_costs(
            model,
            args.compile,
            args.batch_size,
            args.step,
            args.expert_parallel,
            args.model_parallel,
            fit=args.fit,
            **options,
        )
    values = {
        **found._asdict(),
        "memory_bytes": found.memory_bytes,
        "step_seconds": found.step_seconds,
    }
    return _arguments.Result(values, (found.print,))


def costs(args: argparse.Namespace, expert_parallel: int | str) -> "Costs":
    return keras_moe.distribution.costs(
        args.preset,
        args.devices,
        args.batch_size,
        args.chip,
        expert_parallel,
        args.model_parallel,
        optimizer=args.optimizer,
        dtype=args.dtype,
        utilization=args.utilization,
        text_tokens=args.text_tokens,
        num_classes=args.num_classes,
        **_arguments.model_overrides(args.set, OWN),
    )


def layouts(args: argparse.Namespace) -> "dict[int, Costs]":
    compared = {1: costs(args, 1)}
    devices = args.devices // args.model_parallel
    for ways in range(2, devices + 1):
        if devices % ways == 0:
            # A number that does not divide the experts is refused, as is any number
            # for a dense model.
            with contextlib.suppress(ValueError):
                compared[ways] = costs(args, ways)
    return compared


def comparison(args: argparse.Namespace, compared: "dict[int, Costs]") -> "Table":
    from keras_moe._tables import numbers_table

    rows = [
        (
            parallel,
            f"{each.memory_bytes / 2**30:.1f}",
            "yes" if each.fits else "no",
            f"{each.traffic['all-to-all (tokens)'] / 1e9:.3f}",
            " to ".join(f"{1e3 * seconds:,.0f}" for seconds in each.step_seconds),
        )
        for parallel, each in compared.items()
    ]
    title = f"{args.preset} on {args.devices} x {args.chip}"
    head = ("expert_parallel", "GiB per device", "fits", "all-to-all GB", "ms per step")
    return numbers_table(title, head, rows)


def as_json(each: "Costs") -> dict:
    return {
        **each._asdict(),
        "chip": each.chip._asdict(),
        "memory_bytes": each.memory_bytes,
        "fits": each.fits,
        "step_seconds": each.step_seconds,
    }
