"""Measure a preset: accuracy, average precision, few-shot, zero-shot and retrieval.

Language models have the perplexity of texts, which are packed into rows as in training.
Images are resized as keras_moe.data.load does it. The folder of a run says which data
it was trained and tested on; other presets need --data. Classes are matched by name if
both the model and the data name them.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras_moe
from keras_moe._errors import unfit
from keras_moe.cli import _arguments
from keras_moe.cli._devices import add_devices, set_devices
from keras_moe.cli._inputs import Examples, find_examples, find_model, with_bar

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from keras_moe.evaluation.zero_shot import ClassSubset
    from keras_moe.models import CausalLM, ContrastiveModel, ImageClassifier

EXAMPLES = """\
keras-moe evaluate runs/mumoe_digits
keras-moe evaluate runs/mumoe_digits/preset --data folder:photos --json
keras-moe evaluate hf://timm/vit_base_patch16_224.augreg_in21k --data tfds:cifar10 \
--metrics few_shot --shots 5 10
keras-moe evaluate moepp_lm_python --data text:BOOKS
keras-moe evaluate runs/celeb_a --metrics average_precision
keras-moe evaluate runs/limoe --data tfds:cifar10 --metrics zero_shot \
--templates imagenet"""
# Metrics of outputs; of images with captions; of images with classes.
OF_HEADS = ("accuracy", "average_precision")
OF_CAPTIONS = ("retrieval", "contrastive_accuracy")
OF_CLASSES = ("zero_shot", "few_shot")
OF_TEXTS = ("perplexity",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments.add_preset(
        parser, help="The folder of a run of keras-moe train, or any preset."
    )
    _arguments.add_data(parser, " The default is the data of the run.")
    parser.add_argument(
        "--split", help="The split to evaluate on; the run's test split, or test."
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        choices=OF_HEADS + OF_CAPTIONS + OF_CLASSES + OF_TEXTS,
        help="The metrics; by default all that the data and the model allow. few_shot "
        "needs no head, and average_precision is for images with several labels. "
        "Image-text models have retrieval and contrastive_accuracy on images with "
        "captions, zero_shot and few_shot on images with classes.",
    )
    parser.add_argument(
        "--class-subset",
        choices=("imagenet_a", "imagenet_r"),
        help="The 200 of ImageNet's 1,000 classes among which the model chooses, as "
        "accuracies on ImageNet-A and ImageNet-R are measured.",
    )
    _arguments.add_batch_size(parser)
    _arguments.add_overrides(parser)
    add_pair_arguments(parser)
    shots = parser.add_argument_group("few-shot accuracy")
    _arguments.add_shots(shots, [10])
    shots.add_argument(
        "--train-split",
        help="The split from which shots are drawn; the run's train split, or train.",
    )
    seeds = "The seeds, one draw of the shots for each."
    _arguments.add_count(shots, "--seeds", seeds, [0, 1, 2], 0, nargs="+")
    add_devices(parser)


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
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
    batch = (
        "The number of images that contrastive_accuracy compares with each other, or "
        "all if the data has fewer."
    )
    _arguments.add_count(pairs, "--contrastive-batch", batch, 1024)
    _arguments.add_data_options(pairs)


def run(args: argparse.Namespace, console: "Console") -> _arguments.Result:
    import keras

    chosen = find_model(args)
    examples = find_examples(args, chosen.recipe)
    # What does not fit is refused before the model is loaded.
    if chosen.embeds_pairs:
        metrics = pair_metrics(examples, args)
        prompts = zero_shot_prompts(examples, args) if "zero_shot" in metrics else None
    set_devices(args, chosen.preset, args.batch_size, chosen.overrides)
    model, shown = chosen.load(), with_bar(console)
    if chosen.embeds_pairs:
        figures = evaluate_pairs(model, examples, metrics, prompts, args, shown)
    elif chosen.writes_texts:
        figures = evaluate_texts(model, examples, args)
    else:
        figures = evaluate_classifier(model, examples, args, shown)
    values = {
        "preset": args.preset,
        "data": examples.source,
        "split": examples.split,
        "backend": keras.backend.backend(),
        **figures,
    }
    return _arguments.Result(values, (figures_table(values),))


def chosen_metrics(
    args: argparse.Namespace, possible: Sequence[str], default: Sequence[str]
) -> tuple[str, ...]:
    metrics = tuple(args.metrics or default)
    captions = dict(args.data_options).get("templates")
    readers = {
        "--templates": (args.templates, ("zero_shot",)),
        "--class-names": (args.class_names, ("zero_shot",)),
        "--class-subset": (args.class_subset, ("zero_shot", *OF_HEADS)),
        "--data-options templates": (captions, OF_CAPTIONS),
    }
    unread = [name for name, (x, of) in readers.items() if x and not {*of} & {*metrics}]
    if unread or not metrics or not {*metrics} <= {*possible}:
        raise ValueError(
            f"Expected --metrics among {' '.join(possible) or 'none'}, as the model "
            "and the data allow, and one that reads each option; received: --metrics "
            f"{' '.join((*metrics, *unread))}"
        )
    return metrics


# Language models


def evaluate_texts(
    model: "CausalLM", examples: Examples, args: argparse.Namespace
) -> dict:
    chosen_metrics(args, OF_TEXTS, OF_TEXTS)
    rows = model.training_inputs(examples.texts())
    model.compile()
    values = model.evaluate(
        rows, batch_size=args.batch_size, verbose=0, return_dict=True
    )
    tokens = int((rows["targets"] >= 0).sum())
    return {"tokens": tokens, "perplexity": float(values["perplexity"])}


# Classifiers


def evaluate_classifier(
    model: "ImageClassifier",
    examples: Examples,
    args: argparse.Namespace,
    shown: Callable,
) -> dict:
    import keras

    metrics = classifier_metrics(args, model, examples)
    has_scores = bool({*metrics} & {*OF_HEADS})
    outputs: dict[str, Any] = {}
    if "few_shot" in metrics:
        # The symbolic features (N, D) that a head reads, or would read.
        features = model.features
        is_backbone = isinstance(features, dict)
        outputs["features"] = features["pooled"] if is_backbone else features
    if has_scores:
        outputs["logits"] = model.output
        # Before the images are read: the classes may not fit.
        if args.class_subset:
            subset = keras_moe.evaluation.read_class_subset(args.class_subset)
            indices = subset.indices(examples.class_names(), examples.num_classes())
            columns = subset_outputs(model, subset)
        else:
            indices = model_classes(model, examples)
    backbone: Any = getattr(model, "backbone", model)

    def predict_split(names, split):
        inference = keras.Model(model.input, {name: outputs[name] for name in names})
        batches = examples.images(split, backbone.image_shape, args.batch_size)
        return keras_moe.evaluation.extract_features(
            inference, shown(batches, split), verbose=0
        )

    outcome, labels = predict_split(outputs, examples.split)
    figures: dict[str, object] = {"images": len(labels)}
    if has_scores:
        scores = outcome["logits"].astype("float32")
        if args.class_subset:
            scores, own = scores[:, columns], subset.labels(labels, indices)
        else:
            own = as_model_labels(labels, indices, model.num_classes)
        figures["classes"] = scores.shape[1]
        figures |= score_figures(scores, own, metrics)
    if "few_shot" in metrics:
        pool, pool_labels = predict_split(["features"], examples.train_split)
        pool, test = (pool["features"], pool_labels), (outcome["features"], labels)
        figures["few_shot"] = few_shot_figures(pool, test, args)
    return figures


def classifier_metrics(
    args: argparse.Namespace, model: "ImageClassifier", examples: Examples
) -> tuple[str, ...]:
    """The metrics that are asked for, or all that the labels and the model allow."""
    has_head = hasattr(model, "num_classes")
    if examples.has_several_labels():
        possible = default = ("average_precision",) if has_head else ()
    else:
        possible = (*OF_HEADS, "few_shot") if has_head else ("few_shot",)
        default = [name for name in possible if name != "average_precision"]
    return chosen_metrics(args, possible, default)


def model_classes(model: "ImageClassifier", examples: Examples) -> "np.ndarray":
    """Each data class's index in the model: by name if both have names."""
    import numpy as np

    names: Any = examples.class_names()
    count, index_of = examples.num_classes(), dict[Any, int](known_classes(model))
    if names is None or not index_of:
        names, index_of = range(count), {c: c for c in range(model.num_classes)}
        fits = count == model.num_classes
    else:
        fits = {*names} <= {*index_of}
    if not fits:
        unknown = [name for name in names if name not in index_of]
        raise ValueError(
            f"Expected data of the model's {model.num_classes} classes; received: "
            f"{count} classes of {examples.source!r} (unknown: {unknown[:5]}); "
            "--metrics few_shot needs no head"
        )
    return np.array([index_of[name] for name in names])


