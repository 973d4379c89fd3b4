"""The figures of `keras-moe evaluate` for models of pairs.

Axes: N images, P embedding.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras

from keras_moe import data, evaluation
from keras_moe.checks import check_argument_names
from keras_moe.cli.prediction import predict
from keras_moe.data.selection import check_unreadable
from keras_moe.data.sources import open_source
from keras_moe.evaluation.image_text import names_in_subset
from keras_moe.evaluation.retrieval import KS

# Those of images with captions, and those of images with one label each.
OF_PAIRS, OF_CLASSES = ("retrieval", "contrastive_accuracy"), ("zero_shot", "few_shot")
METRICS = OF_PAIRS + OF_CLASSES
# Settings of a run, and options of `keras_moe.data.load_pairs`; the captions that it
# draws and the order that it takes are those of an evaluation.
OPTIONS = ("templates", "unreadable")
ALLOWED = (*OPTIONS, "exclude")


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
        excluded: images that are left out, by split.
        class_names: names of the classes for zero-shot accuracy, or None.
        prompt_templates: templates of prompts for zero-shot accuracy, or None.
        subset: the classes among which zero-shot accuracy chooses; None for all.
        places: the place in the subset of each of the data's classes, or None.
    """

    source: str
    test_split: str
    train_split: str
    data_dir: str | None
    options: dict[str, Any]
    metrics: tuple[str, ...]
    excluded: dict[str, Any]
    class_names: tuple[str, ...] | None = None
    prompt_templates: tuple | None = None
    subset: evaluation.ClassSubset | None = None
    places: Any = None

    def pairs(self, image_shape: tuple, batch_size: int, tokenizer: Any) -> Any:
        """The batches of the split whose figures are wanted, with all captions."""
        return data.load_pairs(
            self.source,
            self.test_split,
            image_shape,
            batch_size,
            tokenizer=tokenizer,
            shuffle=False,
            data_dir=self.data_dir,
            captions="all",
            exclude=self.excluded.get(self.test_split, ()),
            **self.options,
        )

    def classes(self, split: str, image_shape: tuple, batch_size: int) -> Any:
        """The batches of images of a split, with their classes."""
        return data.load(
            self.source,
            split,
            image_shape,
            batch_size,
            shuffle=False,
            data_dir=self.data_dir,
            exclude=self.excluded.get(split, ()),
            unreadable=self.options.get("unreadable", "raise"),
        )


def find_source(args: argparse.Namespace, recipe: dict) -> tuple[Any, dict]:
    """The source that is asked for or the run's, and the settings that belong to it."""
    if args.data is None and not recipe:
        raise ValueError(
            "Expected --data, or the folder of a run that says what it was trained "
            f"on; received: preset={args.preset!r}"
        )
    if args.data not in (None, recipe.get("source")):
        recipe = {}
    return args.data or recipe["source"], recipe


def find_pair_data(args: argparse.Namespace, recipe: dict) -> PairData:
    """The data and the metrics that are asked for, or those of the run."""
    source, recipe = find_source(args, recipe)
    # The test split of a run is that of its source of tests.
    source = args.data or recipe.get("test_source") or source
    if not isinstance(source, str):
        raise ValueError(
            f"Expected --data for a run on a mixture of sources; received: {source}"
        )
    split = args.split or recipe.get("test_split", "test")
    train_split = args.train_split or recipe.get("train_split", "train")
    asked_for = dict(args.data_options)
    check_argument_names(asked_for, list(ALLOWED), "--data-options")
    options = {x: recipe[x] for x in OPTIONS if recipe.get(x) is not None} | asked_for
    excluded = {}
    if recipe.get("exclude"):
        excluded[recipe.get("train_split", "train")] = recipe["exclude"]
    if "exclude" in options:
        excluded[split] = options.pop("exclude")
    data.PairOptions(**options)
    check_unreadable(options.get("unreadable", "raise"))
    unknown = [name for name in args.metrics or () if name not in METRICS]
    if unknown:
        raise ValueError(
            f"Expected metrics of a model of pairs, among {list(METRICS)}; received: "
            f"--metrics {unknown[0]}"
        )
    metrics = args.metrics or [
        name
        for name in _metrics_of(source, split, args.data_dir)
        if not (_lacks_names(source, args) and name in OF_CLASSES)
    ]
    pair_data = PairData(
        source, split, train_split, args.data_dir, options, tuple(metrics), excluded
    )
    _check_effect(pair_data, args, asked_for)
    if "zero_shot" in metrics:
        pair_data = pair_data._replace(
            **_classes_of(pair_data, args),
            prompt_templates=evaluation.read_templates(args.templates or "ours"),
        )
    return pair_data


