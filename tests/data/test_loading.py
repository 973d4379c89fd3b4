"""Batches of images and labels: order, augmentation by name, starts anywhere."""

import hashlib

import keras
import numpy as np
import pytest

from keras_moe.data import _pipeline, load, load_digits, num_examples
from keras_moe.data.augmentation import _by_name
from tests.forks import run_python
from tests.pipelines import arrays, numbers, same, save

tf = pytest.importorskip("tensorflow")


SHAPE = (16, 16, 3)


def digits(split="test", **options):
    """All images and labels of a pass over the digits."""
    return arrays(load("digits", split, SHAPE, **options))


@pytest.mark.parametrize("shape", [(16, 16, 3), (8, 8, 1), (20, 12, 1)])
def test_digits_are_those_of_load_digits(shape):
    images, labels = arrays(load("digits", "test", shape))
    expected, expected_labels = load_digits("test", shape)
    np.testing.assert_allclose(images, expected, atol=1e-6)
    np.testing.assert_array_equal(labels, expected_labels)
    assert images.dtype == "float32"
    assert labels.dtype == "int32"


def test_batches():
    dataset = load("digits", "test", SHAPE, batch_size=64)
    assert len(dataset) == 8
    assert [len(labels) for _, labels in dataset] == [64] * 7 + [2]
    assert dataset.element_spec[0].shape == (None, *SHAPE)
    full = load("digits", "test", SHAPE, batch_size=64, drop_remainder=True)
    assert len(full) == 7
    assert full.element_spec[0].shape == (64, *SHAPE)
    labels = digits(one_hot=True)[1]
    np.testing.assert_array_equal(labels, np.eye(10)[digits()[1]])
    assert labels.dtype == "float32"


def test_training_data_is_shuffled_by_seed_and_pass():
    dataset = load("digits", "train", SHAPE)
    first, second = arrays(dataset), arrays(dataset)
    assert not same(first, second)
    assert same(first, digits("train"))
    other = digits("train", seed=1)
    assert not same(first, other)
    ordered = digits("train", shuffle=False)
    np.testing.assert_array_equal(ordered[1], load_digits("train")[1])
    # The same images, whatever the seed: the split does not depend on it.
    for labels in (first[1], other[1]):
        np.testing.assert_array_equal(np.bincount(labels), np.bincount(ordered[1]))
    # Other splits keep their order.
    assert same(digits(), digits(shuffle=False))
    assert not same(digits(), digits(shuffle=True))


NAMES = ("random_resized_crop", "randaugment", "mixup", "flip", "cutmix")


# The others have tests of their own, below and in test_augmentation.py.
@pytest.mark.parametrize("augment", ["flip", "mixup", NAMES], ids=str)
def test_every_name_works_with_every_backend(augment):
    def make(seed):
        # The test split includes the batch that is not full.
        return load("digits", "test", SHAPE, augment=augment, seed=seed, batch_size=100)

    dataset = make(0)
    first, second = arrays(dataset), arrays(dataset)
    assert first[0].shape == (450, *SHAPE)
    assert first[0].dtype == "float32"
    assert first[0].min() >= -1
    assert first[0].max() <= 1
    # Something happens, and neither everything turns black nor white.
    plain = digits()[0]
    assert np.abs(first[0] - plain).mean() > 0.005
    assert abs(first[0].mean() - plain.mean()) < 0.3
    # Another pass and another seed give other images; the same seed gives the same.
    assert not same(first, second)
    assert not same(first, arrays(make(1)))
    # Under any policy.
    keras.config.set_dtype_policy("mixed_bfloat16")
    again = make(0)
    assert same(first, arrays(again))
    assert same(second, arrays(again))


def value_of(labels):
    # Images of one value per class, such that mixtures of labels foretell the pixels.
    return labels @ np.linspace(-1, 1, 10)


def paint(data):
    """Replaces the images by one value per class."""
    value = tf.cast(tf.argmax(data["labels"], -1), "float32") * (255 / 9)
    return {**data, "images": 0 * data["images"] + value[:, None, None, None]}


