"""`python -m tools.studies mumoe`: *Multilinear Mixture of Experts* on digits.

`specialisation`: a ViT learns to read numbers from 00 to 99, two scanned digits each.
With a CP muMoE head of more and more experts, each expert's ablation costs fewer
classes their accuracy: polysemanticity falls (Figures 2, 3, 18, 19 and 22). The dense
ViT's MLPs are cut to their largest singular values, too (Figure 7).

`editing`: digits of five attributes, where those from 5 on are hardly ever inverted in
the training data, so that inverted ones are mistaken. One edit of the head corrects it
without training (Table 2, Figure 25), beside oversampling, adversarial debiasing and
the blind threshold.

`patches`: a muMoE Mixer, and the patches that use an expert most (Figure 4).

`costs` counts multiply-adds with and without the whole weight tensor (Table 8). Heads
on the features of the dense ViT compare entmax with softmax (`activation`, Figure 20),
batch normalisation of the coefficients with none (`normalization`, Figure 21),
factorised heads with a linear one of as many parameters (`matched`, Figure 23), and
with dense and sparse mixtures of linear heads (`capacity`, Figure 24).
"""

import argparse

from rich.console import Console

from keras_moe.cli.result import Result
from keras_moe.cli.versions import backend_and_versions
from tools.studies.mumoe_costs import Costs
from tools.studies.mumoe_digits import SIZES, Fit
from tools.studies.mumoe_editing import Editing
from tools.studies.mumoe_heads import (
    Activation,
    Capacity,
    Heads,
    Matched,
    Normalization,
)
from tools.studies.mumoe_patches import Patches
from tools.studies.mumoe_specialisation import DenseModels, Specialisation
from tools.studies.study import Study, run_parts, run_settings


def run(args: argparse.Namespace, console: Console) -> Result:
    """Does the parts that are asked for."""
    settings = run_settings(args)
    study = Study(
        args.output,
        {**settings, "sizes": SIZES, **backend_and_versions()},
        console,
        args.restart,
    )
    fit, experts, rank = Fit(**settings), args.experts, args.rank
    dense = DenseModels(study, fit, args.seeds)
    # One object, which keeps the features.
    heads = Heads(study, dense, fit)
    make = {
        "costs": lambda: Costs(study),
        "specialisation": lambda: Specialisation(
            study, dense, experts, rank, args.positions
        ),
        "editing": lambda: Editing(study, fit, args.seeds, args.edited_experts, rank),
        "patches": lambda: Patches(study, fit),
        "activation": lambda: Activation(study, heads, experts, rank),
        "normalization": lambda: Normalization(study, heads, experts, rank),
        "matched": lambda: Matched(study, heads, experts),
        "capacity": lambda: Capacity(study, heads),
    }
    parts = {name: make[name]() for name in make if name in args.parts}
    return run_parts(study, parts)
