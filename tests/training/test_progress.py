"""One count of steps for a run, which its callbacks share."""

import keras
import numpy as np

from keras_moe import training
from keras_moe.training.callbacks import Progress, ProgressCallback, StopAfterBatches

X = np.ones((6, 1), "float32")


def fit(epochs, *callbacks, initial_epoch=0):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    options = {"initial_epoch": initial_epoch, "callbacks": callbacks, "verbose": 0}
    model.fit(X, X, batch_size=2, epochs=epochs, **options)


class Steps(ProgressCallback):
    """Records the count as each batch begins."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch, logs)
        self.steps.append(self.progress.step)


def test_a_shared_count_is_one_however_many_callbacks_report():
    progress, callbacks = (
        Progress(step=3),
        [Steps(), Steps(), keras.callbacks.History()],
    )
    progress.hand_to(callbacks)
    fit(3, *callbacks, initial_epoch=1)
    assert callbacks[0].steps == callbacks[1].steps == [4, 5, 6, 7, 8, 9]
    assert (progress.step, progress.epoch) == (9, 2)


def test_a_callback_alone_counts_for_itself():
    alone, stop = Steps(), StopAfterBatches(4)
    fit(3, alone, stop)
    assert alone.steps == [1, 2, 3, 4]
    # A second `fit` goes on from there.
    fit(1, alone)
    assert alone.steps[4:] == [5, 6, 7]


def test_callbacks_of_a_run_that_is_resumed_count_its_steps(tmp_path):
    def run(epochs, *callbacks):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        checkpoint = training.RunCheckpoint(tmp_path, steps_per_epoch=3)
        step = checkpoint.restore(model)
        callbacks = checkpoint.around(callbacks)
        epoch = step // 3
        options = {"initial_epoch": epoch, "callbacks": callbacks, "verbose": 0}
        model.fit(X, X, batch_size=2, epochs=epochs, **options)

    run(1)
    # It was not there before, and has no state in the checkpoint.
    steps, guard = Steps(), training.StopOnNonFinite()
    size = training.PeriodicEvaluation({"x": lambda _: {"y": 1.0}}, 2, "steps")
    run(2, steps, guard, size)
    assert steps.steps == [4, 5, 6]
    assert guard.progress is steps.progress is size.progress
    assert [(x["epoch"], x["step"]) for x in size.records] == [(2, 4), (2, 6)]
