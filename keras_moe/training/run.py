"""A run: the model of a recipe, trained on its images."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from keras_moe import data
from keras_moe.training.recipes import Datasets, Recipe


class Training(NamedTuple):
    """What training gave.

    Attributes:
        model: the trained model.
        history: lists with a value for each epoch: loss, accuracy, val_loss and
            val_accuracy, those of the test images.
        test_accuracy: of the last epoch.
    """

    model: keras.Model
    history: dict[str, list[float]]
    test_accuracy: float


def train(
    recipe: Recipe,
    datasets: Datasets | None = None,
    data_dir: str | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    verbose: Any = "auto",
) -> Training:
    """Trains a model as a recipe says.

    The same recipe gives the same weights on one machine and backend: it sets all of
    Keras's random seeds.

    Args:
        recipe: the settings.
        datasets: images of your own, in the place of the recipe's.
        data_dir: of TensorFlow Datasets.
        callbacks: for `fit`.
        verbose: for `fit`.

    Returns:
        A `Training`: the model, the history and the accuracy.

    Raises:
        ValueError: if the recipe, model and images do not fit together, or the loss is
            not finite any more.

    Example:

    >>> from keras_moe.training import load_recipe, train
    >>> recipe = load_recipe("mumoe_digits", epochs=1, batch_size=512, warmup_steps=0)
    >>> recipe = recipe.replace(model_arguments={"num_layers": 1, "hidden_dim": 8})
    >>> sorted(train(recipe, verbose=0).history)
    ['accuracy', 'loss', 'val_accuracy', 'val_loss']
    """
    keras.utils.set_random_seed(recipe.seed)
    if datasets is None:
        model = recipe.new_model(data.num_classes(recipe.data, data_dir))
        datasets = recipe.datasets(model.backbone.image_shape, data_dir)
    else:
        model = recipe.new_model(datasets.num_classes)
    recipe.compile(model, datasets.steps_per_epoch)

    def stop_if_diverged(epoch, logs):
        if not math.isfinite(logs["loss"]):
            raise ValueError(
                f"Expected a finite loss; received: loss={logs['loss']} in epoch "
                f"{epoch + 1}. Try less than learning_rate={recipe.learning_rate}"
            )

    history = model.fit(
        datasets.train,
        epochs=recipe.epochs,
        validation_data=datasets.test,
        shuffle=False,  # The batches come shuffled.
        callbacks=[
            *callbacks,
            keras.callbacks.LambdaCallback(on_epoch_end=stop_if_diverged),
        ],
        verbose=verbose,
    ).history
    history = {name: [float(x) for x in values] for name, values in history.items()}
    return Training(model, history, history["val_accuracy"][-1])
