"""The arguments of `python -m tools.studies`.

Only the standard library is imported: help is printed before Keras is there.
"""

from typing import Any

from keras_moe.cli.parser import (
    RESUMES,
    Parser,
    add_command,
    add_data,
    add_overrides,
    add_preset,
    add_run,
    at_least,
    positive,
)

# In the order of the paper's tables.
ROUTERS = (
    "softmax_token_choice",
    "sinkhorn_token_choice",
    "softmax_expert_choice",
    "sinkhorn_expert_choice",
    "sparsity_constrained_expert_choice",
    "soft",
)
COMBINES = ("softmax", "affinity")
SELECTED = (1, 2)
# Numbers of constant experts, of MoE++'s Figure 3.
CONSTANTS = (0, 1, 2, 4, 6)
MOEPP_PARTS = ("costs", "speed", "training", "removal", "tokens", "constants")
MUMOE_PARTS = (
    "costs",
    "specialisation",
    "editing",
    "patches",
    "activation",
    "normalization",
    "matched",
    "capacity",
)
LIMOE_PARTS = (
    "losses",
    "selected",
    "thresholds",
    "orders",
    "routers",
    "experts",
    "lengths",
    "groups",
    "pruning",
)
CLIP_UP_PARTS = ("upcycling", "backbones", "modalities", "capacity", "gates")


def make_parser() -> Parser:
    """The parser of `python -m tools.studies`."""
    parser = Parser(
        prog="python -m tools.studies",
        description="Repeat a paper's experiments on small data.\n\nEvery finished run "
        "is a file in the output folder: the same command again resumes an interrupted "
        "study, and other settings make other files. Results are tables, pictures and "
        "results.json.",
        examples="python -m tools.studies routers\n"
        "python -m tools.studies moepp --parts costs speed\n"
        "python -m tools.studies mumoe --help",
    )
    studies = parser.add_subparsers(metavar="STUDY", required=True)
    for add in (routers, moepp, mumoe, limoe, clip_up):
        add(studies)
    return parser


def routers(studies: Any) -> None:
    parser = add_command(
        studies,
        "routers",
        "compare the routers of Routers in Vision Mixture of Experts on a small ViT",
        "python -m tools.studies routers\n"
        "python -m tools.studies routers --routers soft --seeds 5\n"
        "python -m tools.studies routers --data tfds:cifar10 "
        "--set image_shape=[32,32,3]",
        "The 12 configurations of the paper's Table 1, six routers with k or c of 1 "
        "and 2, train for equally many steps on the same images, each from several "
        "seeds; and those with a transport plan once more with the plan as combine "
        "weights, as in section 3.4.",
        RESUMES,
        "tools.studies.routers",
    )
    add_preset(parser, "--preset", default="vmoe_digits")
    add_data(parser, default="digits")
    parser.add_argument("--train-split", default="train")
    parser.add_argument("--test-split", default="test")
    add_overrides(parser)
    parser.add_argument(
        "--routers", nargs="+", choices=ROUTERS, default=ROUTERS, metavar="ROUTER"
    )
    parser.add_argument(
        "--selected",
        nargs="+",
        type=int,
        choices=SELECTED,
        default=SELECTED,
        help="k of token choice, c of the others",
    )
    parser.add_argument(
        "--combine",
        nargs="+",
        choices=COMBINES,
        default=COMBINES,
        help="combine weights: the softmax or, for transport routers, the plan, too",
    )
    add_training(parser, "routers", epochs=20, batch_size=32, learning_rate=2e-3)


