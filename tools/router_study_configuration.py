"""One configuration of the router study: its model, trained from seeds and timed."""

import math
import statistics
import time
from typing import Any

import keras
import numpy as np
from results import plain
from rich.progress import Progress

from keras_moe import analysis, evaluation, models

SHOTS = 10
TIMING_STEPS = 10


class Diverged(Exception):
    """Training ended in numbers that are not finite."""


class Configuration:
    """One row of the table: a router with k or c, its combine weights and its model.

    The model is compiled once. Each run starts it from the state of a new one.

    Args:
        study: the data and the arguments, see `router_study.Study`.
        router: the router's name.
        selected: k of token choice, c of the others.
        combine: `"softmax"`, or `"affinity"` to weigh outputs with the transport plan.
    """

    def __init__(self, study: Any, router: str, selected: int, combine: str):
        self.study = study
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
        """What influences the runs, apart from the seed."""
        config = self.model.backbone.get_config()
        config.pop("name")
        return {**self.study.settings(), **self.labels, "model": plain(config)}

    def new_model(self, seed: int, **overrides) -> keras.Model:
        """A model whose weights and noise follow from the seed."""
        args = self.study.args
        keras.utils.set_random_seed(seed)
        model = models.from_preset(
            args.preset,
            num_classes=self.study.num_classes,
            load_weights=False,
            router=self.labels["router"],
            num_selected_experts=self.labels["selected"],
            seed=seed,
            **{
                **self.study.overrides,
                "router_options": self.router_options() or None,
                **overrides,
            },
        )
        # The quickstart's optimizer and schedule.
        steps = args.epochs * self.study.steps_per_epoch
        schedule = keras.optimizers.schedules.CosineDecay(
            0.0,
            steps,
            warmup_target=args.learning_rate,
            warmup_steps=steps // 10,
        )
        model.compile(
            optimizer=keras.optimizers.AdamW(
                schedule, weight_decay=0.05, global_clipnorm=1.0
            )
        )
        model.optimizer.build(model.trainable_variables)
        return model

    def router_options(self, **options) -> dict:
        """The router's arguments: the user's, the combine weights and `options`."""
        if self.labels["combine"] != "softmax":
            options["combine"] = self.labels["combine"]
        return {**(self.study.overrides.get("router_options") or {}), **options}

    def as_in_training(self) -> dict:
        """Arguments that make inference group tokens and limit experts so."""
        return {} if self.labels["router"] == "soft" else {"evaluation": "official"}

    def warm_up(self) -> None:
        """Compiles the training step.

        A model's first `fit` looks at the data once more than others, and so would
        see the images of another pass than a second seed's.
        """
        if not self.has_fit:
            batches = self.study.load_augmented(0).take(1)
            self.model.fit(batches, shuffle=False, verbose=0)
            self.has_fit = True

    def start(self, seed: int) -> None:
        """Gives the model the weights, noise and optimizer of a new one."""
        self.warm_up()
        fresh = self.new_model(seed)
        for variable, value in zip(all_variables(self.model), all_variables(fresh)):
            variable.assign(value)

    def train(self, seed: int, progress: Progress) -> dict:
        """Trains from a seed, and evaluates."""
        begin = time.perf_counter()
        self.start(seed)
        batches = self.study.load_augmented(seed)
        epochs = self.study.args.epochs
        task = progress.add_task(f"{self.name} seed {seed}", total=epochs)
        accuracies = []

        def follow(epoch, logs):
            loss = logs["loss"]
            progress.update(
                task,
                completed=epoch + 1,
                description=f"{self.name} seed {seed}, loss {loss:.3f}",
            )
            if not math.isfinite(loss):
                raise Diverged(
                    f"{self.name} with seed {seed} diverged in epoch {epoch + 1} "
                    f"(loss={loss}); try a smaller --learning-rate"
                )
            grouped, labels = self.predict_grouped()
            accuracies.append(accuracy(grouped["logits"], labels))

        history = self.model.fit(
            batches,
            epochs=epochs,
            shuffle=False,  # The batches come shuffled.
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=follow)],
        )
        result = self.evaluate()
        progress.remove_task(task)
        return {
            **result,
            "curves": {
                "train_loss": [float(loss) for loss in history.history["loss"]],
                "grouped_test_accuracy": accuracies,
            },
            "seconds": time.perf_counter() - begin,
        }

    def evaluate(self) -> dict:
        """Accuracies, and what the routers did with the test images."""
        study, size = self.study, self.study.args.batch_size
        train, train_labels = predict(self.inference, study.train_images, size)
        test, test_labels = predict(self.inference, study.test_images, size)
        few_shot = evaluation.few_shot(
            train["features"],
            train_labels,
            test["features"],
            test_labels,
            shots=(SHOTS,),
            num_classes=study.num_classes,
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
        study = self.study
        self.grouped_model.set_weights(self.model.get_weights())
        # Only whole batches have the groups of training.
        whole = study.load(study.args.test_split, drop_remainder=True)
        return predict(self.grouped, whole, study.args.batch_size)

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


def predict(model: keras.Model, batches: Any, size: int) -> tuple[Any, np.ndarray]:
    """The outputs for all images, and the labels.

    A last batch is filled up to `size`, so that nothing is compiled for it.
    """
    outputs, labels = [], []
    for images, batch_labels in batches:
        images, count = images.numpy(), len(images)
        images = np.concatenate([images, np.repeat(images[-1:], size - count, axis=0)])
        output = model.predict_on_batch(images)
        outputs.append(keras.tree.map_structure(lambda x, n=count: x[:n], output))
        labels.append(batch_labels.numpy())
    whole = keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)
    return whole, np.concatenate(labels)


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    return float((logits.argmax(axis=-1) == labels).mean())