def known_classes(model: "ImageClassifier") -> dict[str, int]:
    preprocessor = getattr(model, "preprocessor", None)
    names = getattr(preprocessor, "class_names", None) or ()
    return {name: index for index, name in enumerate(names)}


def subset_outputs(model: "ImageClassifier", subset: "ClassSubset") -> list[int]:
    index_of = known_classes(model)
    if index_of.keys() >= {*subset.wordnet_ids}:
        return [index_of[name] for name in subset.wordnet_ids]
    if model.num_classes != 1000:
        expected = f"ImageNet's 1,000 classes for --class-subset {subset.name}"
        raise unfit(expected, f"a model of {model.num_classes}")
    return subset.numbers.tolist()


def as_model_labels(
    labels: "np.ndarray", indices: "np.ndarray", num_classes: int
) -> "np.ndarray":
    """Labels of the data, integers (N,) or 0-1 vectors, as labels of the model."""
    import numpy as np

    if labels.ndim == 1:
        return indices[labels]
    vectors = np.zeros((len(labels), num_classes), labels.dtype)
    vectors[:, indices] = labels
    return vectors


def score_figures(
    scores: "np.ndarray", labels: "np.ndarray", metrics: Sequence[str]
) -> dict:
    from keras_moe.evaluation.average_precision import mean_of_defined

    figures = {}
    if "accuracy" in metrics:
        right = scores.argmax(axis=-1) == labels
        figures["accuracy"] = float(right.mean())
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


