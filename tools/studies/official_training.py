"""Whether training equals the official code's, for V-MoE and Soft MoE.

Both codes train models of equal sizes on the same batches: from initial weights of
their own, with noise, and for some steps from ours without noise, where the losses of
both should be the same numbers.
"""

import functools
import itertools
from typing import Any

import keras
import numpy as np
from rich.console import Console

from tools.studies.experts import Model, Task
from tools.studies.official_models import (
    Noise,
    Optimizer,
    Settings,
    initial_weights,
    keras_epsilons,
    noises,
    train,
)
from tools.studies.study import (
    OnProgress,
    Part,
    Run,
    Study,
    new_table,
    percent,
    plus_minus,
    spread,
    spread_of,
    weights_as_arrays,
)

# The optimizer of the official configurations.
EPSILON = 1e-8
OPTIMIZER = {
    "optimizer.options": {"epsilon": EPSILON},
    "optimizer.groups": [{"match": "kernels"}, {"match": "rest", "weight_decay": 0.0}],
}
# Steps from our initial weights, with a schedule of their own.
STEPS = 50
SIZES = ("image_shape", "patch_size", "hidden_dim", "num_layers", "num_heads")
NOT_SOFT = ("num_selected_experts", "examples_per_group", "noise_std")
CAPACITY = ("capacity_factor", "capacity_multiple_of")


