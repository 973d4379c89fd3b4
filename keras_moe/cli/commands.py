"""The sub-commands of `keras-moe` and their arguments.

Only the standard library is imported: help is printed before Keras is there.
"""

import argparse
from pathlib import Path
from typing import Any

from keras_moe._version import __version__
from keras_moe.cli.measuring import evaluate, report
from keras_moe.cli.parser import (
    RESUMES,
    Parser,
    add_command,
    add_data,
    add_devices,
    add_layout,
    add_num_classes,
    add_overrides,
    add_preset,
    add_run,
    add_shots,
    at_least,
    json_or_string,
    positive,
)


def make_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="keras-moe",
        description="Vision mixtures of experts for Keras 3. KERAS_BACKEND chooses "
        "jax, tensorflow or torch; by default the backend of a keras.json that you "
        "have changed, or else the first that is installed.",
        examples="keras-moe quickstart\n"
        "keras-moe describe vmoe_b32\n"
        "keras-moe train mumoe_digits\n"
        "keras-moe evaluate runs/mumoe_digits --json\n"
        "keras-moe report runs/mumoe_digits\n"
        "keras-moe COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        quickstart,
        train,
        evaluate,
        report,
        convert,
        upcycle,
        describe,
        plan,
        deduplicate,
    ):
        add(commands)
    return parser


def quickstart(commands: Any) -> None:
    parser = add_command(
        commands,
        "quickstart",
        "train a small V-MoE on handwritten digits, and look inside it",
        "keras-moe quickstart\n"
        "keras-moe quickstart --epochs 5 --output runs/five_epochs",
        "About two minutes on two cores, without a download. Reports test accuracy, "
        "10-shot accuracy of the features and each expert's share of the tokens, saves "
        "a preset, loads it again, and draws what each expert looks at.",
    )
    parser.add_argument("--seed", type=at_least(0, 2**32 - 1), default=0)
    add_run(parser, 50, 32, 2e-3, "quickstart")


def train(commands: Any) -> None:
    parser = add_command(
        commands,
        "train",
        "train a model by a recipe, and save it as a preset",
        "keras-moe train mumoe_digits\n"
        "keras-moe train mumoe_digits --recipe-set schedule.epochs=10 "
        "--set num_experts=16\n"
        "keras-moe train mumoe_mixer_s16 --preset mumoe_mixer_s16_tr\n"
        "keras-moe train mumoe_clip_b32 --data folder:photos\n"
        "keras-moe train vmoe_b16_i21k --data tfrecord:photos --devices all\n"
        "keras-moe train mumoe_digits --recipe-set schedule.epochs=40 --extend\n"
        "keras-moe train mumoe_digits --recipe-set schedule.patience=5 "
        "schedule.best=restore",
        "The same command again resumes a run that was ended, whatever ended it, from "
        "its newest checkpoint; --restart begins anew, --extend continues after its "
        "end.\n\nWrites to the output folder: `preset`, which from_preset loads; "
        "`results.json` with the settings and the history; `training.png`, the "
        "curves; `checkpoints`; and for models with experts `router_health.csv` and "
        "its picture, `tensorboard` where tensorboardX is installed, and `report` with "
        "--report-examples.",
        RESUMES,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a name, or a TOML or JSON file"
    )
    add_preset(
        parser,
        "--preset",
        help="the model in the place of the recipe's, with its weights if it has any",
    )
    add_data(parser, help="; in the place of the recipe's")
    add_overrides(parser)
    add_overrides(
        parser, "--recipe-set", "settings of the recipe", "schedule.epochs=10"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder of the run; runs/ and the recipe's name by default",
    )
    checkpoints = parser.add_argument_group("checkpoints")
    checkpoints.add_argument(
        "--checkpoint-every",
        type=at_least(1),
        metavar="STEPS",
        help="steps between checkpoints; by default one at each epoch's end",
    )
    checkpoints.add_argument(
        "--keep-checkpoints", type=at_least(1), default=3, metavar="N"
    )
    checkpoints.add_argument(
        "--keep-every",
        type=at_least(1),
        metavar="STEPS",
        help="checkpoints of these steps stay, too, for branches and soups",
    )
    checkpoints.add_argument(
        "--restart",
        action="store_true",
        help="remove the checkpoints of an earlier run, and begin anew",
    )
    checkpoints.add_argument(
        "--extend",
        action="store_true",
        help="continue a run for more epochs or steps than it had, as --recipe-set "
        "says; schedule.schedule_steps=N leaves its learning rate as it was",
    )
    checkpoints.add_argument(
        "--branch-from",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint of another run to begin with",
    )
    checkpoints.add_argument(
        "--cooldown",
        type=at_least(1),
        metavar="STEPS",
        help="with --branch-from: let the learning rate fall for so many steps",
    )
    looks = parser.add_argument_group("evaluation while it trains")
    looks.add_argument(
        "--health-every",
        type=at_least(0),
        default=1,
        metavar="EPOCHS",
        help="epochs between looks at the routers; 0 for never",
    )
    looks.add_argument(
        "--few-shot-every",
        type=at_least(0),
        default=0,
        metavar="EPOCHS",
        help="epochs between few-shot accuracies; 0 for never",
    )
    looks.add_argument(
        "--report-examples",
        type=at_least(0),
        default=0,
        metavar="N",
        help="test examples of a report on the routing at the end, whose first "
        "picture is the model card's; 0 for none",
    )
    add_shots(looks, None)
    looks.add_argument(
        "--few-shot-data",
        metavar="SOURCE",
        help="images with splits train and test; the recipe's by default",
    )
    looks.add_argument(
        "--retrieval-every",
        type=at_least(0),
        default=0,
        metavar="EPOCHS",
        help="epochs between recalls of the test pairs; 0 for never",
    )
    add_devices(parser)
    add_processes(parser)