# Image-text models


class Prompts(NamedTuple):
    """Class names and templates; `indices` maps the data's classes to the `subset`."""

    class_names: tuple[str, ...]
    templates: tuple
    subset: "ClassSubset | None" = None
    indices: "np.ndarray | None" = None


def pair_metrics(examples: Examples, args: argparse.Namespace) -> tuple[str, ...]:
    """The metrics of an image-text model that are asked for, or all possible ones."""
    kind = examples.source.partition(":")[0]
    possible = default = OF_CAPTIONS + OF_CLASSES
    if kind == "emoji":
        # Some of its classes have fewer pictures than a few shots.
        default = (*OF_CAPTIONS, "zero_shot")
        # They have English names.
        if re.search("language=(?!en)", examples.source) and not args.class_names:
            possible = default = OF_CAPTIONS
    else:
        try:
            several = examples.has_several_labels()
        except ValueError:
            possible = default = OF_CAPTIONS
        else:
            # Captions are the names of classes, each of many images.
            default = () if several else OF_CLASSES
            possible = ("contrastive_accuracy", *default)
    return chosen_metrics(args, possible, default)


def zero_shot_prompts(examples: Examples, args: argparse.Namespace) -> Prompts:
    """The names of the data's classes, or of a subset of ImageNet's, and templates."""
    from keras_moe.evaluation.image_text import names_in_subset

    evaluation = keras_moe.evaluation
    templates = evaluation.read_templates(args.templates or "ours")
    own, count = examples.class_names(), examples.num_classes()
    if args.class_subset:
        subset = evaluation.read_class_subset(args.class_subset)
        names = evaluation.read_class_names(args.class_names or "imagenet")
        indices = subset.indices(own, count)
        return Prompts(names_in_subset(names, subset), templates, subset, indices)
    if not args.class_names and own is None:
        expected = "--class-names for --metrics zero_shot"
        raise unfit(expected, f"{examples.source!r}, whose classes have no names")
    names = evaluation.read_class_names(args.class_names or own or ())
    if len(names) != count:
        expected = f"names of the {count} classes of {examples.source!r}"
        raise unfit(expected, f"{len(names)} names")
    return Prompts(names, templates)


