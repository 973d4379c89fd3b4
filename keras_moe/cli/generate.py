"""Continue texts by a language model.

Each text is printed with its prompt as it was typed. A tokenizer that lower-cases, as
CLIP's does, shows in what follows the prompt.
"""

import argparse
from typing import TYPE_CHECKING, Any

from keras_moe._errors import unfit
from keras_moe.cli._arguments import (
    Result,
    add_count,
    add_flag,
    add_overrides,
    add_preset,
    positive,
)
from keras_moe.cli._inputs import find_model

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """\
keras-moe generate moepp_lm_python "Return a new"
keras-moe generate runs/moepp_lm_python "The list" --max-length 40 --temperature 0.7 \
--seed 1
keras-moe generate moepp_lm_python Return Raise --sampler greedy --json"""
SAMPLERS = ("top_k", "top_p", "greedy", "random", "beam")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset(parser)
    what = "The beginnings of texts."
    parser.add_argument("prompts", metavar="PROMPT", nargs="+", help=what)
    longest = "Tokens of a prompt with its continuation; all that the model takes."
    add_count(parser, "--max-length", longest)
    parser.add_argument(
        "--sampler",
        choices=SAMPLERS,
        default=SAMPLERS[0],
        help="How each next token is chosen, as in keras_hub.samplers.",
    )
    what = "Divides the logits: below 1 for likelier texts, above for odder ones."
    parser.add_argument("--temperature", type=positive, default=1.0, help=what)
    add_count(parser, "--seed", "The seed of the draws; another each time.", minimum=0)
    add_flag(parser, "--strip-prompt", "Print what follows the prompts alone.")
    add_overrides(parser)


def run(args: argparse.Namespace, console: "Console") -> Result:
    chosen = find_model(args)
    if not chosen.writes_texts:
        raise unfit("a language model", preset=args.preset)
    config: dict[str, Any] = {"temperature": args.temperature}
    if args.sampler not in ("greedy", "beam"):
        config["seed"] = args.seed
    model = chosen.load()
    model.compile(sampler={"class_name": args.sampler, "config": config})
    texts = model.generate(
        args.prompts, max_length=args.max_length, strip_prompt=args.strip_prompt
    )
    values = [{"prompt": x, "text": text} for x, text in zip(args.prompts, texts)]

    def show(console: "Console") -> None:
        # As it is: brackets are no markup.
        print(*texts, sep="\n\n", file=console.file)

    return Result(values, (show,))
