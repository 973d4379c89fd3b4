"""The classes of ImageNet's variants, and accuracies among them."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from keras_moe.evaluation import read_class_subset, zero_shot_from_model

pytestmark = pytest.mark.backend_free

NAMES = [f"class {number}" for number in range(1000)]


class Angles:
    """A model of pairs whose classes are directions: class 0, class 1, ..."""

    def encode_text(self, texts, batch_size):
        return self._directions(float(text.split()[-1]) for text in texts)

    def encode_images(self, images, batch_size):
        return self._directions(images[:, 0, 0, 0])

    def _directions(self, numbers):
        angles = np.array([*numbers]) * np.pi / 2000
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def images(*numbers):
    return np.array(numbers, "float32").reshape(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "first", "last", "others"),
    [
        ("imagenet_a", ("n01498041", 6), ("n12267677", 988), ("n02219486", 310)),
        ("imagenet_r", ("n01443537", 1), ("n12267677", 988), ("n02085620", 151)),
    ],
)
def test_members(name, first, last, others):
    subset = read_class_subset(name)
    place = dict(zip(subset.wordnet_ids, subset.numbers.tolist()))
    assert len(place) == len({*place.values()}) == 200
    assert (*place.items(),)[0] == first
    assert (*place.items(),)[-1] == last
    assert place[others[0]] == others[1]
    # ImageNet's classes are in the order of their ids.
    assert list(subset.wordnet_ids) == sorted(subset.wordnet_ids)
    assert np.all(np.diff(subset.numbers) > 0)
    if package := importlib.util.find_spec("tensorflow_datasets"):
        folder = Path(package.submodule_search_locations[0]) / "datasets/imagenet2012"
        every = (folder / "labels.txt").read_text().split()
        assert [every[number] for number in subset.numbers] == [*subset.wordnet_ids]


def test_zero_shot_among_the_classes():
    # The nearest class is 7, which ImageNet-A does not have; then come 6 and 11.
    arguments = Angles(), images(7.0, 8.0, 988.0), np.array([6, 11, 988]), NAMES
    assert zero_shot_from_model(*arguments, "{}").figures()["top_1"] == pytest.approx(
        1 / 3
    )
    result = zero_shot_from_model(*arguments, "{}", class_subset="imagenet_a")
    assert result.figures()["top_1"] == pytest.approx(2 / 3)
    assert result.ranks.tolist() == [1, 2, 1]
    assert result.per_class.shape == (200,)
    with pytest.raises(ValueError, match="an image of class 7"):
        zero_shot_from_model(
            Angles(), images(7.0), np.array([7]), NAMES, "{}", class_subset="imagenet_a"
        )
    with pytest.raises(ValueError, match=r"1,000 classes .* received: 2 names"):
        zero_shot_from_model(*arguments[:3], NAMES[:2], class_subset="imagenet_a")
    with pytest.raises(ValueError, match="class_subset"):
        read_class_subset("imagenet_v2")


def test_places_of_data_by_hand():
    subset = read_class_subset("imagenet_a")
    # Folders, one of which is not of the subset.
    places = subset.places(["n01531178", "n01440764", "n01498041"])
    assert places.tolist() == [1, -1, 0]
    assert subset.labels([2, 0], places).tolist() == [0, 1]
    with pytest.raises(ValueError, match="an image of class 1"):
        subset.labels([2, 1], places)
    assert subset.places()[[6, 988, 7]].tolist() == [0, 199, -1]
    for names, count in ((["cat", "dog"], 2), (None, 10)):
        with pytest.raises(ValueError, match="named by WordNet ids"):
            subset.places(names, count)
