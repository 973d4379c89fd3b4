"""Measure a preset: accuracy, average precision, few-shot, zero-shot and retrieval.

Images are resized as keras_moe.data.load does it. The folder of a run says which data
it was trained and tested on; other presets need --data. Classes are matched by name if
both the model and the data name them.
"""

import argparse
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras_moe
from keras_moe.cli.arguments import (
    Result,
    add_batch_size,
    add_data,
    add_data_options,
    add_overrides,
    add_preset,
    add_shots,
    at_least,
)
from keras_moe.cli.devices import add_devices, set_devices
from keras_moe.cli.inputs import Examples, Model, find_examples, find_model, with_bar

EXAMPLES = """\
keras-moe evaluate runs/mumoe_digits
keras-moe evaluate runs/mumoe_digits/preset --data folder:photos --json
keras-moe evaluate hf://timm/vit_base_patch16_224.augreg_in21k --data tfds:cifar10 \
--metrics few_shot --shots 5 10
keras-moe evaluate runs/celeb_a --metrics average_precision
keras-moe evaluate runs/limoe --data tfds:cifar10 --metrics zero_shot \
--templates imagenet"""
# Metrics of classifiers; the first two need a head.
OF_HEADS = ("accuracy", "average_precision")
OF_CLASSIFIERS = (*OF_HEADS, "few_shot")
# Metrics of image-text models, on images with captions and on images with classes.
OF_CAPTIONS = ("retrieval", "contrastive_accuracy")
OF_CLASSES = ("zero_shot", "few_shot")
OF_PAIRS = OF_CAPTIONS + OF_CLASSES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset(parser, help="The folder of a run of keras-moe train, or any preset.")
    add_data(parser, " The default is the data of the run.")
    parser.add_argument(
        "--split", help="The split to evaluate on; the run's test split, or test."
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        choices=(*OF_CLASSIFIERS, *OF_CAPTIONS, "zero_shot"),
        help="The metrics; by default all that the data and the model allow. few_shot "
        "needs no head, and average_precision is for images with several labels. "
        "Image-text models have retrieval and contrastive_accuracy on images with "
        "captions, zero_shot and few_shot on images with classes.",
    )
    parser.add_argument(
        "--hierarchy",
        metavar="FILE.json",
        help="The hierarchy of the labels, as in keras_moe.data.load.",
    )
    parser.add_argument(
        "--class-subset",
        choices=("imagenet_a", "imagenet_r"),
        help="The 200 of ImageNet's 1,000 classes among which the model chooses, as "
        "accuracies on ImageNet-A and ImageNet-R are measured.",
    )
    add_batch_size(parser)
    add_overrides(parser)
    add_pair_arguments(parser)
    shots = parser.add_argument_group("few-shot accuracy")
    add_shots(shots, [10])
    shots.add_argument(
        "--train-split",
        help="The split from which shots are drawn; the run's train split, or train.",
    )
    shots.add_argument(
        "--seeds",
        type=at_least(0),
        nargs="+",
        default=[0, 1, 2],
        metavar="SEED",
        help="The seeds, one draw of the shots for each.",
    )
    add_devices(parser)


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of image-text models."""
    pairs = parser.add_argument_group("image-text models")
    pairs.add_argument(
        "--templates",
        help="The prompts of zero-shot accuracy: ours (the default), name, imagenet, "
        "simple, a file, or one text with {}.",
    )
    pairs.add_argument(
        "--class-names",
        metavar="FILE",
        help="The names of the classes in the order of the labels, or imagenet; by "
        "default those of the data.",
    )
    pairs.add_argument(
        "--contrastive-batch",
        type=at_least(1),
        default=1024,
        help="The number of images that contrastive_accuracy compares with each other, "
        "or all if the data has fewer.",
    )
    add_data_options(pairs)


def run(args: argparse.Namespace, console: Any) -> Result:
    import keras

    chosen = find_model(args)
    if not chosen.embeds_pairs:
        refuse_options_of_pairs(args)
    examples = find_examples(args, chosen.recipe)
    # What does not fit is refused before the model is loaded.
    if chosen.embeds_pairs:
        metrics = pair_metrics(examples, args)
        prompts = zero_shot_prompts(examples, args) if "zero_shot" in metrics else None
    warn_of_random_weights(chosen)
    before = keras.distribution.distribution()
    try:
        set_devices(args, chosen.preset, args.batch_size, chosen.overrides)
        model, shown = chosen.load(), with_bar(console)
        if chosen.embeds_pairs:
            figures = evaluate_pairs(model, examples, metrics, prompts, args, shown)
        else:
            figures = evaluate_classifier(model, examples, args, shown)
    finally:
        keras.distribution.set_distribution(before)
    values = {
        "preset": args.preset,
        "data": examples.source,
        "split": examples.split,
        "backend": keras.backend.backend(),
        **figures,
    }
    return Result(values, (figures_table(values),))


def refuse_options_of_pairs(args: argparse.Namespace) -> None:
    """Raises ValueError for options that classifiers have no use for."""
    for name in ("templates", "class_names", "data_options"):
        if getattr(args, name):
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"Expected a preset of pairs for {option}; received: {args.preset}"
            )


def warn_of_random_weights(chosen: Model) -> None:
    """Warns of built-in presets without trained weights."""
    from keras_moe.models.registry import has_weights

    if chosen.preset in keras_moe.models.list_presets() and not (
        has_weights(chosen.preset) and chosen.overrides.get("load_weights", True)
    ):
        warnings.warn(
            f"{chosen.preset} is evaluated without trained weights: these are figures "
            "of random ones",
            stacklevel=1,
        )


def evaluate_classifier(
    model: Any, examples: Examples, args: argparse.Namespace, shown: Callable
) -> dict:
    """The figures of a classifier by metric, as JSON."""
    import keras

    metrics = classifier_metrics(args.metrics, model, examples)
    has_scores = bool({*metrics} & {*OF_HEADS})
    outputs, subset = {}, None
    if args.class_subset:
        if examples.has_several_labels() or not has_scores:
            raise ValueError(
                "Expected --metrics accuracy of images of one label with "
                f"--class-subset {args.class_subset}; received: --metrics "
                f"{' '.join(metrics)} of {examples.source!r}"
            )
        subset = keras_moe.evaluation.read_class_subset(args.class_subset)
    if has_scores:
        # Before the images are read: the classes may not fit.
        if subset is None:
            indices = model_classes(model, examples)
        else:
            indices = subset.indices(examples.class_names(), examples.num_classes())
            columns = subset_outputs(model, subset)
        outputs["logits"] = model.output
    if "few_shot" in metrics:
        outputs["features"] = pooled_features(model)
    shape = getattr(model, "backbone", model).image_shape

    def predict_split(inference, split):
        batches = examples.images(split, shape, args.batch_size)
        return predict(inference, shown(batches, split), args.batch_size)

    outcome, labels = predict_split(keras.Model(model.input, outputs), examples.split)
    figures = {"images": len(labels)}
    if has_scores:
        scores = outcome["logits"].astype("float32")
        if subset is None:
            own = as_model_labels(labels, indices, model.num_classes)
        else:
            scores, own = scores[:, columns], subset.labels(labels, indices)
        figures["classes"] = scores.shape[1]
        figures |= score_figures(scores, own, metrics)
    if "few_shot" in metrics:
        features = keras.Model(model.input, {"features": outputs["features"]})
        pool, pool_labels = predict_split(features, examples.train_split)
        pool = pool["features"], pool_labels
        figures["few_shot"] = few_shot_figures(
            pool, (outcome["features"], labels), args
        )
    return figures


def classifier_metrics(
    metrics: Sequence[str] | None, model: Any, examples: Examples
) -> tuple[str, ...]:
    """The metrics that are asked for, or all that the labels and the model allow."""
    has_head = hasattr(model, "num_classes")
    several = examples.has_several_labels()
    possible = []
    if has_head:
        possible.append("average_precision" if several else "accuracy")
    if not several:
        possible.append("few_shot")
    if metrics is None and possible:
        return tuple(possible)
    for name in metrics or ("few_shot",):
        if name not in OF_CLASSIFIERS:
            raise ValueError(
                f"Expected a preset of pairs for --metrics {name}; received: a "
                f"{type(model).__name__}"
            )
        if name in OF_HEADS and not has_head:
            raise ValueError(
                f"Expected a preset with a head for --metrics {name}, or --metrics "
                f"few_shot; received: a {type(model).__name__}"
            )
        if name != "average_precision" and several:
            raise ValueError(
                f"Expected one label for each image for --metrics {name}; received: "
                f"{examples.source!r}, whose images have several"
            )
    return tuple(metrics)


def pooled_features(model: Any) -> Any:
    """The symbolic features (N, D) that a head reads, or would read."""
    features = model.features
    return features["pooled"] if isinstance(features, dict) else features


def model_classes(model: Any, examples: Examples) -> Any:
    """The index in the model of each of the data's classes.

    They are matched by name if both have names, and by index otherwise. The data may
    lack classes of the model.
    """
    import numpy as np

    names, count = examples.class_names(), examples.num_classes()
    known = known_classes(model)
    hint = "; --metrics few_shot needs no head"
    if names is not None and known is not None:
        index_of = {name: index for index, name in enumerate(known)}
        unknown = [name for name in names if name not in index_of]
        if unknown:
            raise ValueError(
                f"Expected classes that the model knows; received: {unknown[:5]}, and "
                f"{len(unknown)} of {len(names)} in all, of {examples.source!r}{hint}"
            )
        return np.array([index_of[name] for name in names])
    if count != model.num_classes:
        raise ValueError(
            f"Expected data of the model's {model.num_classes} classes; received: "
            f"{count} classes of {examples.source!r}{hint}"
        )
    return np.arange(count)


def known_classes(model: Any) -> Sequence[str] | None:
    """The names of a model's classes, or None."""
    return getattr(getattr(model, "preprocessor", None), "class_names", None)


