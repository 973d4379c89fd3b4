import time

import keras
import numpy as np
import pytest

from keras_moe.models import ViTBackbone, ViTImageClassifier, compilation
from tests.small_models import SMALL, images

X = images(4, *SMALL["image_shape"])
Y = np.array([0, 1, 2, 0], "int32")


def classifier(**kwargs):
    config = {**SMALL, "moe_layers": None, "num_layers": 1, "seed": 0}
    model = ViTImageClassifier(ViTBackbone.from_config(config), 3)
    model.compile(keras.optimizers.SGD(0.1), **kwargs)
    return model


@pytest.mark.every_backend
def test_first_steps_are_announced_once_on_stderr(monkeypatch, capsys):
    monkeypatch.setattr(compilation, "LEAST_SECONDS", 0.0)
    model = classifier()
    step = type(model).train_step

    def slow_step(self, *args):
        time.sleep(0.1)  # Tracing takes long enough for the line's thread.
        return step(self, *args)

    monkeypatch.setattr(type(model), "train_step", slow_step)
    model.fit(X, Y, batch_size=2, validation_data=(X, Y))
    output, errors = capsys.readouterr()
    compiles = keras.backend.backend() != "torch"
    assert errors.count("Compiling the first training step... ") == compiles
    assert "Compiling" not in output
    # The function itself is back in its place.
    assert getattr(model.train_function, "__name__", "") != "first_step"
    model.fit(X, Y, batch_size=2)
    assert "Compiling" not in capsys.readouterr().err


def quiet_fit(model):
    model.fit(X, Y, verbose=0, validation_data=(X, Y))


def quiet_fit_by_place(model):
    model.fit(X, Y, 2, 1, 0)


def quiet_evaluate_and_predict(model):
    model.evaluate(X, Y, 2, 0)
    model.predict(X, 2, 0)


@pytest.mark.parametrize(
    "call", [quiet_fit, quiet_fit_by_place, quiet_evaluate_and_predict]
)
def test_nothing_is_announced_with_verbose_0(monkeypatch, capsys, call):
    monkeypatch.setattr(compilation, "LEAST_SECONDS", 0.0)
    call(classifier())
    assert "Compiling" not in capsys.readouterr().err


@pytest.mark.every_backend
def test_a_failing_first_step_ends_its_line_and_leaves_the_model_usable(
    monkeypatch, capsys
):
    monkeypatch.setattr(compilation, "LEAST_SECONDS", 0.0)
    model = classifier()

    def failing_step(self, *args):
        time.sleep(0.1)
        raise RuntimeError("broken step")

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "train_step", failing_step)
        with pytest.raises(Exception, match="broken step"):
            model.fit(X, Y)
    assert capsys.readouterr().err.count(" s\n") == (keras.backend.backend() != "torch")
    model.make_train_function(force=True)
    model.fit(X, Y, verbose=0)


def test_short_compilations_and_eager_models_say_nothing(monkeypatch, capsys):
    monkeypatch.setattr(compilation, "LEAST_SECONDS", 1e9)
    classifier().fit(X, Y)
    monkeypatch.setattr(compilation, "LEAST_SECONDS", 0.0)
    classifier(run_eagerly=True).fit(X, Y)
    assert "Compiling" not in capsys.readouterr().err
