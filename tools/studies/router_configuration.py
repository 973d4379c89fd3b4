"""One configuration of the router study: its model, trained from seeds and timed."""

import statistics
import time
from typing import Any

import keras
import numpy as np

from keras_moe import analysis, evaluation, models
from keras_moe.cli.fitting import compile_with_cosine
from keras_moe.cli.prediction import accuracy, predict
from tools.studies.study import Tell, plain
from tools.studies.watch import Watch

SHOTS = 10
TIMING_STEPS = 10


class Configuration:
    """One row of the table: a router with k or c, its combine weights and its model.

    The model is compiled once. Each run starts it from the state of a new one.
    """

    def __init__(self, task: Any, router: str, selected: int, combine: str):
        self.task = task
        self.labels = {"router": router, "selected": selected, "combine": combine}
        self.name = name_of(self.labels)
        self.model = self.new_model(0)
        self.has_fit = False
        self.inference = keras.Model(
            self.model.input,
            {"logits": self.model.output, "features": self.model.features},
        )
        self.grouped_model = self.new_model(0, **self.as_in_training())
        self.grouped = keras.Model(
            self.grouped_model.input,
            {
                "logits": self.grouped_model.output,
                "routing": self.grouped_model.routing,
            },
        )

    @property
    def settings(self) -> dict:
        """The settings that influence its runs, apart from the seed."""
        config = self.model.backbone.get_config()
        config.pop("name")
        return {**self.labels, "model": plain(config)}

    def new_model(self, seed: int, **overrides) -> keras.Model:
        """A model whose weights and noise follow from the seed."""
        args = self.task.args
        keras.utils.set_random_seed(seed)
        model = models.from_preset(
            args.preset,
            num_classes=self.task.num_classes,
            load_weights=False,
            router=self.labels["router"],
            num_selected_experts=self.labels["selected"],
            seed=seed,
            **{**self.task.overrides, **self.combine(), **overrides},
        )
        steps = args.epochs * self.task.steps_per_epoch
        compile_with_cosine(model, steps, args.learning_rate)
        model.optimizer.build(model.trainable_variables)
        return model

    def combine(self) -> dict:
        """The combine weights, if they are not the softmax."""
        combine = self.labels["combine"]
        return {} if combine == "softmax" else {"combine": combine}

    def as_in_training(self) -> dict:
        """Arguments that make inference group tokens and limit experts so."""
        return {} if self.labels["router"] == "soft" else {"evaluation": "official"}

    def warm_up(self) -> None:
        """Compiles the training step.

        A model's first `fit` looks at the data once more than others, and so would
        see the images of another pass than a second seed's.
        """
        if not self.has_fit:
            batches = self.task.load_augmented(0).take(1)
            self.model.fit(batches, shuffle=False, verbose=0)
            self.has_fit = True

    def start(self, seed: int) -> None:
        """Gives the model the weights, noise and optimizer of a new one."""
        self.warm_up()
        fresh = self.new_model(seed)
        for variable, value in zip(all_variables(self.model), all_variables(fresh)):
            variable.assign(value)

    def train(self, seed: int, tell: Tell) -> tuple[dict, dict]:
        """Trains from a seed, and evaluates; there are no arrays to keep."""
        begin = time.perf_counter()
        self.start(seed)
        batches = self.task.load_augmented(seed)
        epochs = self.task.args.epochs
        accuracies = []

        def follow():
            grouped, labels = self.predict_grouped()
            accuracies.append(accuracy(grouped["logits"], labels))

        history = self.model.fit(
            batches,
            epochs=epochs,
            shuffle=False,  # The batches come shuffled.
            verbose=0,
            callbacks=[Watch(tell, follow)],
        )
        result = {
            **self.evaluate(),
            "curves": {
                "train_loss": [float(loss) for loss in history.history["loss"]],
                "grouped_test_accuracy": accuracies,
            },
            "seconds": time.perf_counter() - begin,
        }
        return result, {}

    def evaluate(self) -> dict:
        """Accuracies, and what the routers did with the test images."""
        task, size = self.task, self.task.args.batch_size
        train, train_labels = predict(self.inference, task.train_images, size)
        test, test_labels = predict(self.inference, task.test_images, size)
        few_shot = evaluation.few_shot(
            train["features"],
            train_labels,
            test["features"],
            test_labels,
            shots=(SHOTS,),
            num_classes=task.num_classes,
        )
        grouped, grouped_labels = self.predict_grouped()
        is_token_choice = self.labels["router"].endswith("token_choice")
        routing = {
            name: analysis.routing_statistics(
                record, self.labels["selected"] if is_token_choice else None
            )
            for name, record in grouped["routing"].items()
        }
        blocks = routing.values()
        return {
            "test_accuracy": accuracy(test["logits"], test_labels),
            "grouped_test_accuracy": accuracy(grouped["logits"], grouped_labels),
            "few_shot_accuracy": float(few_shot.mean[0]),
            "dropped_tokens": statistics.fmean(b.dropped_tokens for b in blocks),
            "load_entropy": statistics.fmean(b.load_entropy for b in blocks),
            "routing": {name: block.to_dict() for name, block in routing.items()},
        }

    def predict_grouped(self) -> tuple[Any, np.ndarray]:
        """The outputs with the groups and the capacity of training, and the labels."""
        task = self.task
        self.grouped_model.set_weights(self.model.get_weights())
        # Only whole batches have the groups of training.
        whole = task.load(task.args.test_split, drop_remainder=True)
        return predict(self.grouped, whole, task.args.batch_size)

    def time_steps(self, batches: Any) -> float:
        """The mean seconds of a training step in one epoch of batches."""
        self.warm_up()
        clock = Stopwatch()
        self.model.fit(batches, shuffle=False, verbose=0, callbacks=[clock])
        return clock.seconds / TIMING_STEPS


class Stopwatch(keras.callbacks.Callback):
    """The seconds of an epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        float(logs["loss"])  # Waits for the last step.
        self.seconds = time.perf_counter() - self.start


def name_of(labels: dict) -> str:
    """A configuration's name, such as `"sinkhorn_token_choice-1-affinity"`."""
    combine = "" if labels["combine"] == "softmax" else f"-{labels['combine']}"
    return f"{labels['router']}-{labels['selected']}{combine}"


def all_variables(model: keras.Model) -> list:
    """Weights, noise and the optimizer's state."""
    return [*model.variables, *model.optimizer.variables]