def subset_outputs(model: Any, subset: Any) -> list[int]:
    """The outputs of a model for the classes of a subset."""
    index_of = {name: index for index, name in enumerate(known_classes(model) or ())}
    if index_of.keys() >= {*subset.wordnet_ids}:
        return [index_of[name] for name in subset.wordnet_ids]
    if model.num_classes != 1000:
        raise ValueError(
            "Expected a model of ImageNet's 1,000 classes for --class-subset "
            f"{subset.name}; received: {model.num_classes} classes"
        )
    return subset.numbers.tolist()


def as_model_labels(labels: Any, indices: Any, num_classes: int) -> Any:
    """Labels of the data, integers (N,) or 0-1 vectors, as labels of the model."""
    import numpy as np

    if labels.ndim == 1:
        return indices[labels]
    vectors = np.zeros((len(labels), num_classes), labels.dtype)
    vectors[:, indices] = labels
    return vectors


def score_figures(scores: Any, labels: Any, metrics: Sequence[str]) -> dict:
    """The figures that follow from the outputs of a head."""
    from keras_moe.evaluation.average_precision import mean_of_defined

    figures = {}
    if "accuracy" in metrics:
        figures["accuracy"] = accuracy(scores, labels)
    if "average_precision" in metrics:
        is_one = labels.ndim == 1
        labels = labels[:, None] if is_one else labels
        if not is_one:
            precision = keras_moe.evaluation.precision_at_1(labels, scores)
            figures["precision_at_1"] = precision
        by_class = keras_moe.evaluation.average_precision(
            labels, scores, sparse_labels=is_one
        )
        figures["mean_average_precision"] = mean_of_defined(by_class)
        figures["average_precision"] = by_class.tolist()
    return figures


