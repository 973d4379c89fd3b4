"""Runs: train the model of a recipe on its data, and resume."""

import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_moe import data
from keras_moe._checks import unfit
from keras_moe._files import read_text, write_json
from keras_moe._processes import (
    broadcast_from_primary,
    process_index,
    rank_and_world_size,
)
from keras_moe.training import non_finite
from keras_moe.training._checkpoint_files import is_remote
from keras_moe.training.callbacks import Progress
from keras_moe.training.checkpoints import list_checkpoints, run_lock
from keras_moe.training.objectives import set_class_names
from keras_moe.training.recipes import Recipe
from keras_moe.training.run_checkpoint import RunCheckpoint
from keras_moe.training.sections import Datasets

# A run without checkpoints is repeated from its start to locate a non-finite value if
# it has at most this many steps.
_SHORT_RUN = 1000
# Settings that may change when a run is extended: its length and patience.
_EXTENDABLE = (
    "schedule.epochs",
    "schedule.steps",
    "schedule.schedule_steps",
    "schedule.patience",
)


# The linear probe of the starting features, which a resumed run reads.
_PROBE = "linear_probe.json"


class Training(NamedTuple):
    """The result of training.

    Attributes:
        model: the trained model, with the class names of the recipe's data.
        history: lists with one value per epoch of the loss and metrics, with the prefix
            `val_` for the test data.
        score: the objective's main metric of the last epoch, or of the best one with
            `best="restore"` in the schedule.
        linear_probe: accuracy of a linear probe of the starting features, or None; see
            `Classification`.
    """

    model: keras.Model
    history: dict[str, list[float]]
    score: float
    linear_probe: float | None = None


def train(
    recipe: Recipe,
    datasets: Datasets | Callable[[int], Datasets] | None = None,
    *,
    data_dir: str | None = None,
    callbacks: Sequence[keras.callbacks.Callback] | Callable = (),
    verbose: str | int = "auto",
    checkpoint_dir: str | os.PathLike | None = None,
    checkpoint_every: int | None = None,
    keep_checkpoints: int = 3,
    keep_every: int | None = None,
    resume: bool = True,
    branch_from: str | os.PathLike | None = None,
    extend: bool = False,
) -> Training:
    """Trains a model by a recipe.

    Sets all of Keras's random seeds, so a recipe gives the same weights again on the
    same machine and backend. With `checkpoint_dir`, a run that was interrupted or
    killed resumes from its newest checkpoint when started again, and ends with the
    same weights and history as an uninterrupted one; see `RunCheckpoint`.

    A non-finite loss ends the run. The steps since the last checkpoint are then
    repeated to find the layer in which it began.

    Args:
        recipe: the settings.
        datasets: your own data instead of the recipe's. For checkpoints, give a
            function from the number of past steps to `Datasets` with an infinite
            `train` that starts after as many batches.
        data_dir: folder of TensorFlow Datasets.
        callbacks: callbacks for `fit`; or a function from the model and the `Datasets`
            to callbacks, for example to give `RouterHealth` its images.
        verbose: see `fit`.
        checkpoint_dir: folder for the checkpoints of this run.
        checkpoint_every: steps between checkpoints; None saves after each epoch.
        keep_checkpoints: `keep` of `RunCheckpoint`; see there for `keep_every`, too.
        resume: whether to resume from existing checkpoints; otherwise they are deleted.
        branch_from: checkpoint of another run to start from; see `RunCheckpoint` and
            `cooldown_branch`.
        extend: whether the run in `checkpoint_dir` may continue with more `epochs` or
            `steps`, other `schedule_steps` or more `patience`, even after its end. The
            learning rate follows the longer schedule, with a warning if it jumps
            (`schedule_steps` can prevent that). If a run of `steps` ended within an
            epoch, the rest of that epoch is another row of the history.

    Raises:
        OSError: the last checkpoint cannot be written, or another process trains in
            `checkpoint_dir`, see `run_lock`.

    Example:

    >>> from keras_moe.training import load_recipe, train
    >>> recipe = load_recipe(
    ...     "mumoe_digits",
    ...     data={"batch_size": 512},
    ...     model={"num_layers": 1, "hidden_dim": 8},
    ...     schedule={"epochs": 1, "warmup_steps": 0},
    ... )
    >>> sorted(train(recipe, verbose=0).history)
    ['accuracy', 'loss', 'val_accuracy', 'val_loss']
    """
    if recipe.compilation_cache is not None:
        backend, cache = keras.backend.backend(), recipe.compilation_cache
        if backend != "jax":
            expected = "the JAX backend, the only one that keeps compiled programs"
            raise unfit(expected, compilation_cache=cache, backend=backend)
        from keras_moe._backends.jax import use_cache

        use_cache(os.path.expanduser(cache))
    best = recipe.schedule.best
    if checkpoint_dir is None:
        if best is not None or branch_from is not None:
            expected = "a checkpoint_dir with best or branch_from"
            raise unfit(expected, "none", best=best, branch_from=branch_from)
        run = _Run(recipe, datasets, data_dir)
        return _trained(run, None, callbacks, verbose)
    if isinstance(datasets, Datasets):
        expected = "a function from steps to datasets for a run with checkpoints"
        raise unfit(expected, f"datasets={type(datasets).__name__}")
    with run_lock(checkpoint_dir):
        # Folder for a trained tokenizer.
        folder = None if is_remote(checkpoint_dir) else Path(checkpoint_dir)
        resumes = resume and list_checkpoints(checkpoint_dir)
        if folder and not resumes and process_index() == 0:
            shutil.rmtree(folder / "tokenizer", ignore_errors=True)
            (folder / _PROBE).unlink(missing_ok=True)
        run = _Run(recipe, datasets, data_dir, folder)
        checkpoint = RunCheckpoint(
            checkpoint_dir,
            run.steps_per_epoch,
            every=checkpoint_every,
            keep=keep_checkpoints,
            keep_every=keep_every,
            settings=run.settings(),
            restart=not resume,
            branch_from=branch_from,
            best=None if best is None else run.best,
            may_differ=_EXTENDABLE if extend else (),
            endless=True,
        )
        return _trained(run, checkpoint, callbacks, verbose)