def evaluate_pairs(
    model: keras.Model,
    pair_data: PairData,
    args: argparse.Namespace,
    shown: Callable[[Iterable, str], Iterable],
) -> dict:
    """The figures of a model of pairs by metric, JSON-serialisable."""
    metrics, figures = pair_data.metrics, {}
    if set(metrics) & set(OF_PAIRS):
        pairs = pair_data.pairs(
            model.backbone.image_shape, args.batch_size, model.preprocessor
        )
        with data.reading_errors():
            pairs = evaluation.encode_pairs(
                model, shown(pairs, pair_data.test_split), args.batch_size
            )
        figures |= {"images": len(pairs.images), "captions": len(pairs.texts)}
        # A set may be smaller than those of the papers.
        if "retrieval" in metrics:
            ks = [k for k in KS if k <= min(len(pairs.images), len(pairs.texts))]
            figures["retrieval"] = pairs.retrieval(ks).figures()
        if "contrastive_accuracy" in metrics:
            size = min(args.contrastive_batch, len(pairs.images))
            accuracy = pairs.contrastive_accuracy(size)
            figures["contrastive_accuracy"] = {
                **accuracy.figures(),
                "batch_size": size,
            }
    if set(metrics) & set(OF_CLASSES):
        of_classes = _of_classes(model, pair_data, args, shown)
        # With captions this is the number of their images.
        figures = {"images": of_classes.pop("images"), **figures, **of_classes}
    return figures


def few_shot_figures(test: tuple, pool: tuple, args: argparse.Namespace) -> dict:
    """Few-shot accuracies by number of shots."""
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
    if source.partition(":")[0] == "emoji":
        # Some of its classes have fewer pictures than a few shots.
        return (*OF_PAIRS, "zero_shot")
    if source.startswith("openclipart:"):
        return METRICS
    try:
        open_source(source, split, data_dir)
    except ValueError:
        return OF_PAIRS
    return OF_CLASSES


def _lacks_names(source, args):
    """Whether classes have English names where captions are in another language."""
    language = re.search("language=(?!en)", source)
    return source.startswith("emoji:") and language and not args.class_names


def _check_effect(pair_data, args, asked_for):
    """Raises ValueError for metrics that the data does not have, or unused options."""
    metrics, source = pair_data.metrics, pair_data.source
    of_classes = [name for name in metrics if name in OF_CLASSES]
    if of_classes and _lacks_names(source, args):
        raise ValueError(
            f"Expected no language or --class-names with --metrics {of_classes[0]}; "
            f"received: {source!r}"
        )
    unused = {
        "--templates": args.templates is not None and "zero_shot" not in metrics,
        "--class-names": bool(args.class_names) and "zero_shot" not in metrics,
        "--class-subset": bool(args.class_subset) and "zero_shot" not in metrics,
        "--data-options templates": "templates" in asked_for
        and not set(metrics) & set(OF_PAIRS),
    }
    for name, is_unused in unused.items():
        if is_unused:
            raise ValueError(
                f"Expected a metric that reads {name}; received: --metrics "
                f"{' '.join(metrics)}"
            )
    if (
        "retrieval" in metrics
        and _metrics_of(source, pair_data.test_split, pair_data.data_dir) == OF_CLASSES
    ):
        raise ValueError(
            "Expected images with captions of their own for --metrics retrieval; "
            f"received: {source!r}, whose captions are the names of classes"
        )
    splits = {"zero_shot": (), "few_shot": (pair_data.train_split,)}
    for name in of_classes:
        for split in (pair_data.test_split, *splits[name]):
            classes = open_source(source, split, pair_data.data_dir).classes
            if classes.max_labels is not None:
                raise ValueError(
                    f"Expected one label for each image for --metrics {name}; "
                    f"received: {source!r}, whose images have several"
                )


def _classes_of(pair_data, args):
    """The names of the data's classes, one for each, or those of a subset of them."""
    source, data_dir = pair_data.source, pair_data.data_dir
    if args.class_subset:
        subset = evaluation.read_class_subset(args.class_subset)
        own, count = data.class_names(source, data_dir), None
        if own is None:
            count = data.num_classes(source, data_dir)
        names = evaluation.read_class_names(args.class_names or "imagenet")
        return {
            "class_names": names_in_subset(names, subset),
            "subset": subset,
            "places": subset.places(own, count),
        }
    names = args.class_names or data.class_names(source, data_dir)
    if names is None:
        raise ValueError(
            "Expected --class-names for --metrics zero_shot; received: "
            f"{source!r}, whose classes have no names"
        )
    names = evaluation.read_class_names(names)
    if len(names) != (count := data.num_classes(source, data_dir)):
        raise ValueError(
            f"Expected names of the {count} classes of {source!r}; received: "
            f"{len(names)} names"
        )
    return {"class_names": names}


def _of_classes(model, pair_data, args, shown):
    zero_shot = "zero_shot" in pair_data.metrics
    if zero_shot:
        classes = evaluation.encode_classes(
            model, pair_data.class_names, pair_data.prompt_templates, args.batch_size
        )
    encoder = model.backbone.encoder("image")

    def features(split):
        batches = pair_data.classes(split, model.backbone.image_shape, args.batch_size)
        with data.reading_errors():
            return predict(encoder, shown(batches, split), args.batch_size)

    test = features(pair_data.test_split)
    figures = {"images": len(test[1])}
    if zero_shot:
        images, labels = test
        if pair_data.subset is not None:
            labels = pair_data.subset.labels(labels, pair_data.places)
        result = evaluation.zero_shot(images, labels, classes)
        figures["zero_shot"] = {
            **result.figures(),
            "images": len(test[1]),
            "classes": len(classes),
            "per_class": result.per_class.tolist(),
        }
    if "few_shot" in pair_data.metrics:
        pool = features(pair_data.train_split)
        figures["few_shot"] = few_shot_figures(test, pool, args)
    return figures
