"""Retrieval while `keras-moe train` trains."""

import argparse
from typing import Any

from keras_moe import data, training
from keras_moe.data.sources import has_captions
from keras_moe.evaluation.retrieval import KS


def retrieval(
    args: argparse.Namespace, recipe: training.Recipe, model: Any
) -> training.Retrieval:
    """Recalls of all captions of the pairs that the recipe evaluates on.

    Args:
        args: arguments of `commands.train`.
        recipe: recipe of the run.
        model: its model of pairs, with a tokenizer.

    Raises:
        ValueError: if the recipe has no pairs, or these are classes by name.
    """
    config = recipe.data
    if not isinstance(recipe.objective, training.Contrastive):
        raise ValueError(
            "Expected a recipe of pairs with --retrieval-every; received: "
            f"{recipe.name}, whose objective is {recipe.objective.name!r}"
        )
    source, split, data_dir = config.evaluated_source, config.test_split, args.data_dir
    if not has_captions(source, split, data_dir):
        raise ValueError(
            "Expected pairs with captions of their own for --retrieval-every; "
            f"received: {source!r}, whose captions are names of classes"
        )
    options = config.test_pair_options(data_dir)
    count = data.num_pairs(source, split, data_dir, **options)
    pairs = data.load_pairs(
        source,
        split,
        model.backbone.image_shape,
        recipe.objective.evaluation_batch_size or config.batch_size,
        tokenizer=model.preprocessor,
        shuffle=False,
        data_dir=data_dir,
        **{**options, "captions": "all"},
    )
    # A set may be smaller than those of the papers.
    return training.Retrieval(pairs, [k for k in KS if k <= count])