def settings_of_runs(recipe: Recipe) -> dict[str, Any]:
    """The settings of a recipe that its runs depend on."""
    settings = recipe.settings()
    for name in ("description", "reference", "notes", "compilation_cache"):
        del settings[name]
    return settings


class _Run:
    """The initial model of a recipe, and its batches from any step on."""

    def __init__(self, recipe, datasets, data_dir, folder=None):
        self.recipe = recipe
        self.own_datasets = datasets
        self.data_dir = data_dir
        self.folder = folder
        self.best = recipe.best_epoch()
        self.model = None
        self._opened = {}
        self.new_model()
        self.linear_probe = self._probe() if datasets is None else None

    def _probe(self) -> Any:
        path = self.folder and self.folder / _PROBE

        def earlier():
            if path and path.is_file():
                return json.loads(read_text(path, self.folder))
            return None

        # Hosts may share no folder, and all of them probe together or none does.
        accuracy = broadcast_from_primary(earlier)
        if accuracy is not None:
            return accuracy
        recipe = self.recipe
        accuracy = recipe.objective.probe(self.model, recipe.data, self.data_dir)
        if path and accuracy is not None and process_index() == 0:
            write_json(path, accuracy)
        return accuracy

    def new_model(self) -> None:
        """Builds the compiled model at step 0 and drops the previous one."""
        recipe = self.recipe
        # Only one model at a time is in memory.
        self.model = None
        keras.utils.set_random_seed(recipe.seed)
        if self.own_datasets is None:
            objective, *where = recipe.objective, recipe.data, self.data_dir
            self.model = recipe.new_model(objective.num_classes(*where))
            objective.prepare(self.model, *where, self.folder)
        else:
            self.model = recipe.new_model(self.datasets(0).num_classes)
            # The preset's names may belong to other data.
            set_class_names(self.model, None)
        self.steps_per_epoch = self.datasets(0).steps_per_epoch
        recipe.compile(self.model, self.steps_per_epoch)

    def datasets(self, step: int) -> Datasets:
        """Returns the data after a number of steps."""
        if isinstance(self.own_datasets, Datasets):
            return self.own_datasets
        if step not in self._opened:
            self._opened[step] = (
                self.recipe.datasets(self.model, self.data_dir, start_step=step)
                if self.own_datasets is None
                else self.own_datasets(step)
            )
        return self._opened[step]

    def batches(self, step: int) -> Iterator[tuple]:
        """Yields the batches after a number of steps as NumPy arrays, endlessly."""
        while True:
            for batch in self.datasets(step).train:
                x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
                yield _to_numpy(x), _to_numpy(y), weight

    def settings(self) -> dict[str, Any]:
        """Returns all that a run depends on, images left out as unreadable included."""
        recipe, settings = self.recipe, settings_of_runs(self.recipe)
        if self.own_datasets is not None:
            return settings
        left_out = None
        if recipe.data.unreadable is not None:
            left_out = recipe.data.left_out(self.data_dir)
        if left_out is not None:
            settings["unreadable_images"] = {
                split: {
                    "left_out": len(indices),
                    "sha256": hashlib.sha256(indices.astype("<i8")).hexdigest(),
                }
                for split, indices in zip(("train", "test"), left_out)
            }
        return settings | recipe.objective.taken_from_data(self.model, recipe.data)


