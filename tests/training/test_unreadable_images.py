"""Training on a folder with an image that cannot be read."""

import keras
import numpy as np
import pytest

from keras_moe.training import Recipe, train
from tests.training.test_best_epoch import dropout_model

pytest.importorskip("tensorflow")


def test_an_image_ends_a_run_by_name_or_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(Recipe, "new_model", dropout_model)
    for number in range(10):
        for split in ("train", "test"):
            path = tmp_path / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.full((4, 4, 3), 20 * number, "uint8")
            keras.utils.save_img(path, pixels, scale=False)
    path = tmp_path / "train" / "a" / "4.png"
    path.write_bytes(b"no image")
    recipe = Recipe(
        "mine",
        preset="vmoe_digits",
        batch_size=3,
        learning_rate=1e-2,
        epochs=1,
        data=f"folder:{tmp_path}",
    )
    with pytest.raises(ValueError, match=f"can be decoded; received: {path}$"):
        train(recipe, verbose=0)
    with pytest.warns(UserWarning, match=rf"1 of 10 images.*{path}$"):
        trained = train(recipe.replace(unreadable="exclude"), verbose=0)
    # Of nine images; ten would be three batches, too, but for the error.
    assert int(trained.model.optimizer.iterations) == 3
    assert len(trained.history["val_loss"]) == 1
