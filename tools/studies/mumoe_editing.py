"""The part of the study of muMoE about fairness: Table 2 and Figure 25.

One edit of a muMoE head is compared with oversampling, with the blind threshold, and
with adversarial debiasing: section 3 of *Turning a Blind Eye: Explicit Removal of
Biases and Variation from Deep Neural Network Embeddings*.

Axes: B batch, D hidden, A values of the attribute.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from rich.console import Console

from keras_moe import analysis, data, models
from keras_moe.layers import MuMoE
from tools.studies.mumoe_models import (
    LABELS,
    SHAPE,
    SIZES,
    Fit,
    both_ways,
    with_attributes,
)
from tools.studies.plots import plot_subpopulations
from tools.studies.study import (
    OnProgress,
    Part,
    Run,
    Study,
    new_table,
    plus_minus,
    spread,
    spread_of,
)

# How many of the digits that are 5 and above, and of the others, are inverted.
RARE, COMMON = 0.03, 0.5
VALIDATION = 300
# Factor of the epochs: there are few images.
PASSES = 5
BIASED = (1, 1)
# The edit's strengths among which validation data choose, over the number of experts.
EXPERT_STRENGTHS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
BLIND_STRENGTHS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.5, 5.0)
METRICS = {
    "target": "target",
    "equality_of_opportunity": "eq. opp.",
    "std_bias": "STD bias",
    "max_min": "max-min",
    "accuracy": "accuracy",
}


class Editing(Part):
    """A planted bias, and what corrects it."""

    def __init__(self, study: Study, fit: Fit, seeds: int, experts: int, rank: int):
        super().__init__(study)
        self.fit, self.experts, self.rank = fit, experts, rank
        settings = {
            "rank": rank,
            "experts": experts,
            "shares": [RARE, COMMON],
            "passes": PASSES,
            "validation": VALIDATION,
            "strengths": [EXPERT_STRENGTHS, BLIND_STRENGTHS],
        }
        self.runs = [
            Run("editing", seed, settings, functools.partial(self.train, seed))
            for seed in range(seeds)
        ]

    def results(self) -> dict:
        runs = self.study.finish_all(self.runs)["editing"]
        return {"experts": self.experts, "runs": runs}

    def train(self, seed: int, on_progress: OnProgress) -> tuple[dict, dict]:
        """All models of one seed, by name."""
        generator = np.random.default_rng(seed)
        images, digits = data.load_digits("train", SHAPE)
        order = generator.permutation(len(digits))
        held, rest = order[:VALIDATION], order[VALIDATION:]
        validation = both_ways(images[held], digits[held])
        test = both_ways(*data.load_digits("test", SHAPE))
        images, digits = images[rest], digits[rest]
        rate = np.where(digits >= 5, RARE, COMMON)
        images, labels = with_attributes(
            images, digits, generator.random(len(digits)) < rate
        )
        members = (labels[:, 0] == BIASED[0]) & (labels[:, -1] == BIASED[1])
        others = (labels[:, 0] == BIASED[0]) & (labels[:, -1] != BIASED[1])

        def fitted(images, labels, has_head=True):
            model = self.new_model(seed, has_head)
            model.compile(optimizer=self.fit.optimizer())
            self.fit.train(model, images, labels, on_progress, PASSES)
            return model

        rows = {"linear": evaluate(fitted(images, labels, has_head=False), test)}
        model = fitted(images, labels)
        rows["muMoE"] = evaluate(model, test)
        chosen = oversample(members, int(others.sum()), seed)
        rows["+ oversampling"] = evaluate(fitted(images[chosen], labels[chosen]), test)
        debiased = self.new_model(seed)
        debiased.compile(self.fit.optimizer())
        attributes = labels[:, -1].astype("int32")
        targets = {"predictions": labels, "attribute": attributes}
        adversarial = adversarial_debiasing(debiased)
        self.fit.train(adversarial, images, targets, on_progress, PASSES)
        rows["+ adversarial"] = evaluate(debiased, test)
        edited, strengths = self.edits(model, images[members], validation, test)
        result = {"strengths": strengths, "members": int(members.sum())}
        return {"rows": {**rows, **edited}, **result}, {}

    def new_model(self, seed: int, has_head: bool = True) -> keras.Model:
        """A ViT of the attributes, with a muMoE head or a linear one."""
        keras.utils.set_random_seed(seed)
        backbone = models.ViTBackbone(
            image_shape=SHAPE, num_heads=4, seed=seed, **SIZES
        )
        head = MuMoE(len(LABELS), self.experts, rank=self.rank) if has_head else None
        return models.ViTImageClassifier(
            backbone, len(LABELS), multi_label=True, head=head
        )

    def edits(
        self, model: keras.Model, members: np.ndarray, validation: tuple, test: tuple
    ) -> tuple[dict, dict]:
        """Figures of edited models, and the strengths that validation data chose."""
        rows, strengths = {}, {}
        options = {
            "+ blind thresh.": (None, BLIND_STRENGTHS),
            "+ expert edit": (
                members,
                [share * self.experts for share in EXPERT_STRENGTHS],
            ),
        }
        for name, (subpopulation, choices) in options.items():

            def edited(strength, subpopulation=subpopulation):
                return analysis.edit_expert_logits(
                    model, subpopulation, output=0, strength=strength
                )

            by_strength = {x: evaluate(edited(x), validation) for x in choices}
            best = max(by_strength, key=lambda x: by_strength[x]["max_min"])
            strengths[name] = best
            rows[name] = evaluate(edited(best), test)
        rows["+ expert edit, N"] = evaluate(edited(self.experts), test)
        return rows, strengths

    def show(self, results: dict, console: Console) -> None:
        runs = results["runs"]
        title = "Digits from 5 on, inverted: the target subpopulation (Table 2)"
        table = new_table(title, "model", *METRICS.values())
        for name in runs[0]["rows"]:
            rows = [run["rows"][name] for run in runs]
            values = [spread_of(rows, metric) for metric in METRICS]
            table.add_row(name, *map(plus_minus, values))
        console.print(table)
        table = new_table(
            "Test accuracy by subpopulation, below 5 and from 5 on",
            *("model", "below", "below, inverted", "from 5 on", "from 5 on, inverted"),
        )
        for name in ("muMoE", "+ expert edit", "+ expert edit, N"):
            accuracies = [run["rows"][name]["accuracies"] for run in runs]
            cells = np.reshape(accuracies, (len(runs), -1)).T
            table.add_row(name, *(plus_minus(spread(cell.tolist())) for cell in cells))
        console.print(table)
        console.print(
            "Strengths that validation data chose: "
            + ", ".join(
                f"{name[2:]} {[run['strengths'][name] for run in runs]}"
                for name in runs[0]["strengths"]
            )
        )

    def draw(self, every: dict) -> list[Path]:
        picture = self.study.folder / "subpopulations.png"
        before, after = (
            average([run["rows"][name] for run in every["editing"]["runs"]])
            for name in ("muMoE", "+ expert edit")
        )
        plot_subpopulations(
            before.accuracies,
            after.accuracies,
            picture,
            target_names=["below 5", "5 and above"],
            attribute_names=["as scanned", "inverted"],
            target=BIASED,
            title="Accuracy before and after one edit, on test images",
        )
        return [picture]


def evaluate(model: keras.Model, examples: tuple) -> dict:
    """Fairness metrics of the first label by the last, and the target's accuracy."""
    images, labels = examples
    predictions = model.predict(images, verbose=0)[:, 0] > 0
    targets, attributes = labels[:, 0].astype(int), labels[:, -1].astype(int)
    metrics = fairness_metrics(predictions, targets, attributes)
    lists = {name: np.asarray(x).tolist() for name, x in metrics._asdict().items()}
    return {**lists, "target": float(metrics.accuracies[BIASED])}


