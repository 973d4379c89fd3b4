"""Data of a run: the names of its classes, and images that cannot be read."""

import warnings

import numpy as np
import pytest

from keras_moe import data
from keras_moe.training import Datasets, Recipe, find_checkpoint, train
from tests.pipelines import save
from tests.refusals import refuses
from tests.training.runs import changed, dropout_model, short_recipe

pytestmark = pytest.mark.usefixtures("op_by_op")

# One name for each digit.
NAMES = tuple("abcdefghij")
SMALL = {"num_layers": 2, "hidden_dim": 8, "mlp_dim": 8, "image_shape": (8, 8, 1)}


def recipe(**settings):
    plain = {"epochs": 1, "batch_size": 10, "learning_rate": 1e-3}
    model = {"preset": "vmoe_digits", "model_arguments": SMALL}
    return short_recipe(**{**model, **plain, **settings})


@pytest.fixture
def letters(tmp_path):
    for split in ("train", "test"):
        for name in NAMES:
            save(tmp_path / split / name / "0.png", 0)
    return f"folder:{tmp_path}"


def test_names_are_those_of_the_data_and_saved(letters, tmp_path):
    trained = train(recipe(data=letters), verbose=0).model
    assert trained.preprocessor.class_names == NAMES
    trained.save_to_preset(tmp_path / "preset")
    again = type(trained).from_preset(str(tmp_path / "preset"))
    assert again.preprocessor.class_names == NAMES


def test_a_look_at_test_data_is_at_all_classes(letters):
    mine = recipe(data=letters, batch_size=5)
    datasets = mine.datasets(mine.new_model(10))
    in_order, shuffled = (
        {*np.argmax(next(iter(batches))[1], axis=-1).tolist()}
        for batches in (datasets.test, datasets.shuffled_test())
    )
    assert in_order == {0, 1, 2, 3, 4}
    assert len(shuffled - in_order) in (1, 2, 3, 4)


def test_a_presets_names_are_not_those_of_unknown_data():
    assert recipe().new_model(10).preprocessor.class_names is not None
    images, labels = np.zeros((10, 8, 8, 1), "float32"), np.eye(10, dtype="float32")
    batches = ((images, labels) for _ in range(1))
    own = Datasets(batches, (images, labels), 10, 1)
    trained = train(recipe(), own, verbose=0).model
    assert trained.preprocessor.class_names is None


def test_names_of_sources(tmp_path):
    mine = recipe()
    assert mine.objective.class_names(mine.data) == tuple("0123456789")
    image = np.zeros((8, 8, 3), "uint8")
    for classes, names in ((["x", "y"], ("x", "y")), (2, None)):
        folder = tmp_path / str(classes)
        data.write_tfrecords(folder, "train", [(image, 0), (image, 1)], classes)
        assert data.class_names(f"tfrecord:{folder}") == names


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The one image of ten that cannot be read."""
    monkeypatch.setattr(Recipe, "new_model", dropout_model)
    for number in range(10):
        for split in ("train", "test"):
            name = f"{split}/{'ab'[number % 2]}/{number}.png"
            save(tmp_path / "photos" / name, 20 * number)
    path = tmp_path / "photos" / "train" / "a" / "4.png"
    path.write_bytes(b"no image")
    return path


def recipe_of(path, **settings):
    source = f"folder:{path.parents[2]}"
    return recipe(model_arguments={}, batch_size=3, data=source, **settings)


def test_an_image_ends_a_run_by_name_or_is_left_out(path):
    recipe = recipe_of(path)
    refuses(f"can be decoded; received: {path}$", train, recipe, verbose=0)
    with pytest.warns(UserWarning, match=rf"1 of 10 images.*{path}$"):
        trained = train(changed(recipe, unreadable="exclude"), verbose=0)
    # Nine images make three batches; ten would, too, but for the error.
    assert int(trained.model.optimizer.iterations) == 3
    assert len(trained.history["val_loss"]) == 1


def test_a_run_whose_images_are_others_is_refused(path, tmp_path, monkeypatch):
    def run(settings):
        train(settings, verbose=0, checkpoint_dir=tmp_path / "run")

    searched = []
    search = data.selection._unreadable

    def counted(examples):
        searched.append(examples)
        return search(examples)

    monkeypatch.setattr(data.selection, "_unreadable", counted)
    mine = recipe_of(path, unreadable="exclude")
    with warnings.catch_warnings(record=True) as report:
        warnings.simplefilter("always")
        run(mine)
        run(mine)
    # Once each for training and test images.
    assert len(searched) == 2
    assert sum("cannot be read" in str(x.message) for x in report) == 1
    state = find_checkpoint(tmp_path / "run").state
    assert state["settings"]["unreadable_images"]["train"]["left_out"] == 1
    # The error has passed: a search finds no such image.
    path.write_bytes(path.with_name("6.png").read_bytes())
    message = r"received: unreadable_images=.*'left_out': 0.*\(there .*'left_out': 1"
    refuses(message, run, mine.replace())
