"""Names and probabilities, and presets that carry their preprocessing."""

import json

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.models import ImagePreprocessor, ViTBackbone, ViTImageClassifier
from tests.compare import assert_close
from tests.pair_models import IMAGE
from tests.refusals import refuses

SMALL = {**IMAGE, "num_layers": 1}
NAMES = ["ant", "bee", "cat"]
PHOTOS = np.random.default_rng(0).integers(0, 256, (3, 11, 17, 3), dtype="uint8")


def classifier(preprocessor="ours", num_classes=3, **kwargs):
    if preprocessor == "ours":
        preprocessor = ImagePreprocessor(
            SMALL["image_shape"], center_crop=0.9, class_names=NAMES
        )
    model = ViTImageClassifier(
        ViTBackbone.from_config(SMALL), num_classes, preprocessor, **kwargs
    )
    generator = np.random.default_rng(1)
    model.output_dense.kernel.assign(generator.normal(size=(8, num_classes)))
    return model


@pytest.fixture(scope="module")
def model():
    return classifier()


def test_names_and_probabilities(model):
    actual = model.classify(PHOTOS, top=5)
    logits = model.predict(model.preprocessor(PHOTOS), verbose=0)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert [len(row) for row in actual] == [3, 3, 3]
    for row, probabilities in zip(actual, expected):
        assert_close([x.probability for x in row], np.sort(probabilities)[::-1], 1e-4)
        for x in row:
            assert x.name == NAMES[x.index]
            assert_close(x.probability, probabilities[x.index], 1e-4)
    (best,) = model.classify(PHOTOS[1], top=1)
    assert best.name == actual[1][0].name
    # Images may have different sizes, and be grey.
    assert len(model.classify([PHOTOS[0], PHOTOS[1, :9, :9, 0]], batch_size=1)) == 2
    assert model.classify([]) == []
    json.dumps(actual)


def test_outputs_of_every_kind():
    logits = classifier(multi_label=True)
    outputs = logits.predict(logits.preprocessor(PHOTOS[:1]), verbose=0)
    for actual in logits.classify(PHOTOS[0]):
        expected = 1 / (1 + np.exp(-outputs[0, actual.index]))
        assert_close(actual.probability, expected, 1e-5)
    probable = classifier(output_activation="softmax")
    actual = probable.classify(PHOTOS[0])
    outputs = probable.predict(probable.preprocessor(PHOTOS[:1]), verbose=0)
    assert_close(actual[0].probability, outputs.max(), 1e-6)
    half = ViTImageClassifier(
        ViTBackbone.from_config({**SMALL, "dtype": "bfloat16"}),
        3,
        ImagePreprocessor(SMALL["image_shape"]),
    )
    actual = half.classify(PHOTOS[0])
    # Without names there are numbers; equals keep their order.
    assert [x.name for x in actual] == ["0", "1", "2"]
    assert_close(actual[0].probability, 1 / 3, 1e-6)


def test_what_classify_refuses(model):
    for top in (0, 1.5):
        refuses(f"top={top}", model.classify, PHOTOS, top=top)
    for preprocessor in (None, keras.layers.Rescaling(2.0)):
        refuses("with an ImagePreprocessor", classifier(preprocessor).classify, PHOTOS)


def test_presets_files_and_copies_carry_the_preprocessing(model, tmp_path):
    model.save_to_preset(tmp_path / "preset")
    saved = json.loads((tmp_path / "preset" / "task.json").read_text())
    config = saved["config"]["preprocessor"]["config"]
    assert config["class_names"] == NAMES
    again = models.from_preset(str(tmp_path / "preset"))
    model.save(tmp_path / "model.keras")
    of_file = keras.saving.load_model(tmp_path / "model.keras")
    for carrier in (again, of_file, model.copy()):
        assert carrier.preprocessor == model.preprocessor
    for one, other in zip(again.classify(PHOTOS), model.classify(PHOTOS)):
        assert [x.name for x in one] == [x.name for x in other]
    # A new head has other classes, and a new size is another preprocessor's.
    for arguments in ({"num_classes": 2}, {"num_classes": 3, "load_weights": False}):
        new = models.from_preset(str(tmp_path / "preset"), **arguments)
        assert new.preprocessor.class_names is None
        assert new.preprocessor.center_crop == 0.9
    large = models.from_preset(str(tmp_path / "preset"), image_shape=(16, 8, 3))
    assert large.preprocessor.image_shape == (16, 8, 3)
    assert large.preprocessor.class_names == tuple(NAMES)
    none = models.from_preset(str(tmp_path / "preset"), preprocessor=None)
    assert none.preprocessor is None


def test_presets_without_a_preprocessor_get_that_of_builtin_ones(model, tmp_path):
    model.backbone.save_to_preset(tmp_path / "backbone")
    actual = models.from_preset(
        str(tmp_path / "backbone"), num_classes=3, task="image_classifier"
    )
    assert actual.preprocessor == ImagePreprocessor(SMALL["image_shape"])
    classifier(preprocessor=None).save_to_preset(tmp_path / "task")
    assert models.from_preset(str(tmp_path / "task")).preprocessor is None
    edit_task(tmp_path / "task", lambda config: config.pop("preprocessor"))
    actual = models.from_preset(str(tmp_path / "task"), image_shape=(16, 8, 3))
    assert actual.preprocessor == ImagePreprocessor((16, 8, 3))


def edit_task(folder, edit):
    path = folder / "task.json"
    task = json.loads(path.read_text())
    edit(task["config"])
    path.write_text(json.dumps(task))


def test_another_models_preprocessor_is_refused():
    model = classifier()
    before, shape = model.preprocessor, SMALL["image_shape"]
    for preprocessor, message in (
        (ImagePreprocessor((32, 32, 1)), r"received: image_shape=\(32, 32, 1\)"),
        (ImagePreprocessor(shape, class_names=["a", "b"]), "of 3 classes; received: 2"),
    ):
        with pytest.raises(ValueError, match=message):
            model.preprocessor = preprocessor
        refuses(message, classifier, preprocessor)
    assert model.preprocessor is before
    for preprocessor in (ImagePreprocessor(shape), None):
        model.preprocessor = preprocessor
        assert model.copy().preprocessor == preprocessor
