"""Files of weights: interrupted, and of others who may mean harm."""

import h5py
import keras
import numpy as np
import pytest

from keras_moe.models import weights_file
from keras_moe.models.weights_file import new_hdf5, save_weights

pytestmark = [pytest.mark.backend_free, pytest.mark.usefixtures("op_by_op")]


@pytest.fixture
def model():
    made = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(8)])
    made.build((None, 8))
    return made


def fail_at(monkeypatch, call, error):
    """Lets one write to the file under the stream fail."""
    calls = []
    write_all = weights_file.write_all

    def write(file, data):
        calls.append(1)
        if len(calls) == call:
            raise error
        write_all(file, data)

    monkeypatch.setattr(weights_file, "write_all", write)


@pytest.mark.parametrize("error", [KeyboardInterrupt("now"), MemoryError("now")])
@pytest.mark.parametrize("call", [1, 2, 4])
def test_an_interrupt_in_a_write_is_raised_as_it_is(
    tmp_path, monkeypatch, model, call, error
):
    path = tmp_path / "a.weights.h5"
    path.write_bytes(b"older")

    def save_arrays():
        with new_hdf5(path) as file:
            for i in range(5):
                file[f"g{i}/x"] = np.ones((20, 20))

    for save in (save_arrays, lambda: save_weights(model, path)):
        fail_at(monkeypatch, call, error)
        with pytest.raises(type(error), match="now"):
            save()
        monkeypatch.undo()
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"older"


def test_an_interrupt_in_a_read_is_raised_as_it_is(tmp_path):
    class Interrupted:
        def seek(self, position):
            raise KeyboardInterrupt

    stream = weights_file._Stream(Interrupted(), tmp_path)
    assert stream.readinto(bytearray(8)) == 8
    with pytest.raises(KeyboardInterrupt):
        stream.check()


def test_an_error_of_the_work_is_not_hidden(tmp_path):
    with pytest.raises(KeyError, match="mine"), new_hdf5(tmp_path / "a.h5"):
        raise KeyError("mine")
    assert not list(tmp_path.iterdir())
    with new_hdf5(tmp_path / "a.h5") as file:
        file["x"] = 1.0
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["x"][()] == 1.0