def moepp(studies: Any) -> None:
    parser = add_command(
        studies,
        "moepp",
        "compare MoE++ with a vanilla mixture: cost, speed, accuracy",
        "python -m tools.studies moepp\n"
        "python -m tools.studies moepp --parts costs speed --kinds 16 1 1 2\n"
        "python -m tools.studies moepp --parts training --seeds 5 --epochs 40",
        "costs counts the numbers of the paper's Tables 1, A and B; speed measures "
        "expert forward times by tau, as Table 3; training trains on the bundled "
        "digits: the vanilla twin, MoE++ by tau, without each kind of expert (Table 5) "
        "and without gating residuals (Table 6). removal removes kinds of experts "
        "after training (Table C), tokens counts the zero-computation experts that "
        "patches meet (Figure A), and constants trains with --constants constant "
        "experts (Figure 3).\n\nThe models that train are the preset moepp_digits and "
        "changes of it.",
        RESUMES,
        "tools.studies.moepp",
    )
    add_parts(parser, MOEPP_PARTS)
    parser.add_argument(
        "--taus", type=positive, nargs="+", default=[0.1, 0.25, 0.5, 0.75, 1.0]
    )
    parser.add_argument(
        "--only", nargs="+", metavar="MODEL", help="names of the models that train"
    )
    parser.add_argument(
        "--constants",
        type=at_least(0),
        nargs="+",
        metavar="N",
        help="numbers of constant experts, for Figure 3; by default "
        f"{' '.join(map(str, CONSTANTS))}",
    )
    add_training(parser, "moepp", epochs=30, batch_size=32, learning_rate=3e-3)
    layer = parser.add_argument_group("the layer of costs and speed")
    layer.add_argument("--tokens", type=at_least(1), default=4096)
    layer.add_argument("--dim", type=at_least(1), default=768)
    layer.add_argument("--mlp-dim", type=at_least(1), default=2048)
    layer.add_argument(
        "--kinds",
        type=at_least(0),
        nargs=4,
        default=[8, 1, 1, 2],
        metavar=("FFN", "ZERO", "COPY", "CONSTANT"),
    )
    layer.add_argument("--selected", type=at_least(1), default=2)
    layer.add_argument("--gamma", type=positive, default=1.1)
    layer.add_argument("--gated", action="store_true", help="SwiGLU-like experts")
    layer.add_argument("--rounds", type=at_least(1), default=9, help="of timing")


def mumoe(studies: Any) -> None:
    parser = add_command(
        studies,
        "mumoe",
        "show on digits what Multilinear Mixture of Experts shows on ImageNet and "
        "CelebA",
        "python -m tools.studies mumoe\n"
        "python -m tools.studies mumoe --parts specialisation --experts 2 4 --seeds 5",
        "specialisation: polysemanticity of CP muMoE heads with more and more experts "
        "(Figures 2, 3, 18, 19 and 22), and the dense ViT's MLPs cut to their largest "
        "singular values (Figure 7). editing: a planted bias, which one edit of the "
        "head corrects without training (Table 2, Figure 25). patches: the patches "
        "that use an expert of a muMoE Mixer most (Figure 4). costs: multiply-adds "
        "with and without the whole weight tensor (Table 8). Heads on the features of "
        "the dense ViT compare entmax with softmax (activation, Figure 20), batch "
        "normalisation of the coefficients with none (normalization, Figure 21), "
        "factorised heads with a linear one of as many parameters (matched, Figure "
        "23), and with dense and sparse mixtures of linear heads (capacity, Figure "
        "24).",
        RESUMES,
        "tools.studies.mumoe",
    )
    add_parts(parser, MUMOE_PARTS)
    parser.add_argument(
        "--experts",
        type=at_least(1),
        nargs="+",
        default=[2, 4, 8, 16, 32],
        metavar="N",
        help="numbers of experts of the heads",
    )
    parser.add_argument(
        "--positions", nargs="+", choices=("final", "penultimate"), default=["final"]
    )
    parser.add_argument("--rank", type=at_least(1), default=128, help="of the heads")
    parser.add_argument(
        "--edited-experts",
        type=at_least(1),
        default=32,
        metavar="N",
        help="number of experts of the head that is edited",
    )
    add_training(parser, "mumoe", epochs=15, batch_size=64, learning_rate=2e-3)


