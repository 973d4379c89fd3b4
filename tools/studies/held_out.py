"""Compare a model with experts and its dense twin on pictures that are held out.

The twin has as many active parameters and trains for as many steps. Each tries the same
settings on the validation split, from one seed. The best setting of each is trained
from several seeds, and measured on the test split, which nothing has read until then.
Baselines choose their settings on the validation split, too: for pairs the nearest
caption and a kernel ridge regression, for classes the same regression to labels.
"""

import argparse
import itertools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe import data, evaluation, training
from keras_moe._files import write_json
from keras_moe.cli._arguments import RESUMES, Result, add_count
from keras_moe.cli.train import backend_and_versions
from tools.studies import clip_art
from tools.studies.pairs import PairTraining
from tools.studies.study import (
    Run,
    Study,
    percent,
    spread,
    spread_of,
)

EXAMPLES = """\
python -m tools.studies held-out pairs emoji
python -m tools.studies held-out pairs openclipart:FOLDER
python -m tools.studies held-out classes openclipart:FOLDER"""
INTERRUPTED = RESUMES
# The settings that both twins try, by name.
SETTINGS = {
    "as it is": {},
    "weight decay 1": {"optimizer.weight_decay": 1.0},
    "learning rate halved": {"schedule.learning_rate": 1e-3},
}
TWINS = {"experts": {}, "dense": {"model.moe_layers": None}}
WIDTHS, PENALTIES = (0.3, 1.0, 3.0), (0.01, 0.1, 1.0)
# Images that the nearest-caption baseline compares at a time.
CHUNK = 256
# The side of the images that the regression reads, which is not better at 32.
SIDE = 16
# What the larger pictures need: as many patches as the smaller ones.
CLIP_ART = {"model.image_shape": [64, 64, 3], "model.patch_size": 16}
# The recipes by task, and what else the larger set needs.
RECIPES = {
    "pairs": ("limoe_emoji", {"model.max_length": 24, "schedule.epochs": 15}),
    "classes": (
        "vmoe_digits",
        {
            # As many active parameters as the dense twin.
            "model.num_selected_experts": 1,
            "model.examples_per_group": 64,
            "optimizer.groups": [
                {"match": "kernels"},
                {"match": "rest", "weight_decay": 0.0},
            ],
            "schedule.epochs": 15,
        },
    ),
}
# The figure that is chosen by, first, and those beside it.
FIGURES = {
    "pairs": ("r1", "image_to_text_r1", "text_to_image_r1"),
    "classes": ("accuracy", "few_shot_10"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=list(RECIPES), help="What the models learn.")
    parser.add_argument(
        "source", metavar="SOURCE", help="The pictures: emoji, or openclipart:FOLDER."
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="The folder of the results; by default runs/held_out_TASK_SOURCE.",
    )
    add_count(
        parser, "--seeds", "The number of seeds from which the best setting trains.", 3
    )
    add_count(parser, "--epochs", "The number of epochs, instead of the recipe's.")


def run(args: argparse.Namespace, console: Console) -> Result:
    name, sizes = RECIPES[args.task]
    kind, _, folder = args.source.partition(":")
    output = args.output or Path(f"runs/held_out_{args.task}_{kind}")
    source = args.source
    if kind == "openclipart":
        drawings = output / "drawings"
        if not drawings.exists():
            clip_art.write_folders(folder, drawings)
        source = f"folder:{drawings / args.task}"
    overrides = {"data.source": source}
    if source != "emoji":
        overrides |= {**CLIP_ART, **sizes}
    if args.epochs:
        overrides["schedule.epochs"] = args.epochs
    recipe = training.load_recipe(name).replace(**overrides)
    pairs = PairTraining(recipe, None)
    settings = {**pairs.settings(), **backend_and_versions()}
    study = Study(output, settings, console)
    train = pairs.make if args.task == "pairs" else lambda *x: classified(recipe, *x)
    baselines = pair_baselines if args.task == "pairs" else class_baselines
    results = {
        "baselines": baselines(source, console),
        "twins": compared(study, train, args.seeds, FIGURES[args.task][0]),
    }
    values = {"settings": settings, **results}
    write_json(study.results_path, values)
    table = table_of(results, FIGURES[args.task])
    return Result(values, (table, f"results   {study.results_path}"))


def compared(study: Study, train: Callable, seeds: int, figure: str) -> dict:
    """Chooses a setting of each twin on validation, and tests it from several seeds."""

    def run(split, twin, name, seed):
        own = {**TWINS[twin], **SETTINGS[name], "data.test_split": split}

        def make(on_progress):
            return train(own, seed, on_progress)

        return Run(f"{twin}-{split}", seed, {"overrides": own}, make, f"{twin}, {name}")

    def figures(results):
        return [result["figures"] for result in results]

    twins = {}
    for twin in TWINS:
        runs = [run("validation", twin, name, 0) for name in SETTINGS]
        validation = {
            name: figures(tried)[0]
            for name, tried in zip(SETTINGS, study.finish_all(runs).values())
        }
        chosen = max(SETTINGS, key=lambda name: validation[name][figure])
        twins[twin] = {"validation": validation, "chosen": chosen}
    # The one look at the test split, after all choices.
    for twin, row in twins.items():
        runs = [run("test", twin, row["chosen"], seed) for seed in range(seeds)]
        (tested,) = study.finish_all(runs).values()
        row |= {
            "test": {
                name: spread([own[name] for own in figures(tested)])
                for name in tested[0]["figures"]
                if all(isinstance(own.get(name), float) for own in figures(tested))
            },
            "parameters": tested[0]["parameters"],
            "seconds": spread_of(tested, "seconds"),
        }
    return twins


def classified(
    recipe: training.Recipe, overrides: dict, seed: int, on_progress: Callable
) -> tuple[dict, dict]:
    """Trains a classifier; its accuracy, and that of a 10-shot probe of its
    features."""
    recipe = recipe.replace(**{**overrides, "seed": seed})
    on_progress("training")
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: on_progress(f"epoch {epoch + 1}")
    )
    begin = time.perf_counter()
    trained = training.train(recipe, callbacks=[watch], verbose=0)
    seconds = time.perf_counter() - begin
    model = trained.model
    features = keras.Model(model.input, model.features)

    def features_of(split):
        images, labels = images_of(recipe.data.source, split, model.input_shape[1:])
        return features.predict(images, verbose=0), labels

    train, validation = features_of("train"), features_of("validation")
    probe = evaluation.few_shot(*train, *validation, shots=(10,))
    l2 = float(probe.best_l2[0])
    tested = features_of(recipe.data.test_split)
    probe = evaluation.few_shot(*train, *tested, shots=(10,), l2s=(l2,))
    return {
        "figures": {"accuracy": trained.score, "few_shot_10": float(probe.mean[0])},
        "parameters": model.count_params(),
        "seconds": seconds,
        "history": trained.history,
    }, {}