def evaluate_pairs(
    model: "ContrastiveModel",
    examples: Examples,
    metrics: Sequence[str],
    prompts: Prompts | None,
    args: argparse.Namespace,
    shown: Callable,
) -> dict:
    evaluation = keras_moe.evaluation
    shape, size = model.backbone.image_shape, args.batch_size
    figures: dict[str, object] = {}
    if {*metrics} & {*OF_CAPTIONS}:
        batches = examples.pairs(
            shape, size, tokenizer=model.preprocessor, captions="all"
        )
        with keras_moe.data.reading_errors():
            pairs = evaluation.encode_pairs(model, shown(batches, examples.split), size)
        figures["images"], figures["captions"] = len(pairs.images), len(pairs.texts)
        if "retrieval" in metrics:
            figures["retrieval"] = pairs.retrieval().figures()
        if "contrastive_accuracy" in metrics:
            size_of_batch = min(args.contrastive_batch, len(pairs.images))
            own = pairs.contrastive_accuracy(size_of_batch).figures()
            figures["contrastive_accuracy"] = {**own, "batch_size": size_of_batch}
    if not {*metrics} & {*OF_CLASSES}:
        return figures
    encoder = model.backbone.encoder("image")

    def features(split):
        batches = examples.images(split, shape, size)
        with keras_moe.data.reading_errors():
            shown_batches = shown(batches, split)
            return evaluation.extract_features(encoder, shown_batches, verbose=0)

    test = features(examples.split)
    # With captions it is the number of their images.
    figures.setdefault("images", len(test[1]))
    if prompts is not None:
        classes = evaluation.encode_classes(
            model, prompts.class_names, prompts.templates, size
        )
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


# Both


def few_shot_figures(pool: tuple, test: tuple, args: argparse.Namespace) -> dict:
    result = keras_moe.evaluation.few_shot(
        *pool, *test, shots=args.shots, seeds=args.seeds
    )
    rows = zip(result.shots, result.mean, result.std, result.best_l2)
    return {
        f"{k}_shot": {"mean": float(mean), "std": float(std), "l2": float(l2)}
        for k, mean, std, l2 in rows
    }


def figures_table(values: dict) -> "Table":
    from rich.table import Table

    unit = next(unit for unit in ("images", "tokens") if unit in values)
    table = Table(
        "metric",
        title=f"{values['preset']} on {values[unit]:,} {unit} of "
        f"{values['data']} {values['split']}",
    )
    table.add_column("value", justify="right")
    rows = {
        name.replace("_r", " R@"): x for name, x in values.get("retrieval", {}).items()
    }
    if own := values.get("contrastive_accuracy"):
        rows[f"contrastive accuracy in {own['batch_size']:,}"] = own["accuracy"]
    for name, value in values.get("zero_shot", {}).items():
        if isinstance(value, float):
            rows[f"zero-shot {name}"] = value
    for name in ("accuracy", "precision_at_1", "mean_average_precision"):
        if name in values:
            rows[name] = values[name]
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), f"{value:.2%}")
    if "perplexity" in values:
        table.add_row("perplexity", f"{values['perplexity']:.4g}")
    for name, row in values.get("few_shot", {}).items():
        label = f"{name.replace('_', '-')} accuracy"
        table.add_row(label, f"{row['mean']:.2%} ± {row['std']:.2%}")
    return table