def limoe(studies: Any) -> None:
    parser = add_command(
        studies,
        "limoe",
        "repeat the ablations of LIMoE on small pairs of images and captions",
        "python -m tools.studies limoe --parts losses orders\n"
        "python -m tools.studies limoe --parts pruning --seeds 5\n"
        "python -m tools.studies limoe --data folder:pairs --steps 500 --parts routers",
        "losses adds the auxiliary losses one after the other, from none to LIMoE's. "
        "selected has the local losses and priorities for several experts per token "
        "(Table 6). thresholds varies the global entropy thresholds (appendix B.2, "
        "Figures 8 to 10), orders who is served first (Figure 6), routers compares one "
        "router, one for each modality, and disjoint experts (Table 7), experts the "
        "number of experts (Figure 12), lengths the number of patches (Figure 5), "
        "groups the groups of a batch (Figure 16). pruning prunes the experts of one "
        "modality (Figures 13 to 15).",
        RESUMES,
        "tools.studies.limoe",
    )
    add_parts(parser, LIMOE_PARTS)
    parser.add_argument(
        "--selected",
        type=at_least(1),
        nargs="+",
        metavar="K",
        help="experts per token of the part selected; by default 1 2",
    )
    for modality in ("text", "image"):
        parser.add_argument(
            f"--{modality}-experts",
            type=positive,
            nargs="+",
            metavar="N",
            help=f"soft minima of {modality} experts of the part thresholds; by "
            "default from 1 to all experts",
        )
    parser.add_argument(
        "--text-pool",
        type=at_least(1),
        metavar="N",
        help="disjoint experts of text of the part routers; by default one more than "
        "the soft minimum of text",
    )
    add_pairs(parser, "limoe", "limoe_emoji")


def clip_up(studies: Any) -> None:
    parser = add_command(
        studies,
        "clip-up",
        "repeat the ablations of CLIP-UP on small pairs of images and captions",
        "python -m tools.studies clip-up --parts upcycling\n"
        "python -m tools.studies clip-up --parts modalities gates --seeds 5\n"
        "python -m tools.studies clip-up --data folder:pairs --steps 500",
        "upcycling compares dense models, models upcycled from them and models from "
        "scratch at equal steps (Figure 4): those of the dense recipe and the upcycled "
        "one's together, or --epochs and --steps in all, of which 56% are dense as in "
        "the paper. backbones compares two towers with "
        "one transformer for both modalities, with LIMoE's entropy losses and without "
        "(Tables 1 and 4), modalities has experts for texts, images or both (Figure "
        "5), capacity two capacity factors (Figure 6), gates normalises the gates or "
        "not (Figure 8).",
        RESUMES,
        "tools.studies.clip_up",
    )
    add_parts(parser, CLIP_UP_PARTS)
    parser.add_argument(
        "--dense-recipe",
        default="clip_emoji",
        metavar="RECIPE",
        help="recipe whose optimizer and schedule dense models and those from scratch "
        "have; clip_emoji by default",
    )
    add_pairs(parser, "clip_up", "clip_up_emoji")


def add_pairs(parser: Parser, name: str, recipe: str) -> None:
    """Adds the arguments of studies of pairs."""
    parser.add_argument(
        "--only", nargs="+", metavar="ROW", help="names of the rows that train"
    )
    parser.add_argument(
        "--recipe",
        default=recipe,
        help=f"a recipe of pairs, a name or a file; {recipe} by default",
    )
    add_data(
        parser,
        help=", of pairs, emoji or webdataset:GLOB; in the place of the recipe's",
    )
    add_overrides(parser)
    add_overrides(
        parser, "--recipe-set", "settings of the recipe", "data.captions=first"
    )
    add_training(parser, name, None, None, None)
    parser.add_argument(
        "--steps", type=at_least(1), help="length of a run, in the place of --epochs"
    )


def add_parts(parser: Parser, names: tuple[str, ...]) -> None:
    """Adds `--parts`."""
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=names,
        default=names,
        metavar="PART",
        help=f"{', '.join(names)}; by default all",
    )


def add_training(
    parser: Parser,
    name: str,
    epochs: int | None,
    batch_size: int | None,
    learning_rate: float | None,
) -> None:
    """Adds the arguments of runs, which all studies have."""
    group = parser.add_argument_group("runs")
    group.add_argument("--seeds", type=at_least(1), default=3, help="number of seeds")
    add_run(group, epochs, batch_size, learning_rate, f"{name}_study")
    group.add_argument(
        "--restart", action="store_true", help="remove the finished runs first"
    )