class Prompts(NamedTuple):
    """What zero-shot accuracy compares images with."""

    class_names: tuple[str, ...]
    templates: Any
    # The classes of ImageNet among which the model chooses, and the index among them
    # of each of the data's classes.
    subset: Any = None
    indices: Any = None


def pair_metrics(examples: Examples, args: argparse.Namespace) -> tuple[str, ...]:
    """The metrics of an image-text model that are asked for, or all possible ones."""
    source = examples.source
    unknown = [name for name in args.metrics or () if name not in OF_PAIRS]
    if unknown:
        raise ValueError(
            f"Expected metrics of a model of pairs, among {list(OF_PAIRS)}; received: "
            f"--metrics {unknown[0]}"
        )
    # The classes of emoji have English names.
    foreign = source.startswith("emoji:") and re.search("language=(?!en)", source)
    lacks_names = foreign and not args.class_names
    metrics = args.metrics
    if metrics is None:
        metrics = possible_pair_metrics(examples)
        if lacks_names:
            metrics = [name for name in metrics if name not in OF_CLASSES]
    of_classes = [name for name in metrics if name in OF_CLASSES]
    if of_classes and lacks_names:
        raise ValueError(
            f"Expected no language or --class-names with --metrics {of_classes[0]}; "
            f"received: {source!r}"
        )
    captions = dict(args.data_options).get("templates")
    for name, value, readers in (
        ("--templates", args.templates, {"zero_shot"}),
        ("--class-names", args.class_names, {"zero_shot"}),
        ("--class-subset", args.class_subset, {"zero_shot"}),
        ("--data-options templates", captions, {*OF_CAPTIONS}),
    ):
        if value and not readers & {*metrics}:
            raise ValueError(
                f"Expected a metric that reads {name}; received: --metrics "
                f"{' '.join(metrics)}"
            )
    if "retrieval" in metrics and possible_pair_metrics(examples) == OF_CLASSES:
        raise ValueError(
            "Expected images with captions of their own for --metrics retrieval; "
            f"received: {source!r}, whose captions are the names of classes"
        )
    for name in of_classes:
        splits = [examples.split]
        if name == "few_shot":
            splits.append(examples.train_split)
        if any(examples.has_several_labels(split) for split in splits):
            raise ValueError(
                f"Expected one label for each image for --metrics {name}; received: "
                f"{source!r}, whose images have several"
            )
    return tuple(metrics)


