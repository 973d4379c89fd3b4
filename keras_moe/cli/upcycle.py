"""`keras-moe upcycle`: a dense preset becomes its mixture of experts."""

import argparse
from pathlib import Path

from rich.console import Console

from keras_moe import models, training
from keras_moe.checks import check_argument_names
from keras_moe.cli.result import Result
from keras_moe.cli.targets import check_target
from keras_moe.files import write_json
from keras_moe.models.preset_folder import staged
from keras_moe.training.upcycling import free_arguments


def run(args: argparse.Namespace, console: Console) -> Result:
    """Upcycles, and saves the model with its report."""
    check_target(args.source, args.output)
    overrides = dict(args.set)
    check_argument_names(overrides, free_arguments(), "MoE layers")
    towers = [args.towers] if isinstance(args.towers, str) else args.towers
    model, report = training.upcycle(
        models.from_preset(args.source),
        num_experts=args.num_experts,
        moe_layers=args.moe_layers,
        router=args.router,
        noise=args.noise,
        preset=args.settings,
        towers=towers,
        **overrides,
    )
    with staged(args.output) as folder:
        model.save_to_preset(folder)
        write_json(Path(folder) / "upcycling.json", report.to_dict())
    return Result(report.to_dict(), report.print)
