"""The sub-commands that measure presets and look into them, and their arguments.

Only the standard library is imported: help is printed before Keras is there.
"""

from pathlib import Path
from typing import Any

from keras_moe.cli.parser import (
    add_class_subset,
    add_command,
    add_data,
    add_devices,
    add_overrides,
    add_pair_evaluation,
    add_preset,
    add_shots,
    at_least,
)


def evaluate(commands: Any) -> None:
    """Adds `evaluate`."""
    parser = add_command(
        commands,
        "evaluate",
        "measure a preset: accuracy, few-shot and zero-shot, retrieval, average "
        "precision",
        "keras-moe evaluate runs/mumoe_digits\n"
        "keras-moe evaluate runs/mumoe_digits/preset --data folder:photos --json\n"
        "keras-moe evaluate hf://timm/vit_base_patch16_224.augreg_in21k "
        "--data tfds:cifar10 --metrics few_shot --shots 5 10\n"
        "keras-moe evaluate runs/celeb_a --metrics average_precision\n"
        "keras-moe evaluate runs/limoe --data tfds:cifar10 --metrics zero_shot "
        "--templates imagenet",
        "Images are resized as keras_moe.data.load does it. The folder of a run says "
        "which images it was trained and tested on; other presets need --data. Where "
        "both model and data name their classes, these are matched by name.",
    )
    add_preset(parser, help="a run of keras-moe train, or any preset")
    add_data(parser, help="; by default those of the run")
    parser.add_argument("--split", help="split to evaluate on; by default test")
    parser.add_argument(
        "--metrics",
        nargs="+",
        choices=(
            "accuracy",
            "average_precision",
            "few_shot",
            "zero_shot",
            "retrieval",
            "contrastive_accuracy",
        ),
        help="by default all that the data and the model allow: few_shot needs no "
        "head, average_precision is the default for images of several labels; models "
        "of pairs have retrieval and contrastive_accuracy of images with captions, "
        "zero_shot and few_shot of images with classes",
    )
    parser.add_argument(
        "--hierarchy", metavar="FILE.json", help="of labels, as keras_moe.data.load"
    )
    add_class_subset(parser)
    parser.add_argument("--batch-size", type=at_least(1), default=64, metavar="N")
    add_overrides(parser)
    add_pair_evaluation(parser)
    shots = parser.add_argument_group("few-shot accuracy")
    add_shots(shots, [10])
    shots.add_argument(
        "--train-split", help="split from which shots are drawn; by default train"
    )
    shots.add_argument(
        "--seeds",
        type=at_least(0),
        nargs="+",
        default=[0, 1, 2],
        metavar="SEED",
        help="one draw of the shots for each",
    )
    add_devices(parser)


def report(commands: Any) -> None:
    """Adds `report`."""
    parser = add_command(
        commands,
        "report",
        "write a page on what the experts of a preset do with data",
        "keras-moe report vmoe_digits --data digits --show-examples 3 17\n"
        "keras-moe report runs/limoe_emoji --output emoji_report\n"
        "keras-moe report runs/vmoe --data tfds:cifar10 --examples 10000 --json",
        "Writes report.html, a page that needs no network and no program but a "
        "browser, its pictures as PNG files, and report.json. Lists what is wrong with "
        "the routers, or that nothing is. The folder of a run says which data it was "
        "tested on; other presets need --data.",
    )
    add_preset(parser, help="a run of keras-moe train, or any preset")
    add_data(parser, help="; by default those of the run")
    parser.add_argument("--split", help="split to report on; by default test")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report"),
        metavar="FOLDER",
        help="folder of the report; an older report there is replaced",
    )
    parser.add_argument(
        "--examples",
        type=at_least(1),
        metavar="N",
        help="examples after which the report ends; by default all",
    )
    parser.add_argument(
        "--show",
        type=at_least(1),
        default=6,
        metavar="N",
        help="examples to show one by one",
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, help="of examples and groups"
    )
    parser.add_argument(
        "--show-examples",
        type=at_least(0),
        nargs="+",
        metavar="NUMBER",
        help="numbers of the examples to show instead, counted from 0",
    )
    parser.add_argument("--batch-size", type=at_least(1), default=64, metavar="N")
    parser.set_defaults(hierarchy=None, train_split=None)
    add_overrides(parser)
    add_overrides(
        parser, "--data-options", "options of load_pairs", "unreadable=exclude"
    )
    add_devices(parser)