class FairnessMetrics(NamedTuple):
    """Accuracies of subpopulations, by target value (rows) and attribute value."""

    # Images per subpopulation.
    counts: np.ndarray
    accuracies: np.ndarray
    # Over all images.
    accuracy: float
    # Largest difference in true positive rate between attribute values; 0 is fair.
    equality_of_opportunity: float
    # Standard deviation of the subpopulations' accuracies.
    std_bias: float
    # Lowest accuracy of a subpopulation.
    max_min: float


def fairness_metrics(
    predictions: np.ndarray, targets: np.ndarray, attributes: np.ndarray
) -> FairnessMetrics:
    """Metrics of binary predictions (B,), of *muMoE*, appendix J."""
    shape = (targets.max() + 1, attributes.max() + 1)
    counts, right = np.zeros(shape, int), np.zeros(shape, int)
    np.add.at(counts, (targets, attributes), 1)
    np.add.at(right, (targets, attributes), predictions == targets)
    accuracies = right / counts
    # True positive rates are the accuracies of the positive target.
    return FairnessMetrics(
        counts,
        accuracies,
        float(right.sum() / counts.sum()),
        float(np.ptp(accuracies[1])),
        float(accuracies.std()),
        float(accuracies.min()),
    )


def average(rows: list[dict]) -> FairnessMetrics:
    """The mean of the metrics over runs."""
    return FairnessMetrics(
        *(np.mean([row[x] for row in rows], axis=0) for x in FairnessMetrics._fields)
    )


