"""The figures of `keras-moe evaluate` for models of pairs.

Axes: N images, P embedding.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras

from keras_moe import data, evaluation
from keras_moe.cli.prediction import predict
from keras_moe.data.sources import open_source
from keras_moe.evaluation.retrieval import KS

# Those of images with captions, and those of images with one label each.
OF_PAIRS, OF_CLASSES = ("retrieval", "contrastive_accuracy"), ("zero_shot", "few_shot")
METRICS = OF_PAIRS + OF_CLASSES
# Settings of a run that `keras_moe.data.load_pairs` takes, too.
OPTIONS = ("style", "language", "size", "templates")


class PairData(NamedTuple):
    """The data to evaluate a model of pairs on.

    Attributes:
        source: source, as `keras_moe.data.load_pairs` or `keras_moe.data.load` takes
            it.
        test_split: split whose figures are wanted.
        train_split: split from which shots are drawn.
        data_dir: folder of TensorFlow Datasets, or None.
        options: options of `keras_moe.data.load_pairs`.
        metrics: names of `METRICS`.
    """

    source: str
    test_split: str
    train_split: str
    data_dir: str | None
    options: dict[str, Any]
    metrics: tuple[str, ...]

    @property
    def class_source(self) -> str:
        """The source of the same images with classes."""
        style = self.options.get("style", "openmoji")
        if self.source == "emoji" and style != "openmoji":
            return f"emoji:{style}"
        return self.source


def find_pair_data(args: argparse.Namespace, recipe: dict) -> PairData:
    """The data and the metrics that are asked for, or those of the run.

    Args:
        args: arguments of `commands.evaluate`.
        recipe: settings of the run, see `keras_moe.cli.evaluate.find_run`.

    Raises:
        ValueError: if no data is named, or a metric is not one of models of pairs.
    """
    if args.data not in (None, recipe.get("source")):
        recipe = {}
    source = args.data or recipe.get("source")
    if source is None:
        raise ValueError(
            "Expected --data, or the folder of a run that says what it was trained "
            f"on; received: preset={args.preset!r}"
        )
    if not isinstance(source, str):
        raise ValueError(
            f"Expected --data for a run on a mixture of sources; received: {source}"
        )
    split = args.split or recipe.get("test_split", "test")
    options = {x: recipe[x] for x in OPTIONS if recipe.get(x) is not None}
    options |= dict(args.data_options)
    if source.startswith("emoji:"):
        source, options["style"] = source.split(":")
    unknown = [name for name in args.metrics or () if name not in METRICS]
    if unknown:
        raise ValueError(
            f"Expected metrics of a model of pairs, among {list(METRICS)}; received: "
            f"--metrics {unknown[0]}"
        )
    metrics = tuple(args.metrics or _metrics_of(source, split, args.data_dir))
    train_split = args.train_split or recipe.get("train_split", "train")
    return PairData(source, split, train_split, args.data_dir, options, metrics)


def evaluate_pairs(
    model: keras.Model,
    pair_data: PairData,
    args: argparse.Namespace,
    shown: Callable[[Iterable, str], Iterable],
) -> dict:
    """The figures of a model of pairs by metric, JSON-serialisable.

    Args:
        model: model of pairs.
        pair_data: data and metrics.
        args: arguments of `commands.evaluate`.
        shown: function of batches and the name of their split to the same batches,
            with a bar of their progress.
    """
    metrics, figures = pair_data.metrics, {}
    if set(metrics) & set(OF_PAIRS):
        pairs = data.load_pairs(
            pair_data.source,
            pair_data.test_split,
            model.backbone.image_shape,
            args.batch_size,
            tokenizer=model.preprocessor,
            shuffle=False,
            data_dir=pair_data.data_dir,
            captions="all",
            **pair_data.options,
        )
        pairs = evaluation.encode_pairs(
            model, shown(pairs, pair_data.test_split), args.batch_size
        )
        figures |= {"images": len(pairs.images), "captions": len(pairs.texts)}
        # A set may be smaller than those of the papers.
        if "retrieval" in metrics:
            ks = [k for k in KS if k <= min(len(pairs.images), len(pairs.texts))]
            figures["retrieval"] = pairs.retrieval(ks).figures()
        if "contrastive_accuracy" in metrics:
            size = min(args.contrastive_batch, len(pairs.texts))
            accuracy = pairs.contrastive_accuracy(size)
            figures["contrastive_accuracy"] = {
                **accuracy.figures(),
                "batch_size": size,
            }
    if set(metrics) & set(OF_CLASSES):
        figures |= _of_classes(model, pair_data, args, shown)
    return figures


def few_shot_figures(test: tuple, pool: tuple, args: argparse.Namespace) -> dict:
    """Few-shot accuracies by number of shots.

    Args:
        test: features and labels.
        pool: features and labels from which shots are drawn.
        args: arguments of `commands.evaluate`.
    """
    result = evaluation.few_shot(*pool, *test, shots=args.shots, seeds=args.seeds)
    return {
        f"{k}_shot": {"mean": float(mean), "std": float(std), "l2": float(l2)}
        for k, mean, std, l2 in zip(
            result.shots, result.mean, result.std, result.best_l2
        )
    }


def pair_rows(values: dict) -> list[tuple[str, str]]:
    """The rows of a table of figures: their names and values."""
    rows = []
    for name, value in values.get("retrieval", {}).items():
        rows.append((name.replace("_r", " R@").replace("_", " "), f"{value:.2%}"))
    if accuracy := values.get("contrastive_accuracy"):
        name = f"contrastive accuracy in {accuracy['batch_size']:,}"
        rows.append((name, f"{accuracy['accuracy']:.2%}"))
    for name, value in values.get("zero_shot", {}).items():
        if isinstance(value, float):
            rows.append((f"zero-shot {name.replace('_', ' ')}", f"{value:.2%}"))
    return rows


def _metrics_of(source: str, split: str, data_dir: str | None) -> Sequence[str]:
    """The metrics that the data allows."""
    if source == "emoji":
        # Some of its classes have fewer pictures than a few shots.
        return (*OF_PAIRS, "zero_shot")
    try:
        open_source(source, split, data_dir)
    except ValueError:
        return OF_PAIRS
    return OF_CLASSES


def _of_classes(model, pair_data, args, shown):
    source, data_dir = pair_data.class_source, pair_data.data_dir
    if "zero_shot" in pair_data.metrics:
        names = args.class_names or data.class_names(source, data_dir)
        if names is None:
            raise ValueError(
                "Expected --class-names for --metrics zero_shot; received: "
                f"{source!r}, whose classes have no names"
            )
        classes = evaluation.encode_classes(
            model, names, args.templates, args.batch_size
        )
    encoder = model.backbone.encoder("image")

    def features(split):
        batches = data.load(
            source,
            split,
            model.backbone.image_shape,
            args.batch_size,
            shuffle=False,
            data_dir=data_dir,
        )
        return predict(encoder, shown(batches, split), args.batch_size)

    test, figures = features(pair_data.test_split), {}
    figures["images"] = len(test[1])
    if "zero_shot" in pair_data.metrics:
        result = evaluation.zero_shot(*test, classes)
        figures["zero_shot"] = {
            **result.figures(),
            "classes": len(classes),
            "per_class": result.per_class.tolist(),
        }
    if "few_shot" in pair_data.metrics:
        pool = features(pair_data.train_split)
        figures["few_shot"] = few_shot_figures(test, pool, args)
    return figures