def convert(commands: Any) -> None:
    parser = add_command(
        commands,
        "convert",
        "convert published weights into a preset",
        "keras-moe convert "
        "gs://vmoe_checkpoints/vmoe_s32_last2_ilsvrc2012_randaug_medium out\n"
        "keras-moe convert hf://timm/vit_base_patch16_224.augreg_in21k out\n"
        "keras-moe convert ViT-B_16.npz out --set image_shape=[384,384,3]",
        "Where the source's framework is installed (timm, KerasHub), a test image "
        "goes through both models. The preset is written beside its place, read again "
        "and compared, and takes its place only then. Its conversion.json says which "
        "arrays each weight was made of.",
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="weights as keras_moe.models.convert has them"
    )
    add_target(parser)
    add_num_classes(parser, "classes of a new head")
    parser.add_argument("--task", choices=("backbone", "image_classifier"))
    parser.add_argument(
        "--tower", choices=("image", "text"), help="one tower of a model of pairs"
    )
    add_overrides(parser)
    parser.add_argument("--no-verify", action="store_true", help="compare nothing")
    parser.add_argument("--quiet", action="store_true", help="print no table")


def upcycle(commands: Any) -> None:
    parser = add_command(
        commands,
        "upcycle",
        "turn a dense model into a mixture of experts",
        "keras-moe upcycle runs/dense runs/sparse --num-experts 8\n"
        "keras-moe upcycle runs/dense runs/sparse --set num_selected_experts=1\n"
        "keras-moe upcycle runs/dense runs/sparse --settings clip_up\n"
        "keras-moe upcycle runs/clip runs/sparse --settings clip_up --towers image",
        "The report has the parameters before and after, and how far the outputs are "
        "apart; it is also written to `upcycling.json` in the new preset.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder, an hf:// handle or published weights",
    )
    add_target(parser)
    parser.add_argument(
        "--num-experts",
        type=json_or_string,
        default=8,
        metavar="E",
        help="an integer, or for mumoe a JSON list of one for each level",
    )
    parser.add_argument(
        "--moe-layers",
        type=json_or_string,
        default="every_2",
        metavar="LAYERS",
        help="every_2, last_2, ... or a JSON list of blocks",
    )
    parser.add_argument(
        "--router", default="softmax_token_choice", help="a router's name, or mumoe"
    )
    parser.add_argument("--noise", type=float, default=0.0, help="of the copies")
    parser.add_argument(
        "--settings",
        metavar="NAME",
        help="published settings, such as clip_up, in the place of those that keep "
        "the function",
    )
    parser.add_argument(
        "--towers",
        type=json_or_string,
        metavar="TOWER",
        help="image or text, of a pair of two towers; or a JSON dict by tower of their "
        "own settings; both towers by default",
    )
    add_overrides(parser, what="arguments of the MoE layers")