def pair_baselines(source: str, console: Console) -> dict:
    """Retrieval by the nearest caption and by a kernel ridge regression."""
    train, validation, test = (
        pairs_of(source, split) for split in ("train", "validation", "test")
    )

    def nearest(pairs):
        embeddings = nearest_caption_embeddings(*train[:2], *pairs[:2])
        return recalls(*embeddings, pairs[2])

    def ridge(pairs, setting):
        embeddings = kernel_ridge_embeddings(*train[:2], *pairs[:2], *setting)
        return recalls(*embeddings, pairs[2])

    console.print("fitting the regression")
    tried = {x: ridge(validation, x) for x in itertools.product(WIDTHS, PENALTIES)}
    chosen = max(tried, key=lambda setting: tried[setting]["r1"])
    return {
        "chance": {"validation": chance(validation), "test": chance(test)},
        "nearest caption": {"validation": nearest(validation), "test": nearest(test)},
        "kernel ridge": {
            "validation": tried[chosen],
            "test": ridge(test, chosen),
            "chosen": dict(zip(("width", "penalty"), chosen)),
        },
    }


def nearest_caption_embeddings(
    train_images: np.ndarray,
    train_captions: Sequence[str],
    images: np.ndarray,
    captions: Sequence[str],
) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors of words: those of the nearest training image, and the captions'.

    Near duplicates of test images in the training set raise the recalls of this
    baseline far above chance.
    """
    known, pixels = _pixels(train_images), _pixels(images)
    words = [_words(caption) for caption in captions]
    known_words = [_words(caption) for caption in train_captions]
    vocabulary = sorted({word for row in (*known_words, *words) for word in row})
    index = {word: number for number, word in enumerate(vocabulary)}
    # The nearest of the known images, by squared distance.
    norms, nearest = np.sum(np.square(known), axis=1), []
    for first in range(0, len(pixels), CHUNK):
        products = pixels[first : first + CHUNK] @ known.T
        nearest.extend(np.argmin(norms - 2 * products, axis=1))
    predicted = [known_words[row] for row in nearest]
    return _vectors(predicted, index), _vectors(words, index)


def kernel_ridge_embeddings(
    train_images: np.ndarray,
    train_captions: Sequence[str],
    images: np.ndarray,
    captions: Sequence[str],
    width: float = 1.0,
    penalty: float = 0.01,
) -> tuple[np.ndarray, np.ndarray]:
    """Image and text vectors of a kernel ridge regression to character n-grams.

    A caption's vector is the TF-IDF of its runs of two to four letters, and an image's
    is predicted by `K(X, T) (K(T, T) + penalty I)^-1 Y`, with the training captions'
    vectors `Y` and the kernel `K(a, b) = exp(-|a - b|_1 / (width m))`, m the median
    distance of training images. A strong baseline on small sets.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.metrics.pairwise import manhattan_distances

    known, pixels = _pixels(train_images), _pixels(images)
    vectors = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4))
    # Fitted on all captions: a test caption may share no n-gram with the training
    # captions, and still needs a vector.
    vectors.fit([*train_captions, *captions])
    distances = manhattan_distances(known)
    scale = float(np.median(distances)) * width or 1.0
    kernel = np.exp(-distances / scale)
    kernel[np.diag_indices_from(kernel)] += penalty
    similar = np.exp(-manhattan_distances(pixels, known) / scale)
    weights = np.linalg.solve(kernel, similar.T).T
    predicted = weights @ vectors.transform(train_captions)
    texts = vectors.transform(captions).toarray()
    return predicted.astype("float32"), texts.astype("float32")