class AttributeAdversary(keras.layers.Layer):
    """Predicts an attribute from features (B, D), which learn to confuse it.

    The logits (B, A) train this layer alone: features get no gradient from them. While
    training, the layer adds the cross-entropy of its prediction with the uniform
    distribution, which trains the features alone (equations 2 and 3).
    """

    def __init__(self, num_values: int, confusion_weight: float = 1.0, **kwargs):
        super().__init__(dtype="float32", **kwargs)
        self.num_values, self.confusion_weight = num_values, confusion_weight

    def build(self, input_shape):
        shape = (input_shape[-1], self.num_values)
        self.kernel = self.add_weight(name="kernel", shape=shape)
        self.bias = self.add_weight(name="bias", shape=shape[1:], initializer="zeros")

    def call(self, features: Any, training: bool | None = None) -> Any:
        kernel, bias = (ops.convert_to_tensor(v) for v in (self.kernel, self.bias))
        if training and self.confusion_weight:
            confused = ops.matmul(features, ops.stop_gradient(kernel))
            confused = ops.log_softmax(confused + ops.stop_gradient(bias))
            self.add_loss(-self.confusion_weight * ops.mean(confused))
        return ops.matmul(ops.stop_gradient(features), kernel) + bias


def adversarial_debiasing(
    classifier: keras.Model, num_values: int = 2, confusion_weight: float = 1.0
) -> keras.Model:
    """A compiled model that trains a compiled classifier against an adversary.

    The classifier learns its task while its features learn to confuse the adversary,
    which learns to tell the attribute from them. The model shares all weights with the
    classifier and has the outputs "predictions" and "attribute":
    `fit(images, {"predictions": labels, "attribute": attributes})`.
    """
    adversary = AttributeAdversary(num_values, confusion_weight, name="attribute")
    model = keras.Model(
        classifier.input,
        {
            "predictions": classifier.output,
            "attribute": adversary(classifier.features),
        },
    )
    model.compile(
        optimizer=classifier.optimizer,
        loss={
            "predictions": classifier.loss,
            "attribute": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
        metrics={"attribute": keras.metrics.SparseCategoricalAccuracy("accuracy")},
    )
    return model


def oversample(members: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Indices of all examples, shuffled, with `count` of the members (appendix J).

    Each member, of which there are at most `count`, is repeated equally often.
    """
    generator = np.random.default_rng(seed)
    examples = np.flatnonzero(members)
    whole, rest = divmod(count, len(examples))
    once_more = generator.choice(examples, rest, replace=False)
    indices = np.concatenate(
        [np.flatnonzero(~members), np.repeat(examples, whole), once_more]
    )
    return generator.permutation(indices)