def possible_pair_metrics(examples: Examples) -> tuple[str, ...]:
    """The metrics of image-text models that the data allows."""
    kind = examples.source.partition(":")[0]
    if kind == "emoji":
        # Some of its classes have fewer pictures than a few shots.
        return (*OF_CAPTIONS, "zero_shot")
    if kind == "openclipart":
        return OF_PAIRS
    try:
        examples.has_several_labels()
    except ValueError:
        return OF_CAPTIONS
    return OF_CLASSES


def zero_shot_prompts(examples: Examples, args: argparse.Namespace) -> Prompts:
    """The names of the data's classes, or of a subset of ImageNet's, and templates."""
    from keras_moe.evaluation.image_text import names_in_subset

    evaluation = keras_moe.evaluation
    templates = evaluation.read_templates(args.templates or "ours")
    own = examples.class_names()
    if args.class_subset:
        subset = evaluation.read_class_subset(args.class_subset)
        indices = subset.indices(own, examples.num_classes())
        names = evaluation.read_class_names(args.class_names or "imagenet")
        return Prompts(names_in_subset(names, subset), templates, subset, indices)
    if not args.class_names and own is None:
        raise ValueError(
            "Expected --class-names for --metrics zero_shot; received: "
            f"{examples.source!r}, whose classes have no names"
        )
    names = evaluation.read_class_names(args.class_names or own)
    if len(names) != (count := examples.num_classes()):
        raise ValueError(
            f"Expected names of the {count} classes of {examples.source!r}; received: "
            f"{len(names)} names"
        )
    return Prompts(names, templates)


def evaluate_pairs(
    model: Any,
    examples: Examples,
    metrics: Sequence[str],
    prompts: Prompts | None,
    args: argparse.Namespace,
    shown: Callable,
) -> dict:
    """The figures of an image-text model by metric, as JSON."""
    figures = {}
    if {*metrics} & {*OF_CAPTIONS}:
        figures = caption_figures(model, examples, metrics, args, shown)
    if {*metrics} & {*OF_CLASSES}:
        of_classes = class_figures(model, examples, metrics, prompts, args, shown)
        # With captions this is the number of their images.
        figures = {"images": of_classes.pop("images"), **figures, **of_classes}
    return figures


def caption_figures(
    model: Any,
    examples: Examples,
    metrics: Sequence[str],
    args: argparse.Namespace,
    shown: Callable,
) -> dict:
    """Retrieval and contrastive accuracy of images with captions."""
    from keras_moe.evaluation.retrieval import KS

    batches = examples.pairs(
        model.backbone.image_shape,
        args.batch_size,
        tokenizer=model.preprocessor,
        captions="all",
    )
    with keras_moe.data.reading_errors():
        pairs = keras_moe.evaluation.encode_pairs(
            model, shown(batches, examples.split), args.batch_size
        )
    figures = {"images": len(pairs.images), "captions": len(pairs.texts)}
    if "retrieval" in metrics:
        # A set may be smaller than those of the papers.
        ks = [k for k in KS if k <= min(len(pairs.images), len(pairs.texts))]
        figures["retrieval"] = pairs.retrieval(ks).figures()
    if "contrastive_accuracy" in metrics:
        size = min(args.contrastive_batch, len(pairs.images))
        own = pairs.contrastive_accuracy(size).figures()
        figures["contrastive_accuracy"] = {**own, "batch_size": size}
    return figures


