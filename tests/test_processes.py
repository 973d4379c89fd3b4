"""Processes that share a model: batches, results, and errors of all."""

import threading
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_moe import _processes, data, distribution, training
from keras_moe._files import locked
from tests.refusals import refuses


def test_one_process_has_its_own_error():
    with pytest.raises(ValueError, match="arrays of numbers; received: dtype=object"):
        _processes.gathered_batch({"captions": np.array([b"a", b"bc"], object)})
    with pytest.raises(TypeError, match="bad"):
        _processes.checked_all_gather(lambda: (_ for _ in ()).throw(TypeError("bad")))


def test_one_function_says_whether_keras_splits_models(monkeypatch):
    splits = keras.backend.backend() == "jax"
    assert (_processes.splitting_backend() is not None) is splits
    monkeypatch.setattr(keras.distribution, "DeviceMesh", lambda *_, **x: x["devices"])
    monkeypatch.setattr(
        keras.distribution, "DataParallel", lambda **x: x["device_mesh"]
    )
    monkeypatch.setattr(_processes, "splitting_backend", lambda: None)
    assert data.process_shard() == (0, 1)
    refuses("the only one on which", distribution.auto, "vmoe_digits", ["cpu:0"])
    # What another backend would have to have.
    backend = SimpleNamespace(process_shard=lambda: (1, 3))
    monkeypatch.setattr(_processes, "splitting_backend", lambda: backend)
    assert data.process_shard() == (1, 3)
    assert distribution.auto("vmoe_digits", ["cpu:0"]) == ["cpu:0"]


@pytest.fixture
def both(monkeypatch):
    """Calls a function of an index in two threads, as two processes would."""
    index, barrier = threading.local(), threading.Barrier(2, timeout=300)
    contents = {}

    def exchange(content):
        contents[index.value] = content
        barrier.wait()
        everything = [contents[0], contents[1]]
        barrier.wait()
        return everything

    backend = SimpleNamespace(exchange=exchange)
    monkeypatch.setattr(_processes, "splitting_backend", lambda: backend)
    monkeypatch.setattr(_processes, "process_shard", lambda: (index.value, 2))
    monkeypatch.setattr(keras.distribution, "distribution", lambda: "a distribution")

    def call(work):
        results = [None, None]

        def process(number):
            index.value = number
            try:
                results[number] = work(number)
            except Exception as error:
                results[number] = error

        threads = [threading.Thread(target=process, args=(n,)) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return call


def test_all_have_the_result_of_the_first(both):
    assert both(lambda n: _processes.broadcast_from_primary(lambda: 10 + n)) == [10, 10]


@pytest.mark.parametrize(("error", "expected"), [
    (FileNotFoundError("bad"), OSError),
    (ValueError("bad"), ValueError),
    # Any other, too: the second process would wait forever.
    (TypeError("bad"), RuntimeError),
])  # fmt: skip
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_is_an_error_of_all(both, error, expected, failing):
    def work(number):
        if number == failing:
            raise error

    results = both(lambda number: _processes.checked_all_gather(lambda: work(number)))
    assert [type(result) for result in results] == [expected] * 2
    message = "TypeError: bad" if expected is RuntimeError else "bad"
    assert [str(result) for result in results] == [message] * 2
    assert results[failing].__cause__ is error
    assert results[1 - failing].__cause__ is None


def test_a_folder_in_use_is_an_error_of_all(both, tmp_path):
    def hold(number):
        with training.run_lock(tmp_path):
            # Neither leaves before the other has come.
            return _processes.checked_all_gather(lambda: number)

    with locked(tmp_path / ".run.lock", "the run"):
        results = both(hold)
    assert all(isinstance(result, OSError) for result in results)
    assert all(
        f"the run in {tmp_path} (--output takes another folder); rec" in str(result)
        for result in results
    )
    assert both(hold) == [[0, 1]] * 2
