"""Turns a dense preset into its mixture of experts, and saves that as a preset.

    python tools/upcycle.py runs/dense runs/sparse --num-experts 8
    python tools/upcycle.py runs/dense runs/sparse --set num_selected_experts=1
    python tools/upcycle.py runs/dense runs/sparse --preset clip_up

Prints the parameters before and after, and how far the outputs are apart; writes the
same beside the preset, in `upcycling.json`.
"""

import argparse
import json
import sys
from pathlib import Path

from overrides import parse_override

from keras_moe import models, training
from keras_moe.checks import check_argument_names
from keras_moe.files import write_json
from keras_moe.layers.mumoe_config import MUMOE
from keras_moe.models.preset_folder import staged
from keras_moe.routers import ROUTERS
from keras_moe.training.upcycling import MOE_ARGUMENTS
from keras_moe.training.upcycling_presets import UPCYCLING_PRESETS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="a folder, handle or published checkpoint")
    parser.add_argument("output", type=Path, help="the folder of the new preset")
    parser.add_argument(
        "--num-experts",
        type=json.loads,
        default=8,
        metavar="E",
        help="an integer, or for mumoe a JSON list of one for each level",
    )
    parser.add_argument("--moe-layers", default="every_2", help="name or JSON list")
    parser.add_argument(
        "--router", choices=[*sorted(ROUTERS), MUMOE], default="softmax_token_choice"
    )
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument(
        "--preset",
        choices=sorted(UPCYCLING_PRESETS),
        help="published settings in the place of those that keep the function",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="further arguments of the MoE layers; values are JSON, or else strings",
    )
    args = parser.parse_args(argv)
    try:
        check_target(args.source, args.output)
        further = dict(parse_override(text) for text in args.set)
        check_argument_names(further, MOE_ARGUMENTS, "MoE layers")
        _, moe_layers = parse_override(f"moe_layers={args.moe_layers}")
        model, report = training.upcycle(
            models.from_preset(args.source),
            num_experts=args.num_experts,
            moe_layers=moe_layers,
            router=args.router,
            noise=args.noise,
            preset=args.preset,
            **further,
        )
        with staged(args.output) as folder:
            model.save_to_preset(folder)
            write_json(Path(folder) / "upcycling.json", report.to_dict())
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report.print()
    return 0


def check_target(source: str, output: Path) -> None:
    """Refuses the source, by whatever path, as the folder of the new preset."""
    target, origin = output.expanduser().resolve(), Path(source).expanduser().resolve()
    same = target.exists() and origin.exists() and target.samefile(origin)
    if same or target == origin:
        raise ValueError(
            "Expected another folder than the source, which saving would replace; "
            f"received: output={str(output)!r}, source={source!r}"
        )


if __name__ == "__main__":
    sys.exit(main())
