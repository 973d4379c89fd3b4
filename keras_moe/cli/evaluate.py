"""`keras-moe evaluate`: a preset's figures on the images of any source.

Axes: N images, C classes of the model.
"""

import argparse
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe import data, evaluation, models
from keras_moe.cli.devices import set_devices
from keras_moe.cli.evaluate_pairs import (
    evaluate_pairs,
    few_shot_figures,
    find_pair_data,
    pair_rows,
)
from keras_moe.cli.measured import (
    Images,
    find_images,
    find_run,
    has_pairs,
    shown,
)
from keras_moe.cli.overrides import FIRST, model_overrides
from keras_moe.cli.prediction import accuracy, predict
from keras_moe.cli.result import Result, show_all
from keras_moe.evaluation.average_precision import mean_of_defined
from keras_moe.evaluation.zero_shot import NUM_CLASSES
from keras_moe.models import registry

METRICS = ("accuracy", "average_precision", "few_shot")
# Scores of all images are needed, from a head.
OF_HEADS = METRICS[:2]
# Options that classifiers have no use for.
OF_PAIRS = ("templates", "class_names", "data_options")


def run(args: argparse.Namespace, console: Console) -> Result:
    """Evaluates, and returns the figures."""
    preset, recipe = find_run(args.preset)
    overrides = model_overrides(args.set, {"preset": FIRST})
    of_pairs = has_pairs(preset, overrides)
    for name in () if of_pairs else OF_PAIRS:
        if getattr(args, name):
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"Expected a preset of pairs for {option}; received: {args.preset}"
            )
    images = (find_pair_data if of_pairs else find_images)(args, recipe)
    if preset in models.list_presets() and not (
        registry.has_weights(preset) and overrides.get("load_weights", True)
    ):
        warnings.warn(
            f"{preset} is evaluated without trained weights: these are figures of "
            "random ones",
            stacklevel=1,
        )
    before = keras.distribution.distribution()
    try:
        set_devices(args, preset, args.batch_size, overrides)
        if of_pairs:
            model = models.from_preset(preset, **{"task": "contrastive", **overrides})
            figures = evaluate_pairs(model, images, args, shown(console))
        else:
            model = models.from_preset(preset, **overrides)
            figures = evaluate(model, images, args, console)
    finally:
        keras.distribution.set_distribution(before)
    values = {
        "preset": args.preset,
        "data": images.source,
        "split": images.test_split,
        "backend": keras.backend.backend(),
        **figures,
    }
    return Result(values, show_all(figures_table(values)))


def evaluate(
    model: keras.Model, images: Images, args: argparse.Namespace, console: Console
) -> dict:
    """The figures of a model by metric, JSON-serialisable."""
    metrics = chosen_metrics(args.metrics, model, images)
    outputs, subset = {}, None
    if args.class_subset:
        check_of_subset(args.class_subset, metrics, images)
        subset = evaluation.read_class_subset(args.class_subset)
    if set(metrics) & set(OF_HEADS):
        # Before the images are read: classes that do not fit.
        if subset is None:
            places = class_places(model, images)
        else:
            places = subset.places(*names_and_count(images))
            columns = outputs_of(model, subset)
        outputs["logits"] = model.output
    if "few_shot" in metrics:
        outputs["features"] = pooled_features(model)
    shape = getattr(model, "backbone", model).image_shape
    inference = keras.Model(model.input, outputs)

    def predict_split(inference, split):
        batches = images.batches(split, shape, args.batch_size)
        return predict(inference, shown(console)(batches, split), args.batch_size)

    outcome, labels = predict_split(inference, images.test_split)
    figures = {"images": len(labels)}
    if "logits" in outputs:
        scores = outcome["logits"].astype("float32")
        if subset is None:
            own = in_model(labels, places, model)
        else:
            scores, own = scores[:, columns], subset.labels(labels, places)
        figures["classes"] = scores.shape[1]
        figures |= figures_of_scores(scores, own, metrics)
    if "few_shot" in metrics:
        features = keras.Model(model.input, {"features": outputs["features"]})
        pool, pool_labels = predict_split(features, images.train_split)
        test = outcome["features"], labels
        pool = pool["features"], pool_labels
        figures["few_shot"] = few_shot_figures(test, pool, args)
    return figures