def models_of(task: Task) -> dict[str, Settings]:
    """The models of both codes, of the sizes of the task's recipe."""
    given = task.recipe.model.overrides
    sizes = {name: given[name] for name in (*SIZES, "mlp_dim")}
    sizes["image_shape"] = tuple(sizes["image_shape"])
    blocks = tuple(range(1, sizes["num_layers"], 2))
    make = functools.partial(
        Settings, **sizes, num_classes=task.classes, moe_layers=blocks, num_experts=8
    )
    # As many slots as there are patches.
    soft = make(class_token=False, query_key_norm=True, num_slots=1)
    return {
        "V-MoE, K=1": make(num_selected_experts=1),
        "V-MoE, K=2": make(num_selected_experts=2),
        "Soft MoE": soft._replace(num_slots=max(soft.num_tokens // 8, 1)),
    }


def our_model(own: Settings) -> Model:
    """Overrides of a recipe for our model of these settings."""
    values: dict[str, Any] = own._asdict()
    del values["num_classes"]
    values["moe_layers"] = list(own.moe_layers)
    values["image_shape"] = list(own.image_shape)
    values["pooling"] = "class_token" if own.class_token else "average"
    is_soft = own.num_selected_experts is None
    for name in (*NOT_SOFT, *CAPACITY) if is_soft else ("num_slots",):
        del values[name]
    values["router"] = "soft" if is_soft else "softmax_token_choice"
    if not is_soft:
        values["priority"] = "first_come"
    return Model({f"model.{name}": x for name, x in values.items()} | OPTIMIZER)


def values_by_path(model: keras.Model) -> dict[str, np.ndarray]:
    """The weights that train."""
    return {
        weight.path: keras.ops.convert_to_numpy(weight)
        for weight in model.trainable_weights
    }


def steps_of_both(
    own: Settings, recipe: Any, batches: Any, seed: int = 0
) -> dict[str, list[float]]:
    """Losses of the recipe's steps, from our initial weights and with our noise.

    `"optax"` is the official code with optax's epsilon instead of Keras's.
    """
    recipe = recipe.replace(**our_model(own).overrides, seed=seed)
    steps = recipe.schedule.steps
    model = recipe.new_model(own.num_classes)
    recipe.compile(model, steps)
    weights, optimizer = values_by_path(model), official_optimizer(recipe, steps)
    noise = our_noise(own, model, recipe.data.batch_size, steps)
    # An epoch of one step, so that each has its own loss.
    history = model.fit(
        batches, epochs=steps, steps_per_epoch=1, shuffle=False, verbose=0
    ).history
    results = {"ours": history["loss"]}
    for name, epsilons in (
        ("official", keras_epsilons(EPSILON, steps, optimizer[0])),
        ("optax", itertools.repeat(EPSILON)),
    ):
        seen = batches.as_numpy_iterator()
        _, losses = train(own, *optimizer, epsilons, weights, seen, noise)
        results[name] = losses.tolist()
    return results


def our_noise(
    own: Settings, model: Any, batch_size: int, steps: int
) -> list[Noise | None]:
    """The noise that our model's routers will draw, step by step."""
    if own.num_selected_experts is None or not own.noise_std:
        return [None] * steps
    noise = [{} for _ in range(steps)]
    for index in own.moe_layers:
        router = model.backbone.get_layer(f"block_{index}").feed_forward.router
        drawn = keras.random.SeedGenerator(0)
        drawn.state.assign(keras.ops.convert_to_numpy(router.seed_generator.state))
        for step in noise:
            step[index] = keras.random.normal(
                own.noise_shape(batch_size), stddev=own.noise_deviation, seed=drawn
            )
    return noise


def official_optimizer(recipe: Any, steps: int) -> tuple[Optimizer, list[float]]:
    """The recipe's optimizer as the official code has it, and all learning rates."""
    own, rate = recipe.optimizer, recipe.learning_rate(steps)
    numbers = range(recipe.total_steps(steps))
    return (
        Optimizer(own.weight_decay, own.gradient_clipping),
        [float(rate(number)) for number in numbers],
    )


def largest_difference(losses: dict[str, list[float]], name: str) -> float:
    """The largest relative difference of the losses of a step from ours."""
    ours = np.array(losses["ours"])
    return float(np.max(np.abs(np.array(losses[name]) - ours) / ours))


class Official(Part):
    """Curves and accuracies of both codes, and steps from the same weights."""

    def __init__(
        self, study: Study, task: Task, models: dict[str, Settings], seeds: int
    ):
        super().__init__(study)
        self.task, self.models, self.seeds = task, models, seeds

    def train_official(
        self, own: Settings, seed: int, on_progress: OnProgress
    ) -> tuple[dict, dict[str, np.ndarray]]:
        """A run of the official code, from its own initial weights."""
        task, overrides = self.task, our_model(own).overrides
        recipe = task.recipe_of(overrides, seed)
        batch_size = recipe.data.batch_size
        steps = len(task.parts["train"]) // batch_size
        batches = task.load_augmented(seed, repeat=True, one_hot=True)
        weights, losses = train(
            own,
            *official_optimizer(recipe, steps),
            itertools.repeat(EPSILON),
            initial_weights(own, seed),
            batches.as_numpy_iterator(),
            noises(own, batch_size, seed),
        )
        # Our model reads them, which has the same function.
        model = recipe.new_model(task.classes)
        for weight in model.weights:
            weight.assign(np.asarray(weights.pop(weight.path)))
        arrays = weights_as_arrays(model)
        figures = task.figures(overrides, arrays, task.load("test"))
        by_epoch = losses.reshape(-1, steps).mean(axis=1)
        return {**figures, "history": {"loss": by_epoch.tolist()}}, arrays

    def train_both(
        self, own: Settings, seed: int, on_progress: OnProgress
    ) -> tuple[dict, dict[str, np.ndarray]]:
        recipe = self.task.recipe.replace(**{"schedule.steps": STEPS})
        batches = self.task.load_augmented(seed, repeat=True, one_hot=True)
        no_noise = own._replace(noise_std=0.0)
        return steps_of_both(no_noise, recipe, batches, seed), {}

    def runs_of(self, label: str, own: Settings, seed: int) -> dict[str, Run]:
        task, model = self.task, our_model(own)
        ours = task.new_run(model, seed, f"{label}, ours")

        def run(name, make):
            make = functools.partial(make, own, seed)
            return Run(name, seed, ours.settings, make, f"{label}, {name}")

        return {
            "ours": ours,
            "tested": task.test_run(model, seed, f"{label}, ours"),
            "official": run("official", self.train_official),
            "steps": run("steps", self.train_both),
        }

    def results(self) -> dict:
        runs = {
            label: [self.runs_of(label, own, seed) for seed in range(self.seeds)]
            for label, own in self.models.items()
        }
        self.study.finish_all(
            [
                run
                for row in runs.values()
                for by_name in row
                for run in by_name.values()
            ]
        )
        results = {}
        for label, row in runs.items():
            done = [
                {name: self.study.finish(run) for name, run in by_name.items()}
                for by_name in row
            ]
            steps = [by_name["steps"] for by_name in done]
            results[label] = {
                "accuracy": {
                    code: spread_of([x[name] for x in done], "accuracy")
                    for code, name in (("ours", "tested"), ("official", "official"))
                },
                "curves": {
                    code: [
                        spread(epoch)
                        for epoch in zip(*(x[code]["history"]["loss"] for x in done))
                    ]
                    for code in ("ours", "official")
                },
                "steps": {
                    name: max(largest_difference(x, name) for x in steps)
                    for name in ("official", "optax")
                },
            }
        return results

    def show(self, results: dict, console: Console) -> None:
        for label, row in results.items():
            table = new_table(f"official: {label}", "", "ours", "official")
            both = zip(*row["curves"].values())
            for epoch, losses in enumerate(both, 1):
                texts = (plus_minus(loss, 4) for loss in losses)
                table.add_row(f"training loss, epoch {epoch}", *texts)
            texts = (percent(x, 2) for x in row["accuracy"].values())
            table.add_row("test accuracy %", *texts)
            console.print(table)
            console.print(
                f"largest difference of the losses of {STEPS} steps: "
                f"{row['steps']['official']:.1e}, "
                f"{row['steps']['optax']:.1e} with optax's epsilon"
            )
