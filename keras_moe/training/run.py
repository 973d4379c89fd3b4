"""A run: the model of a recipe, trained on its images."""

import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_moe import data
from keras_moe.processes import process_count, process_index
from keras_moe.training.checkpoints import list_checkpoints
from keras_moe.training.class_names import set_class_names
from keras_moe.training.datasets import Datasets
from keras_moe.training.extension import EXTENDABLE, check_extension
from keras_moe.training.non_finite import (
    NonFiniteLoss,
    StopOnNonFinite,
    first_non_finite_step,
)
from keras_moe.training.progress import Progress
from keras_moe.training.recipes import Recipe
from keras_moe.training.run_checkpoint import RunCheckpoint
from keras_moe.training.run_lock import holds_run_folder
from keras_moe.training.run_settings import run_settings
from keras_moe.training.storage import is_remote

# Without checkpoints, a run is made again from its start to see where it went wrong,
# if it is no longer than this.
_SHORT_RUN = 1000


class Training(NamedTuple):
    """The result of training.

    Attributes:
        model: the trained model. The `class_names` of its preprocessor are those of the
            recipe's data, or None where nobody knows them.
        history: lists with a value for each epoch: the loss and metrics of the
            objective, as `loss`, `accuracy`, `val_loss` and `val_accuracy` of
            classification; the latter are those of the test images.
        score: the objective's headline metric, such as the accuracy of the test
            images: that of the last epoch, or with `best="restore"` in the recipe's
            schedule that of the best.
    """

    model: keras.Model
    history: dict[str, list[float]]
    score: float