def class_figures(
    model: Any,
    examples: Examples,
    metrics: Sequence[str],
    prompts: Prompts | None,
    args: argparse.Namespace,
    shown: Callable,
) -> dict:
    """Zero-shot and few-shot accuracy of images with classes."""
    evaluation = keras_moe.evaluation
    if prompts is not None:
        classes = evaluation.encode_classes(
            model, prompts.class_names, prompts.templates, args.batch_size
        )
    encoder = model.backbone.encoder("image")

    def features(split):
        shape = model.backbone.image_shape
        batches = examples.images(split, shape, args.batch_size)
        with keras_moe.data.reading_errors():
            return predict(encoder, shown(batches, split), args.batch_size)

    test = features(examples.split)
    figures = {"images": len(test[1])}
    if prompts is not None:
        images, labels = test
        if prompts.subset is not None:
            labels = prompts.subset.labels(labels, prompts.indices)
        result = evaluation.zero_shot(images, labels, classes)
        figures["zero_shot"] = {
            **result.figures(),
            "images": len(images),
            "classes": len(classes),
            "per_class": result.per_class.tolist(),
        }
    if "few_shot" in metrics:
        pool = features(examples.train_split)
        figures["few_shot"] = few_shot_figures(pool, test, args)
    return figures


def few_shot_figures(pool: tuple, test: tuple, args: argparse.Namespace) -> dict:
    """Few-shot accuracies by number of shots."""
    result = keras_moe.evaluation.few_shot(
        *pool, *test, shots=args.shots, seeds=args.seeds
    )
    rows = zip(result.shots, result.mean, result.std, result.best_l2)
    return {
        f"{k}_shot": {"mean": float(mean), "std": float(std), "l2": float(l2)}
        for k, mean, std, l2 in rows
    }


def predict(model: Any, batches: Iterable, batch_size: int) -> tuple[Any, Any]:
    """A model's outputs for all images of a split, and their labels.

    The last batch is filled up with its last image, so that nothing is compiled for it
    and devices can share it.
    """
    import keras
    import numpy as np

    outputs, labels = [], []
    for images, batch_labels in batches:
        images, count = np.asarray(images), len(images)
        padding = np.repeat(images[-1:], batch_size - count, axis=0)
        output = model.predict_on_batch(np.concatenate([images, padding]))
        outputs.append(keras.tree.map_structure(lambda x, n=count: x[:n], output))
        labels.append(np.asarray(batch_labels))
    whole = keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)
    return whole, np.concatenate(labels)


def accuracy(logits: Any, labels: Any) -> float:
    """The share of images whose largest logit is that of their class."""
    return float((logits.argmax(axis=-1) == labels).mean())


def figures_table(values: dict) -> Any:
    """A table with a row for each figure."""
    from rich.table import Table

    table = Table(
        title=f"{values['preset']} on {values['images']:,} images of "
        f"{values['data']} {values['split']}"
    )
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in values.get("retrieval", {}).items():
        table.add_row(name.replace("_r", " R@").replace("_", " "), f"{value:.2%}")
    if own := values.get("contrastive_accuracy"):
        name = f"contrastive accuracy in {own['batch_size']:,}"
        table.add_row(name, f"{own['accuracy']:.2%}")
    for name, value in values.get("zero_shot", {}).items():
        if isinstance(value, float):
            table.add_row(f"zero-shot {name.replace('_', ' ')}", f"{value:.2%}")
    for name in ("accuracy", "precision_at_1", "mean_average_precision"):
        if name in values:
            table.add_row(name.replace("_", " "), f"{values[name]:.2%}")
    for name, row in values.get("few_shot", {}).items():
        label = f"{name.replace('_', '-')} accuracy"
        table.add_row(label, f"{row['mean']:.2%} ± {row['std']:.2%}")
    return table
