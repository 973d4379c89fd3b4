"""The training of a model of pairs in a study, by a recipe and overrides of it."""

import argparse
import functools
import statistics
import time
import warnings
from typing import Any

import keras
import numpy as np

from keras_moe import data, evaluation, training
from keras_moe.training.upcycled import copy_weights
from tools.studies.pair_measures import (
    health_figures,
    retrieval_figures,
    routing_figures,
)
from tools.studies.study import Run, Tell
from tools.studies.watch import Watch

# The words of `RouterHealth` where a router uses few experts.
COLLAPSED = "has collapsed"


def recipe_of(args: argparse.Namespace) -> training.Recipe:
    """The recipe of a study, with what the command line overrides.

    A shorter run has a shorter warm-up, unless the command line sets it.
    """
    if args.epochs and args.steps:
        raise ValueError(
            "Expected --epochs or --steps; received: "
            f"--epochs {args.epochs} --steps {args.steps}"
        )
    recipe = training.load_recipe(args.recipe)
    if recipe.objective.name != "contrastive":
        raise ValueError(
            "Expected a recipe of pairs, with the objective contrastive; received: "
            f"--recipe {args.recipe} with {recipe.objective.name}"
        )
    options = {
        "data.source": args.data,
        "data.batch_size": args.batch_size,
        "schedule.learning_rate": args.learning_rate,
        "schedule.epochs": args.epochs,
        "schedule.steps": args.steps,
    }
    overrides = {name: value for name, value in options.items() if value is not None}
    before, warmup = recipe.schedule, recipe.schedule.warmup_steps
    if args.steps:
        overrides["schedule.warmup_steps"] = min(warmup, args.steps // 10)
    elif args.epochs and before.epochs:
        share = min(1.0, args.epochs / before.epochs)
        overrides["schedule.warmup_steps"] = round(warmup * share)
    overrides |= {f"model.{name}": value for name, value in args.set}
    return recipe.replace(**{**overrides, **dict(args.recipe_set)})


class PairTraining:
    """Models of pairs, trained from seeds by a recipe."""

    def __init__(self, recipe: training.Recipe, data_dir: str | None):
        self.recipe, self.data_dir = recipe, data_dir
        # Each warning is shown once, and not in every run.
        self.warned: set[str] = set()

    def settings(self) -> dict[str, Any]:
        """The settings that influence every run."""
        settings = self.recipe.to_dict()
        for name in ("seed", "description", "reference", "notes"):
            del settings[name]
        return {"recipe": settings, "data_dir": self.data_dir}

    def new_run(self, overrides: dict, seed: int, label: str) -> Run:
        """The run of a configuration from a seed.

        Its name is not that of the configuration: rows that two parts share are one
        run.
        """
        make = functools.partial(self.make, overrides, seed)
        return Run("pairs", seed, {"overrides": overrides}, make, label)

    def make(self, overrides: dict, seed: int, tell: Tell) -> tuple[dict, dict]:
        """Trains and measures; there are no arrays to keep."""
        return self.train(overrides, seed, tell)[1], {}

    def train(
        self,
        overrides: dict,
        seed: int,
        tell: Tell,
        dense: keras.Model | None = None,
        callbacks: list | None = None,
    ) -> tuple[keras.Model, dict]:
        """Trains a model from a seed, and measures it on the test pairs."""
        recipe = self.recipe.replace(**{**overrides, "seed": seed})
        clock, watchers, start = Clock(), {}, {}

        def prepared(model, datasets):
            if dense is not None:
                copy_weights(dense, model, 0.0, seed)
                start.update(self.retrieval(recipe, model))
            every = [
                clock,
                Watch(tell),
                *(new(model, datasets) for new in callbacks or ()),
            ]
            if model.routing:
                # Routed as in training, once at the end.
                inputs = first_batch(datasets.test)
                watchers["health"] = training.RouterHealth(
                    inputs, every=recipe.passes(datasets.steps_per_epoch)
                )
                watchers["inputs"] = inputs
                every.append(watchers["health"])
            return every

        begin = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained = training.train(
                recipe, data_dir=self.data_dir, callbacks=prepared, verbose=0
            )
        collapsed = [str(x.message) for x in caught if COLLAPSED in str(x.message)]
        for warning in caught:
            text = str(warning.message)
            if COLLAPSED not in text and text not in self.warned:
                self.warned.add(text)
                warnings.warn(warning.message, warning.category, stacklevel=2)
        seconds = time.perf_counter() - begin
        model = trained.model
        figures = self.retrieval(recipe, model)
        layers = []
        if watchers:
            layers = watchers["health"].layers
            figures |= routing_figures(model, watchers["inputs"])
            figures |= health_figures(layers)
            figures["collapsed"] = float(bool(collapsed))
        shares = {layer["layer"]: layer["expert_shares"] for layer in layers}
        return model, {
            "figures": figures,
            "start": start,
            "collapsed": collapsed,
            "expert_shares": shares,
            "history": trained.history,
            "epoch_seconds": clock.median,
            "parameters": model.count_params(),
            "seconds": seconds,
        }

    def retrieval(self, recipe: training.Recipe, model: keras.Model) -> dict:
        """Retrieval of the test pairs by a model."""
        pairs = self.test_pairs(recipe, model)
        embedded = evaluation.encode_pairs(model, pairs, recipe.data.batch_size)
        return retrieval_figures(embedded)

    def test_pairs(self, recipe: training.Recipe, model: keras.Model) -> Any:
        """Batches of all test pairs, each caption of an image with it."""
        return data.load_pairs(
            recipe.data.source,
            recipe.data.test_split,
            model.backbone.image_shape,
            batch_size=recipe.data.batch_size,
            tokenizer=model.preprocessor,
            shuffle=False,
            data_dir=self.data_dir,
            **{**recipe.data.pair_options(), "captions": "all"},
        )


class Clock(keras.callbacks.Callback):
    """The seconds of epochs, of which the first, which compiles, does not count."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begin = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        float(logs["loss"])  # Waits for the last step.
        self.seconds.append(time.perf_counter() - self.begin)

    @property
    def median(self) -> float | None:
        """The median, or None after a single epoch."""
        return statistics.median(self.seconds[1:]) if self.seconds[1:] else None


def first_batch(batches: Any) -> dict[str, np.ndarray]:
    """The inputs of the first batch."""
    inputs, *_ = next(iter(batches))
    return {name: np.asarray(value) for name, value in inputs.items()}
