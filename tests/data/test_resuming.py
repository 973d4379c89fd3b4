"""Batches without end that begin anywhere."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe.data import load, num_examples

tf = pytest.importorskip("tensorflow")

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (8, 8, 1)
# 1347 images: 6 batches in an epoch, and 147 images left out.
BATCH = 200
AUGMENT = ["random_resized_crop", "flip", "rotation", "mixup"]
backend_free = pytest.mark.backend_free


def endless(start_batch=0, **options):
    settings = {"image_shape": SHAPE, "batch_size": BATCH, "augment": AUGMENT}
    return load(
        "digits",
        "train",
        **{**settings, **options},
        repeat=True,
        start_batch=start_batch,
    )


def first(dataset, count):
    return list(dataset.take(count).as_numpy_iterator())


def same(some, others):
    pairs = zip(some, others, strict=True)
    return all(np.array_equal(a, b) for x, y in pairs for a, b in zip(x, y))


@pytest.mark.backend_free
def test_a_later_start_gives_the_same_batches():
    whole = first(endless(), 14)
    # Within the first epoch, at the ends of epochs, in the third.
    for start in (5, 6, 13):
        assert same(first(endless(start), 14 - start), whole[start:])
    # However often it was read, and whatever was drawn before.
    dataset = endless(9)
    tf.random.set_seed(1)
    tf.random.uniform([])
    assert same(first(dataset, 3), whole[9:12])
    assert same(first(dataset, 3), whole[9:12])
    # No batch comes twice.
    assert len({images.tobytes() for images, _ in whole}) == 14


@backend_free
def test_an_epoch_has_every_image_at_most_once():
    options = {"augment": None, "batch_size": 449}
    assert num_examples("digits", "train") == 3 * 449
    whole, _ = zip(*load("digits", "train", SHAPE, shuffle=False).as_numpy_iterator())
    every = sorted(image.tobytes() for image in np.concatenate(whole))
    orders = []
    for epoch in range(2):
        images, _ = zip(*first(endless(3 * epoch, **options), 3))
        order = [image.tobytes() for image in np.concatenate(images)]
        assert sorted(order) == every
        orders.append(order)
    assert orders[0] != orders[1]
    # Each epoch leaves out other images that do not fill a batch.
    seen = [
        {
            image.tobytes()
            for images, _ in first(endless(6 * epoch), 6)
            for image in images
        }
        for epoch in range(2)
    ]
    assert seen[0] != seen[1]


@backend_free
def test_seeds_differ():
    assert not same(first(endless(), 2), first(endless(seed=1), 2))
    plain = {"augment": None, "shuffle": False}
    ordered = [first(endless(seed=seed, **plain), 7) for seed in (0, 1)]
    assert same(*ordered)
    assert same(ordered[0][6:], ordered[0][:1])


PROCESS = """
import sys
import numpy as np
from keras_moe.data import load
batches = load("digits", "train", (8, 8, 1), 200, ["random_resized_crop", "flip",
    "rotation", "mixup"], repeat=True, start_batch=8)
images, labels = zip(*batches.take(2).as_numpy_iterator())
np.savez(sys.argv[1], images=np.stack(images), labels=np.stack(labels))
"""


@backend_free
def test_another_process_gives_the_same_batches(tmp_path):
    path = tmp_path / "batches.npz"
    subprocess.run(
        [sys.executable, "-c", PROCESS, str(path)],
        cwd=ROOT,
        # The pipeline imports TensorFlow; another backend would come on top.
        env={**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "tensorflow"},
        check=True,
    )
    images, labels = zip(*first(endless(), 10)[8:])
    with np.load(path) as actual:
        np.testing.assert_array_equal(actual["images"], images)
        np.testing.assert_array_equal(actual["labels"], labels)


@backend_free
def test_seeking_reads_nothing():
    # A million epochs later, as quickly as at the start.
    assert len(first(endless(6_000_001), 1)) == 1


@pytest.mark.backend_free
def test_a_state_of_its_own_is_warned_of():
    def noise(images):
        return images + tf.random.uniform(tf.shape(images))

    endless(augment=noise)
    with pytest.warns(UserWarning, match="random state of their own"):
        endless(3, augment=noise)


def test_fit_takes_steps_of_it():
    model = keras.Sequential(
        [keras.Input(SHAPE), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    model.compile("sgd", "mse")
    history = model.fit(endless(4), epochs=3, steps_per_epoch=2, verbose=0).history
    assert len(history["loss"]) == 3
    assert int(model.optimizer.iterations) == 6


@backend_free
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_batch": 3}, "repeat=False, start_batch=3"),
        ({"repeat": True, "start_batch": -1}, "start_batch=-1"),
        ({"repeat": True, "batch_size": 451}, "450 examples.*batch_size=451"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=f"Expected.*received: .*{message}|{message}"):
        load("digits", "test", SHAPE, **options)
