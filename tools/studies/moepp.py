"""`python -m tools.studies moepp`: *MoE++* beside a vanilla mixture of as many experts.

`costs` counts the numbers of its Tables 1, A and B; `speed` measures expert forward
times by tau, as Table 3; `training` trains on the bundled digits: the vanilla twin,
MoE++ by tau, without each kind of expert (Table 5) and without gating residuals
(Table 6). `removal` removes kinds of experts after training (Table C), `tokens` counts
the zero-computation experts that patches meet (Figure A), and `constants` trains with
several numbers of constant experts (Figure 3).
"""

import argparse

from rich.console import Console

from keras_moe.cli.result import Result
from keras_moe.cli.versions import backend_and_versions
from keras_moe.ops import ExpertTypes
from tools.studies.arguments import CONSTANTS
from tools.studies.moepp_costs import Costs, Speed
from tools.studies.moepp_kinds import Constants, Removal, Tokens
from tools.studies.moepp_layers import Sizes
from tools.studies.moepp_training import Digits, Training
from tools.studies.study import Study, run_parts, run_settings


def run(args: argparse.Namespace, console: Console) -> Result:
    """Does the parts that are asked for."""
    kinds = ExpertTypes(*args.kinds)
    if not kinds.zero_computation:
        raise ValueError(
            f"Expected zero-computation experts; received: --kinds {args.kinds}"
        )
    for option, value, part in (
        ("--only", args.only, "training"),
        ("--constants", args.constants, "constants"),
    ):
        if value is not None and part not in args.parts:
            raise ValueError(
                f"Expected the part {part} with {option}; received: --parts "
                f"{' '.join(args.parts)}"
            )
    sizes = Sizes(
        kinds,
        args.tokens,
        args.dim,
        args.mlp_dim,
        args.selected,
        args.gamma,
        args.gated,
    )
    settings = run_settings(args)
    study = Study(
        args.output, {**settings, **backend_and_versions()}, console, args.restart
    )
    digits = Digits(**settings)
    make = {
        "costs": lambda: Costs(study, sizes, args.taus, args.rounds),
        "speed": lambda: Speed(study, sizes, args.taus, args.rounds),
        "training": lambda: Training(study, digits, args.seeds, args.taus, args.only),
        "removal": lambda: Removal(study, digits, args.seeds),
        "tokens": lambda: Tokens(study, digits, args.seeds),
        "constants": lambda: Constants(
            study, digits, args.seeds, args.constants or CONSTANTS
        ),
    }
    parts = {name: make[name]() for name in make if name in args.parts}
    return run_parts(study, parts)