# Plain functions may carry the attribute.
paint.mixes_labels = True


def test_mixup_and_cutmix_mix_labels_like_images():
    images, labels = digits(augment=[paint, "mixup"], batch_size=90)
    np.testing.assert_allclose(labels.sum(1), 1, atol=1e-6)
    assert (np.count_nonzero(labels > 1e-3, axis=1) == 2).mean() > 0.2
    expected = value_of(labels)[:, None, None, None]
    np.testing.assert_allclose(images, expected + 0 * images, atol=1e-5)
    images, labels = digits(augment=[paint, "cutmix"], batch_size=90)
    np.testing.assert_allclose(labels.sum(1), 1, atol=1e-5)
    # A box has whole pixels: at most one row and one column more or less.
    difference = np.abs(images.mean((1, 2, 3)) - value_of(labels))
    assert difference.max() < 2 * 2 / 16
    assert difference.mean() < 0.05
    mixed = [len(np.unique(image.round(4))) for image in images]
    assert set(mixed) == {1, 2}


def test_layers_of_keras():
    def mixing():
        layers = keras.layers
        return layers.Pipeline([layers.RandomFlip(seed=1), layers.MixUp(seed=2)])

    rotation = keras.layers.RandomRotation(0.1, seed=1)
    # A layer that is used again starts again.
    for made in ([mixing(), mixing()], [rotation, rotation]):
        first, second = (digits(augment=layer) for layer in made)
        assert same(first, second)
        assert first[0].shape == (450, *SHAPE)
        assert not np.array_equal(first[0], digits()[0])
    # And outside the pipeline it has its own generator as before.
    image = np.random.default_rng(0).uniform(size=(1, 8, 8, 1)).astype("float32")
    one, other = (rotation(image, training=True) for _ in "ab")
    assert not keras.ops.all(one == other)


def test_functions_see_pixels():
    plain = digits()[0]
    seen = []

    def invert(images):
        seen.append(images.shape)
        return 255.0 - images

    inverted = digits(augment=invert)[0]
    np.testing.assert_allclose(inverted, -plain, atol=1e-5)
    assert seen[0] == SHAPE
    # After a layer that mixes labels, in batches.
    seen.clear()
    load("digits", "test", SHAPE, augment=["mixup", invert])
    assert seen[0].rank == 4
    # What leaves the range is clipped, and layers may change the size.
    images, _ = digits(augment=lambda x: 3 * x - 100)
    assert (images.min(), images.max()) == (-1, 1)
    crop = keras.layers.RandomCrop(8, 12, seed=0)
    assert digits(augment=crop)[0].shape[1:] == (8, 12, 3)