def _trained(run, checkpoint, callbacks, verbose) -> Training:
    step = 0
    if checkpoint is not None:
        step = checkpoint.restore(run.model)
        if checkpoint.changed:
            checkpoint.finished = not _is_extended(run, checkpoint.changed, step)
        if checkpoint.finished:
            # As at the end of `fit`, averages replace the weights.
            run.model.optimizer.finalize_variable_values(run.model.trainable_weights)
            return _result(run, checkpoint, checkpoint.history)
        if step and verbose:
            epoch = step // run.steps_per_epoch + 1
            print(f"Resuming at step {step:,}, in epoch {epoch}", file=sys.stderr)
    try:
        with data.reading_errors():
            history = _fit(run, checkpoint, step, callbacks, verbose)
    except non_finite.NonFiniteLoss as error:
        raise ValueError(_diagnosis(run, checkpoint, error, verbose)) from error
    return _result(run, checkpoint, checkpoint.history if checkpoint else history)


def _fit(run, checkpoint, step, callbacks, verbose):
    images, model = run.datasets(step), run.model
    test = images.test
    if keras.distribution.distribution() is not None:
        # Each batch is split over the devices.
        x, y, weight = keras.utils.unpack_x_y_sample_weight(test)
        test = data.padded(x, y, weight, model=model)
    given: Any = callbacks(model, images) if callable(callbacks) else callbacks
    callbacks = [*run.recipe.callbacks(), *given, non_finite.StopOnNonFinite()]
    if run.best is not None:
        callbacks.append(run.best)
    if checkpoint is None:
        Progress().hand_to(callbacks)
    else:
        if run.best is not None:
            # Unless the checkpoint has its state.
            run.best.epochs = len(checkpoint.history.get("loss", ()))
        callbacks = checkpoint.around(callbacks)
    if step % run.steps_per_epoch and keras.backend.backend() == "tensorflow":
        # Creates the metrics' variables, which are in the checkpoint and which other
        # backends create before the first step.
        x, y, weight = keras.utils.unpack_x_y_sample_weight(test)
        model.evaluate(x, y, sample_weight=weight, steps=1, verbose=0)
    return model.fit(
        images.train,
        epochs=run.recipe.passes(run.steps_per_epoch),
        initial_epoch=step // run.steps_per_epoch,
        steps_per_epoch=run.steps_per_epoch,
        validation_data=test,
        shuffle=False,  # The batches come shuffled.
        callbacks=callbacks,
        verbose=verbose,
    ).history


def _is_extended(run, before, batches):
    """Whether an extended run has steps left; warns if the learning rate jumps."""
    recipe, steps_per_epoch = run.recipe, run.steps_per_epoch
    old = recipe.replace(**before)
    total, old_total = (x.total_steps(steps_per_epoch) for x in (recipe, old))
    if total < old_total:
        raise unfit(f"a run of at least {old_total} steps to extend", f"{total} steps")
    step = batches // recipe.optimizer.gradient_accumulation_steps
    rates = [float(x.learning_rate(steps_per_epoch)(step)) for x in (old, recipe)]
    if abs(rates[1] - rates[0]) > 1e-6 * recipe.schedule.learning_rate:
        warnings.warn(
            f"After step {step} the learning rate goes from {rates[0]:.3g} to "
            f"{rates[1]:.3g}, that of a run of {total} steps with decay="
            f"{recipe.schedule.decay!r}; with schedule_steps="
            f"{old.schedule.schedule_steps or old_total} it goes on with "
            "final_learning_rate",
            stacklevel=4,
        )
    return step < total


def _diagnosis(run, checkpoint, error, verbose):
    """Returns what went wrong, where it began, and which checkpoint is left."""
    origin = None
    good = checkpoint and checkpoint.last
    alone = rank_and_world_size()[1] == 1
    if alone and (good or error.step <= _SHORT_RUN):
        run.new_model()
        step = 0 if checkpoint is None else checkpoint.restore(run.model)
        batches = run.batches(step)
        origin = non_finite.first_non_finite_step(
            run.model, batches, error, step, verbose
        )
    message = f"{error}, in epoch {(error.step - 1) // run.steps_per_epoch + 1}"
    if origin is not None:
        message += f". The first NaN or Inf was {origin[1]}, in step {origin[0]}"
    if good:
        message += f". The last good checkpoint is {good}"
    rate = run.recipe.schedule.learning_rate
    return f"{message}. Try less than learning_rate={rate} (--learning-rate)"


def _result(run, checkpoint, history):
    row = -1
    if run.recipe.schedule.best == "restore":
        if rank_and_world_size()[1] > 1:
            # Other processes may not have written their part of the checkpoint yet.
            warnings.warn(
                "The model is that of the last epoch, as several processes share "
                "its weights: train(...) again with these checkpoints, in one "
                "process without a distribution, restores the best",
                stacklevel=4,
            )
        elif checkpoint.restore_best(run.model):
            row = checkpoint.best_row
    history = {name: [float(x) for x in values] for name, values in history.items()}
    score = history[run.recipe.objective.monitor.metric][row]
    return Training(run.model, history, score, run.linear_probe)


def _to_numpy(values):
    return keras.tree.map_structure(
        lambda x: None if x is None else ops.convert_to_numpy(x), values
    )
