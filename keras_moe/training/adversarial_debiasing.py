"""Adversarial debiasing: features from which an attribute cannot be read."""

import keras

from keras_moe.layers import AttributeAdversary


def adversarial_debiasing(
    classifier: keras.Model, num_values: int = 2, confusion_weight: float = 1.0
) -> keras.Model:
    """A model that trains a classifier against an adversary.

    The classifier learns its task while its features learn to confuse the adversary,
    which learns to tell the attribute from them. Both share all weights with the
    classifier: after training, it alone is used, and no attribute is needed.

    Args:
        classifier: a compiled `ImageClassifier`, whose loss, metrics and optimizer
            settings the model takes.
        num_values: values of the sensitive attribute.
        confusion_weight: weight of the confusion loss; see `AttributeAdversary`.

    Returns:
        A compiled model with the outputs "predictions" and "attribute":
        `fit(images, {"predictions": labels, "attribute": attributes})`, the attributes
        integers (B,) from 0 to `num_values - 1`.

    Raises:
        ValueError: if the classifier is not compiled or has no `features`, or an
            argument is out of range.

    Reference:
        *Turning a Blind Eye*, section 3; *Multilinear Mixture of Experts*, Table 2.

    Example:

    >>> import numpy as np
    >>> from keras_moe import models, training
    >>> classifier = models.from_preset("vmoe_digits")
    >>> model = training.adversarial_debiasing(classifier)
    >>> images, labels = np.zeros((4, 16, 16, 1), "float32"), np.zeros(4, "int32")
    >>> targets = {"predictions": labels, "attribute": np.array([0, 1, 0, 1])}
    >>> history = model.fit(images, targets, verbose=0)
    >>> sorted(name for name in history.history if "accuracy" in name)
    ['attribute_accuracy', 'predictions_accuracy']
    """
    compiled = getattr(classifier, "compiled", False)
    if not hasattr(classifier, "features") or not compiled:
        raise ValueError(
            "Expected a compiled classifier with features; received: "
            f"{type(classifier).__name__}, compiled={compiled}"
        )
    adversary = AttributeAdversary(num_values, confusion_weight, name="attribute")
    model = keras.Model(
        classifier.input,
        {
            "predictions": classifier.output,
            "attribute": adversary(classifier.features),
        },
    )
    settings = keras.saving.deserialize_keras_object(classifier.get_compile_config())
    if isinstance(settings["metrics"], dict):
        settings["metrics"] = list(settings["metrics"].values())
    attribute_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    attribute_metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    model.compile(
        optimizer=settings["optimizer"],
        loss={"predictions": settings["loss"], "attribute": attribute_loss},
        metrics={
            "predictions": keras.tree.flatten(settings["metrics"]),
            "attribute": [attribute_metric],
        },
        run_eagerly=settings["run_eagerly"],
        steps_per_execution=settings["steps_per_execution"],
        jit_compile=settings["jit_compile"],
    )
    return model
