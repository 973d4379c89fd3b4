"""Tokenize texts once, into a folder that language models train on.

The folder is then the data of a recipe: tokens:FOLDER. Its shards are read where they
are, so that a corpus may be larger than the memory. The same command again goes on
where it was interrupted.
"""

import argparse
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

from keras_moe.cli._arguments import RESUMES, Result, add_count, add_target
from keras_moe.cli._inputs import progress_shown

if TYPE_CHECKING:
    from rich.console import Console

    from keras_moe.models import TextTokenizer

EXAMPLES = """\
keras-moe tokenize text:BOOKS tokens/books --tokenizer llama2.model
keras-moe tokenize python_docs tokens/python --tokenizer trained \
--vocabulary-size 1024 --splits train test"""
INTERRUPTED = RESUMES
# Seconds between lines of progress that go to a file.
PAUSE = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "The texts: text:PATH, a folder, file or glob of .txt, .md, .rst, .py, "
    what += ".jsonl and .jsonl.gz; tfds:NAME, tfrecord:GLOB or python_docs."
    parser.add_argument("source", metavar="SOURCE", help=what)
    add_target(parser, "The folder of the tokens, a new one or one to go on with.")
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="The tokenizer: a preset's folder or hf:// handle, a SentencePiece "
        ".model, clip, a file or folder of CLIP's merges, or trained, on the first "
        "texts.",
    )
    what = "The largest size of a trained vocabulary."
    add_count(parser, "--vocabulary-size", what)
    parser.add_argument(
        "--splits",
        nargs="+",
        default=["train", "validation"],
        metavar="SPLIT",
        help="The splits of the source.",
    )
    what = "The number of processes; by default one for each core."
    add_count(parser, "--workers", what)
    what = "The folder of TensorFlow Datasets."
    parser.add_argument("--data-dir", metavar="FOLDER", help=what)


def run(args: argparse.Namespace, console: "Console") -> Result:
    from rich.progress import TimeElapsedColumn

    from keras_moe.training._tokenizing import tokenize_texts

    last = time.monotonic()
    tokenizer = find_tokenizer(args)
    columns = ("{task.description}, {task.completed:,} documents", TimeElapsedColumn())
    with progress_shown(console, "tokenizing", *columns) as show:

        def progress(done: int, total: None, text: str) -> None:
            nonlocal last
            show(done, total, text)
            if not console.is_terminal and time.monotonic() - last > PAUSE:
                # A line now and then, since the bar is not shown.
                last = time.monotonic()
                console.print(f"{text}, {done:,} documents", highlight=False)

        found = tokenize_texts(
            args.source,
            args.output,
            tokenizer,
            args.splits,
            workers=args.workers,
            data_dir=args.data_dir,
            progress=progress,
        )
    source = f"tokens:{args.output}"
    splits = {
        split: {
            "documents": record["documents"],
            "tokens": sum(shard["tokens"] for shard in record["shards"]),
            "shards": len(record["shards"]),
        }
        for split, record in found.items()
    }
    lines = [
        f"{split:<12} {x['tokens']:,} tokens of {x['documents']:,} documents"
        for split, x in splits.items()
    ]
    return Result(
        {"source": source, "splits": splits}, (*lines, f"{'data':<12} {source}")
    )


def find_tokenizer(args: argparse.Namespace) -> "TextTokenizer":
    """The tokenizer as recipes name it, or one trained on the first split."""
    from keras_moe.training import NextToken, TextData

    objective = NextToken(
        tokenizer=args.tokenizer, vocabulary_size=args.vocabulary_size
    )
    data = TextData(batch_size=1, source=args.source, train_split=args.splits[0])
    # The length of rows is that of the model that will be trained.
    backbone = SimpleNamespace(max_length=2048, vocabulary_size=None)
    return objective.new_tokenizer(backbone, data, args.data_dir)