def _pixels(images):
    # Wide enough for sums of squares of bytes.
    return images.reshape(len(images), -1).astype("float32")


def _words(caption):
    return sorted(set(re.findall(r"\w+", caption.lower())) or {caption})


def _vectors(rows, index):
    vectors = np.zeros((len(rows), len(index)), "float32")
    for vector, words in zip(vectors, rows):
        vector[[index[word] for word in words]] = len(words) ** -0.5
    return vectors


def class_baselines(source: str, console: Console) -> dict:
    """The most frequent class, and a kernel ridge regression to classes."""
    from sklearn.metrics.pairwise import manhattan_distances

    splits = [
        images_of(source, split, (SIDE, SIDE, 3))
        for split in ("train", "validation", "test")
    ]
    rows = [images.reshape(len(images), -1) for images, _ in splits]
    distances = [manhattan_distances(own, rows[0]) for own in rows]
    targets = np.eye(1 + splits[0][1].max())[splits[0][1]]
    median = np.median(distances[0])

    def ridge(setting):
        width, penalty = setting
        kernel, *others = (np.exp(-own / (width * median)) for own in distances)
        weights = np.linalg.solve(kernel + penalty * np.eye(len(kernel)), targets)
        return [(own @ weights).argmax(axis=1) for own in others]

    def accuracies(predicted):
        return [
            {"accuracy": float(np.mean(own == labels))}
            for own, (_, labels) in zip(predicted, splits[1:])
        ]

    console.print("fitting the regression")
    tried = {x: accuracies(ridge(x)) for x in itertools.product(WIDTHS, PENALTIES)}
    chosen = max(tried, key=lambda setting: tried[setting][0]["accuracy"])
    most = np.bincount(splits[0][1]).argmax()
    names = ("validation", "test")
    return {
        "most frequent class": dict(zip(names, accuracies([most, most]))),
        "kernel ridge": {
            **dict(zip(names, tried[chosen])),
            "chosen": dict(zip(("width", "penalty"), chosen)),
        },
    }


def pairs_of(source: str, split: str) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Images, captions, and numbers that are equal for equal captions."""
    batches = data.load_pairs(
        source, split, (SIDE, SIDE, 3), batch_size=256, shuffle=False
    )
    inputs, ids = zip(*batches.as_numpy_iterator())
    captions = np.concatenate([batch["captions"] for batch in inputs])
    return (
        np.concatenate([batch["images"] for batch in inputs]),
        [caption.decode() for caption in captions],
        np.concatenate([batch["text_ids"] for batch in ids]),
    )


def images_of(source: str, split: str, shape: tuple) -> tuple[np.ndarray, np.ndarray]:
    """All images of a split, and their labels."""
    batches = data.load(source, split, shape, batch_size=256, shuffle=False)
    images, labels = zip(*batches.as_numpy_iterator())
    return np.concatenate(images), np.concatenate(labels)


def recalls(images: Any, texts: Any, text_ids: np.ndarray) -> dict[str, float]:
    """R@1 of both directions, and their mean."""
    figures = evaluation.retrieval(images, texts, ks=(1, 5), text_ids=text_ids)
    figures = figures.figures()
    both = figures["image_to_text_r1"], figures["text_to_image_r1"]
    return {**figures, "r1": sum(both) / 2}


def chance(pairs: tuple) -> dict[str, float]:
    """The recall of a random order, in which any of equal captions is right."""
    _, counts = np.unique(pairs[2], return_counts=True)
    share = float(np.sum(counts.astype(float) ** 2) / counts.sum() ** 2)
    return dict.fromkeys(("r1", "image_to_text_r1", "text_to_image_r1"), share)


def table_of(results: dict, figures: tuple[str, ...]) -> Table:
    """A row for each baseline and twin, in percent."""
    table = Table("", "chosen", *(f"validation {name}" for name in figures))
    for name in ("parameters", "seconds", *(f"test {name}" for name in figures)):
        table.add_column(name, justify="right")

    def cells(row):
        return [f"{100 * row[name]:.1f}" if name in row else "" for name in figures]

    for name, row in results["baselines"].items():
        chosen = ", ".join(f"{key} {x:g}" for key, x in row.get("chosen", {}).items())
        table.add_row(
            name, chosen, *cells(row["validation"]), "", "", *cells(row["test"])
        )
    for name, row in results["twins"].items():
        table.add_row(
            name,
            row["chosen"],
            *cells(row["validation"][row["chosen"]]),
            f"{row['parameters']:,}",
            f"{row['seconds']['mean']:.0f}",
            *(percent(row["test"][name]) for name in figures),
        )
    return table