@pytest.mark.every_backend
def test_fit_takes_the_pipeline():
    model = keras.Sequential(
        [keras.Input(SHAPE), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    train = load("digits", "train", SHAPE, augment=["flip", "mixup"])
    test = load("digits", "test", SHAPE, one_hot=True)
    history = model.fit(train, validation_data=test, epochs=2, verbose=0).history
    assert history["val_accuracy"][-1] > 0.3


def test_keras_cv_layers():
    # Skipped only where KerasCV cannot be imported.
    keras_cv = pytest.importorskip("keras_cv")
    layers = [
        keras_cv.layers.RandomFlip("horizontal", seed=1),
        keras_cv.layers.RandomBrightness(factor=0.2, value_range=(0, 255), seed=2),
        keras_cv.layers.MixUp(seed=3),
    ]
    images, labels = digits(augment=layers)
    plain = digits()[0]
    assert images.shape == plain.shape
    assert images.dtype == labels.dtype == "float32"
    assert np.abs(images - plain).mean() > 0.01
    assert abs(images.mean() - plain.mean()) < 0.2
    np.testing.assert_allclose(labels.sum(1), 1, atol=1e-5)
    assert (labels.max(1) < 1).any()


def test_names_with_options_are_the_layers_with_these():
    def make(name, **options):
        return _by_name({"name": name, **options}, SHAPE, seed=3)

    assert make("mixup", alpha=0.5).alpha == 0.5
    assert make("cutmix", factor=0.5).factor == (0, 0.5)
    assert make("randaugment", magnitude=0.25).magnitude == 0.25
    assert make("random_resized_crop", scale=[0.5, 1.0]).scale == (0.5, 1.0)
    assert make("rotation").get_config()["fill_mode"] == "nearest"
    translation = make("translation", factor=0.3)
    assert translation.height_factor == translation.width_factor == 0.3


GREY = (8, 8, 1)
# 1347 images: 6 batches in an epoch, and 147 images left out.
BATCH = 200
AUGMENT = ["random_resized_crop", "flip", "rotation", "mixup"]


def endless(start_batch=0, **options):
    settings = {"image_shape": GREY, "batch_size": BATCH, "augment": AUGMENT}
    settings |= {"repeat": True, "start_batch": start_batch, **options}
    return load("digits", "train", **settings)


def first(dataset, count):
    return list(dataset.take(count).as_numpy_iterator())


def same_batches(some, others):
    return all(same(x, y) for x, y in zip(some, others, strict=True))


def test_a_later_start_gives_the_same_batches():
    whole = first(endless(), 14)
    # Within the first epoch, and at the end of the second.
    for start in (5, 12):
        assert same_batches(first(endless(start), 14 - start), whole[start:])
    # However often it was read, and whatever was drawn before.
    dataset = endless(9)
    tf.random.set_seed(1)
    tf.random.uniform([])
    assert same_batches(first(dataset, 3), whole[9:12])
    assert same_batches(first(dataset, 3), whole[9:12])
    # No batch comes twice.
    assert len({images.tobytes() for images, _ in whole}) == 14
    # A million epochs later, as quickly as at the start.
    assert len(first(endless(6_000_001), 1)) == 1


def test_passes_in_runs_are_the_same(tmp_path, monkeypatch):
    for number in range(23):
        save(tmp_path / "train" / "ab"[number % 2] / f"{number}.png", number)
    options = {"image_shape": GREY, "batch_size": 4, "repeat": True}

    def batches(start=0):
        dataset = load(f"folder:{tmp_path}", "train", start_batch=start, **options)
        return numbers(dataset.take(20 - start))

    whole = batches()
    assert len({*map(str, whole)}) == 20
    # Runs of one pass of five batches, and of two.
    for size in (1, 21):
        monkeypatch.setattr(_pipeline, "_EXAMPLES_OF_A_RUN", size)
        for start in (0, 13) if size == 1 else (7,):
            assert batches(start) == whole[start:]


def test_an_epoch_has_every_image_at_most_once():
    options = {"augment": None, "batch_size": 449}
    assert num_examples("digits", "train") == 3 * 449
    whole, _ = zip(*load("digits", "train", GREY, shuffle=False).as_numpy_iterator())
    every = sorted(image.tobytes() for image in np.concatenate(whole))
    orders = []
    for epoch in range(2):
        images, _ = zip(*first(endless(3 * epoch, **options), 3))
        order = [image.tobytes() for image in np.concatenate(images)]
        assert sorted(order) == every
        orders.append(order)
    assert orders[0] != orders[1]
    # Each epoch leaves out other images that do not fill a batch.
    seen = [np.concatenate(next(zip(*first(endless(6 * n), 6)))) for n in range(2)]
    assert {x.tobytes() for x in seen[0]} != {x.tobytes() for x in seen[1]}


def digests(batches):
    return [hashlib.sha256(x.tobytes()).hexdigest() for batch in batches for x in batch]


def test_another_process_gives_the_same_batches():
    code = (
        "from tests.data.test_loading import *; print(*digests(first(endless(8), 2)))"
    )
    # The pipeline imports TensorFlow; another backend would come on top.
    done = run_python("-c", code, KERAS_BACKEND="tensorflow")
    assert done.stdout.split() == digests(first(endless(), 10)[8:])


def test_a_state_of_its_own_is_warned_of():
    def noise(images):
        return images + tf.random.uniform(tf.shape(images))

    endless(augment=noise)
    with pytest.warns(UserWarning, match="their own random state"):
        endless(3, augment=noise)
