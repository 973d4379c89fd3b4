"""A trained model's preprocessor names the classes that it was trained on."""

import keras
import numpy as np
import pytest

from keras_moe import data
from keras_moe.training import Datasets, train
from tests.training.recipe_settings import short_recipe

pytestmark = pytest.mark.usefixtures("op_by_op")

# One name for each digit.
NAMES = tuple("abcdefghij")


def recipe(**settings):
    small = {"num_layers": 2, "hidden_dim": 8, "mlp_dim": 8, "image_shape": (8, 8, 1)}
    plain = {"epochs": 1, "batch_size": 10, "learning_rate": 1e-3}
    return short_recipe(
        **{
            "preset": "vmoe_digits",
            "model_arguments": small,
            **plain,
            **settings,
        }
    )


@pytest.fixture
def letters(tmp_path):
    image = np.zeros((8, 8, 3), "uint8")
    for split in ("train", "test"):
        for name in NAMES:
            (tmp_path / split / name).mkdir(parents=True)
            keras.utils.save_img(tmp_path / split / name / "0.png", image, scale=False)
    return f"folder:{tmp_path}"


def test_names_are_those_of_the_data_and_saved(letters, tmp_path):
    trained = train(recipe(data=letters), verbose=0).model
    assert trained.preprocessor.class_names == NAMES
    trained.save_to_preset(tmp_path / "preset")
    again = type(trained).from_preset(str(tmp_path / "preset"))
    assert again.preprocessor.class_names == NAMES


def test_a_presets_names_are_not_those_of_unknown_data():
    assert recipe().new_model(10).preprocessor.class_names is not None
    images, labels = np.zeros((10, 8, 8, 1), "float32"), np.eye(10, dtype="float32")
    batches = ((images, labels) for _ in range(1))
    own = Datasets(batches, (images, labels), 10, 1)
    trained = train(recipe(), own, verbose=0).model
    assert trained.preprocessor.class_names is None


def test_names_of_sources(tmp_path):
    assert recipe().class_names() == tuple("0123456789")
    image = np.zeros((8, 8, 3), "uint8")
    for classes, names in ((["x", "y"], ("x", "y")), (2, None)):
        folder = tmp_path / str(classes)
        data.write_tfrecords(folder, "train", [(image, 0), (image, 1)], classes)
        assert data.class_names(f"tfrecord:{folder}") == names
    hierarchy = data.LabelHierarchy(["odd", *"0123456789"], {"1": ["odd"]})
    hierarchy.save(tmp_path / "classes.json")
    actual = recipe(
        objective={
            "name": "multi_label",
            "hierarchy": str(tmp_path / "classes.json"),
        }
    )
    assert actual.class_names() == ("odd", *"0123456789")