@holds_run_folder
def train(
    recipe: Recipe,
    datasets: Datasets | Callable[[int], Datasets] | None = None,
    data_dir: str | None = None,
    callbacks: Sequence[keras.callbacks.Callback] | Callable = (),
    verbose: Any = "auto",
    checkpoint_dir: str | os.PathLike | None = None,
    checkpoint_every: int | None = None,
    keep_checkpoints: int = 3,
    keep_every: int | None = None,
    resume: bool = True,
    branch_from: str | os.PathLike | None = None,
    extend: bool = False,
) -> Training:
    """Trains a model as a recipe says.

    The same recipe gives the same weights on one machine and backend: it sets all of
    Keras's random seeds. With `checkpoint_dir` a run that was ended, by whatever,
    resumes from its newest checkpoint when it is started again, and comes to the same
    weights and history as one that was not; see `RunCheckpoint`.

    A loss that is not finite ends the run. The steps since the last checkpoint are
    then made again to say in which layer it began.

    Args:
        recipe: the settings.
        datasets: images of your own instead of the recipe's. Or a function to
            them from the number of steps that were made, whose `train` begins after as
            many batches and does not end; checkpoints need this.
        data_dir: folder of TensorFlow Datasets.
        callbacks: callbacks for `fit`; or a function from the model and the `Datasets`
            to them, such as `RouterHealth` needs for its images.
        verbose: argument of `fit`.
        checkpoint_dir: a folder for the checkpoints of this run.
        checkpoint_every: steps between checkpoints; None is one at each epoch's end.
        keep_checkpoints: number of checkpoints that stay.
        keep_every: those of steps that this divides stay, too, for branches and soups.
        resume: whether a run whose checkpoints exist is resumed; if not, they are
            removed.
        branch_from: a checkpoint of another run, with which this one begins; see
            `RunCheckpoint` and `cooldown_branch`.
        extend: whether the run in `checkpoint_dir` may continue, also after its end,
            with a recipe of more `epochs` or `steps`, other `schedule_steps` or more
            `patience`. It resumes from its newest checkpoint with the learning rate of
            the longer schedule; a warning says if that differs from before, where
            `schedule_steps` leaves it as it was. Where a run of `steps` ended within
            an epoch, the rest of the epoch is a further row of the history.

    Returns:
        A `Training`: the model, the history and the objective's headline metric.

    Raises:
        ValueError: if the recipe, model and images do not fit together; if the
            checkpoints are of another recipe, or all corrupt; if an image cannot be
            read, or with `unreadable="exclude"` others than when the run began; or if
            the loss is not finite any more.
        OSError: if the last checkpoint cannot be written; or if another process, which
            the error names, trains in `checkpoint_dir`, see `run_lock`.

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
    if checkpoint_dir is not None and isinstance(datasets, Datasets):
        raise ValueError(
            "Expected a function from steps to datasets for a run with checkpoints; "
            f"received: datasets={type(datasets).__name__}"
        )
    if branch_from is not None and checkpoint_dir is None:
        raise ValueError(
            "Expected a checkpoint_dir for the branch's own checkpoints; "
            f"received: branch_from={branch_from!r}, checkpoint_dir=None"
        )
    keeps_best = recipe.schedule.best
    if keeps_best is not None and checkpoint_dir is None:
        raise ValueError(
            "Expected a checkpoint_dir for the best epoch's checkpoint; "
            f"received: best={keeps_best!r}, checkpoint_dir=None"
        )
    best = recipe.best_epoch()
    folder = None
    if checkpoint_dir is not None and not is_remote(checkpoint_dir):
        folder = Path(checkpoint_dir)
        if process_index() == 0 and not (resume and list_checkpoints(folder)):
            shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    run = _Run(recipe, datasets, data_dir, folder)
    model = run.new_model()
    checkpoint, first_step = None, 0
    if checkpoint_dir is not None:
        checkpoint = RunCheckpoint(
            checkpoint_dir,
            run.steps_per_epoch,
            checkpoint_every,
            keep_checkpoints,
            keep_every,
            run_settings(recipe, data_dir, datasets is not None, model),
            restart=not resume,
            branch_from=branch_from,
            best=None if keeps_best is None else best,
            may_differ=EXTENDABLE if extend else (),
        )
        first_step = checkpoint.restore(model)
        if checkpoint.changed:
            checkpoint.finished = not check_extension(
                recipe, checkpoint.changed, run.steps_per_epoch, first_step
            )
        if checkpoint.finished:
            # Averages take the weights' place, as at the end of `fit`.
            model.optimizer.finalize_variable_values(model.trainable_weights)
            return _training(model, checkpoint.history, recipe, checkpoint)
    images = run.datasets(first_step)
    test = images.test
    if keras.distribution.distribution() is not None:
        # Each batch is shared by the devices.
        x, y, weight = keras.utils.unpack_x_y_sample_weight(test)
        test = data.padded(x, y, weight, model=model)
    if callable(callbacks):
        callbacks = callbacks(model, images)
    every = [*recipe.callbacks(first_step), *callbacks, StopOnNonFinite()]
    if best is not None:
        every.append(best)
    if checkpoint is None:
        Progress().hand_to(every)
    else:
        if best is not None:
            # Unless the checkpoint has a state of its own.
            best.count_from(len(checkpoint.history.get("loss", ())))
        every = checkpoint.around(every)
    if first_step % run.steps_per_epoch and keras.backend.backend() == "tensorflow":
        # Makes the metrics' variables, which other backends have before the first step
        # and whose values are in the checkpoint.
        x, y, weight = keras.utils.unpack_x_y_sample_weight(test)
        model.evaluate(x, y, sample_weight=weight, steps=1, verbose=0)
    try:
        with data.reading_errors():
            history = model.fit(
                images.train,
                epochs=recipe.passes(run.steps_per_epoch),
                initial_epoch=first_step // run.steps_per_epoch,
                steps_per_epoch=run.steps_per_epoch,
                validation_data=test,
                shuffle=False,  # The batches come shuffled.
                callbacks=every,
                verbose=verbose,
            ).history
    except NonFiniteLoss as error:
        del model
        raise ValueError(_diagnosis(error, run, checkpoint, verbose)) from error
    if checkpoint is not None:
        history = checkpoint.history
    return _training(model, history, recipe, checkpoint)


class _Run:
    """The model that a recipe begins with, and its batches from any step on."""

    def __init__(self, recipe, datasets, data_dir, folder):
        self.recipe, self.own_datasets, self.data_dir = recipe, datasets, data_dir
        self.folder = folder
        self.model = None
        self._opened = {}

    def new_model(self):
        """Returns the compiled model at step 0; the last one is dropped."""
        recipe = self.recipe
        # One at a time is in memory.
        self.model = None
        keras.utils.set_random_seed(recipe.seed)
        if self.own_datasets is None:
            self.model = recipe.new_model(recipe.num_classes(self.data_dir))
            recipe.prepare(self.model, self.data_dir, self.folder)
        else:
            self.model = recipe.new_model(self.datasets(0).num_classes)
            # Nobody knows whether they are the preset's.
            set_class_names(self.model, None)
        self.steps_per_epoch = self.datasets(0).steps_per_epoch
        recipe.compile(self.model, self.steps_per_epoch)
        return self.model

    def datasets(self, step):
        """Returns the batches after so many steps."""
        if isinstance(self.own_datasets, Datasets):
            return self.own_datasets
        if step not in self._opened:
            self._opened[step] = (
                self.recipe.datasets(self.model, self.data_dir, start_step=step)
                if self.own_datasets is None
                else self.own_datasets(step)
            )
        return self._opened[step]

    def batches(self, step):
        """Yields the batches after so many steps, as NumPy arrays, without end."""
        while True:
            for batch in self.datasets(step).train:
                x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
                x, y = keras.tree.map_structure(_to_numpy, (x, y))
                yield x, y, weight


def _to_numpy(value):
    if value is None:
        return None
    return ops.convert_to_numpy(value) if ops.is_tensor(value) else np.asarray(value)


def _diagnosis(error, run, checkpoint, verbose):
    """Returns a message with what went wrong, where, and what is left."""
    recipe = run.recipe
    origin = None
    good = checkpoint and checkpoint.last
    alone = _has_all_weights()
    if alone and (good or error.step <= _SHORT_RUN):
        model = run.new_model()
        step = 0 if checkpoint is None else checkpoint.restore(model)
        batches = run.batches(step)
        origin = first_non_finite_step(model, batches, error, step, verbose)
    epoch = (error.step - 1) // run.steps_per_epoch + 1
    parts = [f"{error}, in epoch {epoch}"]
    if origin is not None:
        parts.append(f"The first NaN or Inf was {origin[1]}, in step {origin[0]}")
    elif alone:
        parts.append("With checkpoints, one would see where it began")
    if good:
        parts.append(f"The last good checkpoint is {good}")
    parts.append(f"Try less than learning_rate={recipe.schedule.learning_rate}")
    return ". ".join(parts)


def _has_all_weights():
    """Whether this process has all weights: alone, or without a distribution."""
    return keras.distribution.distribution() is None or process_count() == 1


def _training(model, history, recipe, checkpoint):
    history = {name: [float(x) for x in values] for name, values in history.items()}
    row = -1
    if recipe.schedule.best == "restore" and _has_all_weights():
        row = checkpoint.best_row if checkpoint.restore_best(model) else -1
    elif recipe.schedule.best == "restore":
        # No process of several has waited for the others' pieces of it.
        warnings.warn(
            "The model is that of the last epoch, as several processes share its "
            "weights: train(...) again with these checkpoints, in one process without "
            "a distribution, gives that of the best",
            stacklevel=3,
        )
    return Training(model, history, history[recipe.objective.headline.metric][row])