def describe(commands: Any) -> None:
    parser = add_command(
        commands,
        "describe",
        "count parameters, active parameters and FLOPs of a model",
        "keras-moe describe vmoe_b32\n"
        "keras-moe describe vmoe_h14 --num-classes 1000 --set image_shape=[384,384,3]\n"
        "keras-moe describe --list",
        "Nothing is allocated: the largest preset takes no longer than the smallest.",
    )
    add_preset(parser, nargs="?")
    add_num_classes(parser, "count a head, too")
    add_overrides(parser)
    parser.add_argument("--list", action="store_true", help="all built-in presets")


def plan(commands: Any) -> None:
    parser = add_command(
        commands,
        "plan",
        "estimate memory, traffic and time of training on many devices",
        "keras-moe plan vmoe_h14 --chip tpu_v4 --devices 256 --batch-size 4096\n"
        "keras-moe plan vmoe_h14 --chip h200 --devices 8 --batch-size 512\n"
        "keras-moe plan vmoe_l16 --chip tpu_v5e --devices 64 --batch-size 4096 "
        "--expert-parallel 32 --set rematerialize=true",
        "It is arithmetic: no device is needed, and nothing is allocated. Without "
        "--expert-parallel the layouts that the numbers allow are compared, and the "
        "one that splits experts most is shown.",
    )
    add_preset(parser)
    parser.add_argument(
        "--chip", default="tpu_v4", help="tpu_v4, tpu_v5e, tpu_v5p or h200"
    )
    parser.add_argument("--devices", type=at_least(1), required=True, metavar="N")
    parser.add_argument("--batch-size", type=at_least(1), required=True, metavar="N")
    add_layout(parser)
    parser.add_argument(
        "--optimizer", default="adam", help="sgd, momentum, adam or adafactor"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", help="bfloat16, float16 or float32"
    )
    parser.add_argument(
        "--utilization", type=positive, default=0.4, help="share of the chip's peak"
    )
    parser.add_argument(
        "--text-tokens", type=at_least(0), default=0, help="beside each image"
    )
    add_num_classes(parser, "count a head, too")
    add_overrides(parser)


def deduplicate(commands: Any) -> None:
    parser = add_command(
        commands,
        "deduplicate",
        "find the images of one split that are in another",
        "keras-moe deduplicate --data folder:photos --split train --against test\n"
        "keras-moe deduplicate --data tfds:cifar10 --output duplicates.json "
        "--max-distance 2",
        "Copies count that were resized or compressed again, too. Writes a file of "
        "their indices, which keras_moe.data.load(exclude=...) reads.",
    )
    add_data(parser, required=True)
    parser.add_argument("--split", default="train", help="split to look through")
    parser.add_argument("--against", default="test", help="split to find")
    parser.add_argument(
        "--against-data", metavar="SOURCE", help="its source, if it is another"
    )
    parser.add_argument(
        "--max-distance",
        type=at_least(-1, 64),
        default=3,
        metavar="BITS",
        help="bits of 64 in which a copy may differ; -1 for the same pixels alone",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("duplicates.json"), metavar="FILE.json"
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the folder of a new preset."""
    parser.add_argument(
        "output",
        type=Path,
        metavar="FOLDER",
        help="folder of the new preset; an older preset there is replaced",
    )


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments by which a process joins others, see `devices`."""
    group = parser.add_argument_group("several processes, with --devices")
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of the first process",
    )
    group.add_argument("--num-processes", type=at_least(1), metavar="N")
    group.add_argument("--process-id", type=at_least(0), metavar="I")