def chosen_metrics(
    metrics: Sequence[str] | None, model: keras.Model, images: Images
) -> tuple[str, ...]:
    """The metrics to compute: those asked for, or all that labels and model allow."""
    has_head = hasattr(model, "num_classes")
    possible = (
        *(("average_precision" if images.several else "accuracy",) if has_head else ()),
        *(() if images.several else ("few_shot",)),
    )
    if metrics is None and possible:
        return possible
    for name in metrics or ("few_shot",):
        if name not in METRICS:
            raise ValueError(
                f"Expected a preset of pairs for --metrics {name}; received: a "
                f"{type(model).__name__}"
            )
        if name in OF_HEADS and not has_head:
            raise ValueError(
                f"Expected a preset with a head for --metrics {name}, or --metrics "
                f"few_shot; received: a {type(model).__name__}"
            )
        if name != "average_precision" and images.several:
            raise ValueError(
                f"Expected one label for each image for --metrics {name}; received: "
                f"{images.source!r}, whose images have several"
            )
    return tuple(metrics)


def pooled_features(model: keras.Model) -> Any:
    """The symbolic features (N, D) that a head reads, or would read."""
    features = model.features
    return features["pooled"] if isinstance(features, dict) else features


def class_places(model: keras.Model, images: Images) -> np.ndarray:
    """The number in the model of each of the data's classes.

    They are matched by name where both have names, and by number otherwise. Data may
    lack classes of the model.
    """
    names, count = names_and_count(images)
    known = getattr(getattr(model, "preprocessor", None), "class_names", None)
    needless = "; --metrics few_shot needs no head"
    if names is not None and known is not None:
        place = {name: index for index, name in enumerate(known)}
        unknown = [name for name in names if name not in place]
        if unknown:
            raise ValueError(
                f"Expected classes that the model knows; received: {unknown[:5]}, and "
                f"{len(unknown)} of {len(names)} in all, of {images.source!r}"
                f"{needless}"
            )
        return np.array([place[name] for name in names])
    if count != model.num_classes:
        raise ValueError(
            f"Expected data of the model's {model.num_classes} classes; received: "
            f"{count} classes of {images.source!r}{needless}"
        )
    return np.arange(count)


def check_of_subset(name: str, metrics: Sequence[str], images: Images) -> None:
    """Checks that a metric reads some of the classes."""
    if images.several or not set(metrics) & set(OF_HEADS):
        raise ValueError(
            f"Expected --metrics accuracy of images of one label with --class-subset "
            f"{name}; received: --metrics {' '.join(metrics)} of {images.source!r}"
        )


def names_and_count(images: Images) -> tuple[tuple[str, ...] | None, int]:
    """The names of the data's classes, or None, and their number."""
    names = images.class_names()
    return names, len(names or ()) or data.num_classes(images.source, images.data_dir)


def outputs_of(model: keras.Model, subset: evaluation.ClassSubset) -> list[int]:
    """The outputs of a model for the classes of a subset."""
    known = getattr(getattr(model, "preprocessor", None), "class_names", None) or ()
    place = {name: index for index, name in enumerate(known)}
    if place.keys() >= {*subset.wordnet_ids}:
        return [place[name] for name in subset.wordnet_ids]
    if model.num_classes != NUM_CLASSES:
        raise ValueError(
            f"Expected a model of ImageNet's {NUM_CLASSES:,} classes for "
            f"--class-subset {subset.name}; received: {model.num_classes} classes"
        )
    return subset.numbers.tolist()


def in_model(labels: np.ndarray, places: np.ndarray, model: keras.Model) -> np.ndarray:
    """Labels of the data as labels of the model."""
    if labels.ndim == 1:
        return places[labels]
    vectors = np.zeros((len(labels), model.num_classes), labels.dtype)
    vectors[:, places] = labels
    return vectors


def figures_of_scores(
    scores: np.ndarray, labels: np.ndarray, metrics: Sequence[str]
) -> dict:
    """The figures that follow from the outputs of a head."""
    figures = {}
    if "accuracy" in metrics:
        figures["accuracy"] = accuracy(scores, labels)
    if "average_precision" in metrics:
        is_one = labels.ndim == 1
        labels = labels[:, None] if is_one else labels
        if not is_one:
            figures["precision_at_1"] = evaluation.precision_at_1(labels, scores)
        by_class = evaluation.average_precision(labels, scores, sparse_labels=is_one)
        figures["mean_average_precision"] = mean_of_defined(by_class)
        figures["average_precision"] = by_class.tolist()
    return figures


def figures_table(values: dict) -> Table:
    """A row for each figure."""
    table = Table(
        title=f"{values['preset']} on {values['images']:,} images of "
        f"{values['data']} {values['split']}"
    )
    table.add_column("metric")
    table.add_column("value", justify="right")
    for row in pair_rows(values):
        table.add_row(*row)
    for name in ("accuracy", "precision_at_1", "mean_average_precision"):
        if name in values:
            table.add_row(name.replace("_", " "), f"{values[name]:.2%}")
    for name, row in values.get("few_shot", {}).items():
        label = f"{name.replace('_', '-')} accuracy"
        table.add_row(label, f"{row['mean']:.2%} ± {row['std']:.2%}")
    return table
