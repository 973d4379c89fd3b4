"""Zero-shot classification, its prompts, and its subsets of ImageNet's classes."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from keras_moe.evaluation import (
    class_embeddings,
    prompts,
    read_class_names,
    read_class_subset,
    read_templates,
    zero_shot,
    zero_shot_from_model,
)
from tests.published import import_open_clip
from tests.refusals import refuses


def test_class_embeddings_are_those_of_open_clip():
    open_clip = import_open_clip()
    import torch

    table = np.random.default_rng(0).normal(size=(3 * 7, 16)).astype("float32")
    texts = []

    class Model:
        def encode_text(self, numbers, normalize):
            x = torch.tensor(table)[numbers]
            return torch.nn.functional.normalize(x, dim=-1) if normalize else x

    def tokenizer(batch):
        texts.extend(batch)
        return torch.arange(len(texts) - len(batch), len(texts))

    names, templates = ["cat", "{dog}", "owl"], read_templates("simple")
    theirs = open_clip.build_zero_shot_classifier(
        Model(), tokenizer, names, templates, num_classes_per_batch=2
    )
    assert prompts(names, templates) == texts
    embeddings = class_embeddings(table.reshape(3, 7, 16))
    np.testing.assert_allclose(embeddings, theirs.numpy().T, atol=1e-6)
    assert templates == open_clip.SIMPLE_IMAGENET_TEMPLATES or [
        t("x") for t in templates
    ] == [t("x") for t in open_clip.SIMPLE_IMAGENET_TEMPLATES]
    assert len(read_templates("imagenet")) == 80
    assert read_class_names("imagenet") == tuple(open_clip.IMAGENET_CLASSNAMES)


def test_accuracies_against_brute_force():
    rng = np.random.default_rng(1)
    images, classes = rng.normal(size=(50, 8)), rng.normal(size=(7, 8))
    labels = rng.integers(6, size=50)
    result = zero_shot(images.astype("float32"), labels, classes)
    cosines = images @ (classes / np.linalg.norm(classes, axis=1, keepdims=True)).T
    order = np.argsort(-cosines, axis=1)
    expected = [
        np.mean([y in row[:k] for y, row in zip(labels, order)]) for k in (1, 5)
    ]
    np.testing.assert_allclose(result.accuracy, expected)
    for c in range(6):
        mine = labels == c
        assert result.per_class[c] == np.mean(order[mine, 0] == c)
    assert np.isnan(result.per_class[6])
    figures = result.figures()
    assert figures["top_5"] == result.accuracy[1]
    assert figures["mean_per_class"] == pytest.approx(result.per_class[:6].mean())
    # Too few classes for the top five, and the first of equal ones is nearest.
    result = zero_shot(np.ones((4, 2)), [0, 1, 2, 2], np.full((3, 2), 0.3))
    assert (result.ks, result.ranks.tolist()) == ((1,), [1, 2, 3, 3])


def test_prompts_from_files(tmp_path):
    path = tmp_path / "templates.txt"
    path.write_text("ein {}\n\nzwei {}, {x} ganz groß\n", encoding="utf-8")
    templates = read_templates(path)
    assert prompts(["{}", "Käse"], templates) == [
        "ein {}", "zwei {}, {x} ganz groß", "ein Käse", "zwei Käse, {x} ganz groß",
    ]  # fmt: skip
    path = tmp_path / "names.json"
    path.write_text(json.dumps(["a b", "c"]), encoding="utf-8")
    assert read_class_names(str(path)) == ("a b", "c")
    assert read_templates("name") == ("{}",)
    assert read_templates(text for text in ("{}",)) == ("{}",)
    refuses("Expected templates", read_templates, [1])
    # Editors on Windows write it so.
    path = tmp_path / "names.txt"
    path.write_bytes("\ufeffcat \r\n\tdog\r\n".encode())
    assert read_class_names(path) == ("cat", "dog")
    assert all(
        text.count("cat") == 1 for text in prompts(["cat"], read_templates("ours"))
    )


FILES = {
    "latin.txt": b"caf\xe9 {}",
    "cut.json": b'["a {}"',
    "dict.json": b'{"a {}": 0}',
    "deep.json": b"[" * 100_000,
}


@pytest.mark.parametrize("name", FILES)
def test_files_without_a_list_of_texts(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    refuses(name, read_templates, path)


# Some of ImageNet's classes

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


@pytest.mark.parametrize(("name", "first", "last", "others"), [
    ("imagenet_a", ("n01498041", 6), ("n12267677", 988), ("n02219486", 310)),
    ("imagenet_r", ("n01443537", 1), ("n12267677", 988), ("n02085620", 151)),
])  # fmt: skip
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
    with pytest.raises(ValueError, match=r"1,000 classes .* received: 2 names"):
        zero_shot_from_model(*arguments[:3], NAMES[:2], class_subset="imagenet_a")


def test_classes_of_data_by_hand():
    subset = read_class_subset("imagenet_a")
    # Folders, one of which is not of the subset.
    indices = subset.indices(["n01531178", "n01440764", "n01498041"])
    assert indices.tolist() == [1, -1, 0]
    assert subset.labels([2, 0], indices).tolist() == [0, 1]
    assert subset.indices()[[6, 988, 7]].tolist() == [0, 199, -1]
