"""Zero-shot classification, and the prompts of its classes."""

import json

import numpy as np
import pytest

from keras_moe.evaluation import (
    class_embeddings,
    prompts,
    read_class_names,
    read_templates,
    zero_shot,
)
from tests.published import import_open_clip

pytestmark = pytest.mark.backend_free


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
    # Editors on Windows write it so.
    path = tmp_path / "names.txt"
    path.write_bytes("\ufeffcat \r\n\tdog\r\n".encode())
    assert read_class_names(path) == ("cat", "dog")
    assert all(
        text.count("cat") == 1 for text in prompts(["cat"], read_templates("ours"))
    )


def test_mistakes_of_prompts(tmp_path):
    def refused(read, value, message):
        with pytest.raises(ValueError, match=message):
            read(value)

    (tmp_path / "none.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 {}")
    (tmp_path / "map.json").write_text('{"a": 1}')
    (tmp_path / "cut.json").write_text('["a {}"')
    refused(read_templates, ["a photo"], "one place {} for the name.*'a photo'")
    refused(read_templates, ["a {} and {}"], "one place {} for the name")
    refused(read_templates, [lambda name: "a photo"], "one place {} for the name")
    refused(read_templates, [3], "received: 3")
    refused(read_templates, [], r"received: \[\]")
    refused(read_templates, "imagent", r"\['imagenet', 'name', 'ours', 'simple'\]")
    refused(read_templates, tmp_path / "none.txt", r"received: \[\]")
    refused(read_templates, tmp_path / "latin.txt", "UTF-8.*latin.txt")
    refused(read_class_names, tmp_path / "map.json", "JSON list.*map.json")
    refused(read_class_names, tmp_path / "cut.json", "cut.json")
    refused(read_class_names, ["a", "b", "a"], "'a' for classes 0 and 2")
    refused(read_class_names, ["a", " "], "not empty; received: ' '")
    refused(read_class_names, [], "received: ")
    for names in (5, None, {"a": 1}, {"a", "b"}, b"ab"):
        refused(read_class_names, names, "a sequence of names; received: ")


GOOD = np.ones((4, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((GOOD, [0, 1, 2], GOOD), "for 4 examples"),
        ((GOOD, [0, 1, 2, 4], GOOD), r"in \[0, 4\)"),
        ((GOOD, [0, 1, 2, 3], np.ones((4, 2))), "classes of dim 3"),
        ((np.full((4, 3), np.inf), [0] * 4, GOOD), "finite image_embeddings"),
        ((GOOD, [0] * 4, GOOD, (5,)), "k from 1 to 4"),
        ((GOOD, [0] * 4, GOOD, 5), "received: ks=5"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        zero_shot(*arguments)


def test_mistakes_of_class_embeddings():
    with pytest.raises(ValueError, match=r"shape=\(4, 3\)"):
        class_embeddings(GOOD)
    with pytest.raises(ValueError, match=r"real numbers.*complex128"):
        class_embeddings([[[1j]]])
    with pytest.raises(ValueError, match="cancel, of class 1"):
        class_embeddings([[[1.0], [1.0]], [[1.0], [-2.0]]])
    with pytest.raises(ValueError, match=r"none of them 0.*\[1\]"):
        class_embeddings([[[1.0], [0.0]]])


def test_prompts_of_one_string_are_no_letters():
    assert prompts(["cat"], "a {}") == ["a cat"]
    with pytest.raises(ValueError, match="class_names='cat'"):
        prompts("cat", ["a {}"])
    with pytest.raises(ValueError, match="received: 'a photo'"):
        prompts(["cat"], ["a photo"])
