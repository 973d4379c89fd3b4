"""Processes that share a model agree, and none waits for one that failed."""

import threading

import keras
import numpy as np
import pytest

from keras_moe.locks import FolderInUse, locked
from keras_moe.training import LocalStorage, agreement, local_storage, run_lock
from keras_moe.training.agreement import agreed, first_decides
from keras_moe.training.run_lock import LOCK
from keras_moe.training.tensor_writer import NonFiniteValues
from tests.training.test_checkpoints import cut, names

pytestmark = pytest.mark.backend_free


@pytest.fixture
def both(monkeypatch):
    """Calls a function of an index in two threads, which take two processes' place.

    It returns the results, with exceptions among them.
    """
    index, barrier = threading.local(), threading.Barrier(2, timeout=20)
    contents = {}

    def exchange(content):
        contents[index.value] = content
        barrier.wait()
        everything = [contents[0], contents[1]]
        barrier.wait()
        return everything

    kernels = "keras_moe.ops.kernels.sharded_arrays_jax"
    monkeypatch.setattr(f"{kernels}.exchange", exchange)
    monkeypatch.setattr(agreement, "process_shard", lambda: (index.value, 2))
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


def test_all_have_the_results_of_all(both):
    assert both(lambda number: agreed(lambda: 10 + number)) == [[10, 11]] * 2
    assert both(lambda number: first_decides(lambda: 10 + number)) == [10, 10]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NonFiniteValues("bad"), NonFiniteValues),
        (FileNotFoundError("bad"), OSError),
        (ValueError("bad"), ValueError),
        # Nobody has thought of it: the others would wait forever.
        (TypeError("bad"), RuntimeError),
    ],
)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_is_an_error_of_all(both, error, expected, failing):
    def work(number):
        if number == failing:
            raise error

    results = both(lambda number: agreed(lambda: work(number)))
    assert [type(result) for result in results] == [expected] * 2
    message = "TypeError: bad" if expected is RuntimeError else "bad"
    assert [str(result) for result in results] == [message] * 2
    assert results[failing].__cause__ is error
    assert results[1 - failing].__cause__ is None


def test_a_folder_in_use_is_an_error_of_all(both, tmp_path):
    def hold(number):
        with run_lock(tmp_path):
            return number

    with locked(tmp_path / LOCK, "the run"):
        results = both(hold)
    assert [type(result) for result in results] == [FolderInUse] * 2
    assert all(f"the run in {tmp_path}; rec" in str(result) for result in results)
    assert both(hold) == [0, 1]


def test_a_process_alone_has_its_own_error():
    with pytest.raises(TypeError, match="bad"):
        agreed(lambda: (_ for _ in ()).throw(TypeError("bad")))


def groups():
    return {"model": [keras.Variable(np.ones((2,)), dtype="float32", name="w")]}


def test_two_processes_take_one_local_checkpoint(both, tmp_path, monkeypatch):
    storages = [LocalStorage(tmp_path), LocalStorage(tmp_path)]

    def save(step):
        return both(lambda n: storages[n].save(step, groups(), {"step": step}).name)

    for step in (1, 2):
        assert save(step) == [f"step-0000000{step}"] * 2
    (path,) = tmp_path.glob("step-*1")
    assert names(path) == [
        "arrays-00000-of-00002.safetensors",
        "arrays-00001-of-00002.safetensors",
        "manifest.json",
        "state.json",
    ]

    def newest():
        return [checkpoint.step for checkpoint in both(lambda n: storages[n].newest())]

    assert newest() == [2, 2]
    # One that the second sees, and the first has just removed.
    paths = storages[1].paths()
    monkeypatch.setattr(storages[1], "paths", lambda: [*paths, tmp_path / "step-9"])
    assert newest() == [2, 2]
    # Damage in a file that one of them reads.
    cut(tmp_path / "step-00000002" / "arrays-00001-of-00002.safetensors")
    assert newest() == [1, 1]


def test_a_write_that_fails_in_one_process_leaves_nothing(both, tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    both(lambda number: storage.save(1, groups(), {}))
    write = local_storage.write_tensors

    def fails_in_the_second(path, tensors):
        if "00001-of" in path.name:
            raise TypeError("unexpected")
        return write(path, tensors)

    monkeypatch.setattr(local_storage, "write_tensors", fails_in_the_second)
    results = both(lambda number: storage.save(2, groups(), {}))
    assert [str(x) for x in results] == ["TypeError: unexpected"] * 2
    assert names(tmp_path) == ["step-00000001"]
