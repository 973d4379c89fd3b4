"""Turn a dense model into a mixture of experts.

The report has the parameters before and after, and how far the outputs are apart; it is
also written to upcycling.json in the new preset.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import keras_moe
from keras_moe.cli import _arguments

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """\
keras-moe upcycle runs/dense runs/sparse --num-experts 8
keras-moe upcycle runs/dense runs/sparse --set num_selected_experts=1
keras-moe upcycle runs/dense runs/sparse --settings clip_up
keras-moe upcycle runs/clip runs/sparse --settings clip_up --towers image"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = "The dense model: a folder, an hf:// handle or published weights."
    _arguments.add_preset(parser, "source", metavar="SOURCE", help=source)
    _arguments.add_target(parser)
    parser.add_argument(
        "--num-experts",
        type=_arguments.json_or_string,
        default=8,
        help="The number of experts, or for mumoe a JSON list with one for each level.",
    )
    parser.add_argument(
        "--moe-layers",
        type=_arguments.json_or_string,
        default="every_2",
        metavar="LAYERS",
        help="The blocks that get experts: every_2, last_2, ... or a JSON list.",
    )
    router = "The name of the router, or mumoe."
    parser.add_argument("--router", default="softmax_token_choice", help=router)
    noise = "The noise on the copies of the MLP, relative to its weights."
    parser.add_argument("--noise", type=float, default=0.0, help=noise)
    reinitialize = "The share of each expert's hidden units that is drawn again."
    parser.add_argument("--reinitialize", type=float, default=0.0, help=reinitialize)
    parser.add_argument(
        "--settings",
        metavar="NAME",
        help="Published settings, clip_up or moepp; by default those that keep the "
        "model's function.",
    )
    towers = (
        "The towers of an image-text model that get experts: image or text, or a "
        "JSON dict with settings for each; by default both."
    )
    parser.add_argument(
        "--towers", type=_arguments.json_or_string, metavar="TOWER", help=towers
    )
    _arguments.add_overrides(parser, what="arguments of the MoE layers")


def run(args: argparse.Namespace, console: "Console") -> _arguments.Result:
    from keras_moe._checks import check_argument_names
    from keras_moe._files import write_json
    from keras_moe.models.saving._preset_folder import staged
    from keras_moe.training.upcycling import free_arguments

    _arguments.check_target(args.source, args.output)
    overrides = dict(args.set)
    check_argument_names(overrides, free_arguments(), "MoE layers")
    towers = [args.towers] if isinstance(args.towers, str) else args.towers
    model, report = keras_moe.training.upcycle(
        keras_moe.models.from_preset(args.source),
        num_experts=args.num_experts,
        moe_layers=args.moe_layers,
        router=args.router,
        noise=args.noise,
        reinitialize=args.reinitialize,
        preset=args.settings,
        towers=towers,
        **overrides,
    )
    with staged(args.output) as folder:
        model.save_to_preset(folder)
        write_json(Path(folder) / "upcycling.json", report.to_dict())
    return _arguments.Result(report.to_dict(), (report.print,))
