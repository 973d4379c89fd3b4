"""The objective of language models: its data, its tokenizer, and exact resumption."""

import pathlib

import numpy as np
import pytest

from keras_moe import data, models, training
from keras_moe.training import NextToken, TextData, train
from tests.refusals import refuses
from tests.training.runs import Ends, assert_same_arrays
from tests.training.text_folder import text_recipe, write_texts


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


def test_a_run_trains_and_goes_on_exactly(source, tmp_path):
    mine = text_recipe(source)
    options = {"verbose": 0, "checkpoint_every": 2}
    whole = train(mine, checkpoint_dir=tmp_path / "whole", **options)
    names = ("loss", "perplexity")
    assert set(whole.history) == {*names, *(f"val_{name}" for name in names)}
    assert whole.score == whole.history["val_perplexity"][-1]
    assert whole.history["perplexity"][1] < whole.history["perplexity"][0] < 560
    with pytest.raises(KeyboardInterrupt):
        train(mine, checkpoint_dir=tmp_path / "ended", callbacks=[Ends(5)], **options)
    again = train(mine, checkpoint_dir=tmp_path / "ended", **options)
    assert again.history == whole.history
    assert_same_arrays(again, whole)
    # Another document moves those after it, so that the run cannot go on.
    folder = pathlib.Path(source.partition(":")[2])
    (folder / "train" / "0.txt").write_text("the cat sat")
    with pytest.raises(ValueError, match="rows_sha256"):
        train(text_recipe(source), checkpoint_dir=tmp_path / "ended", **options)
    (folder / "train" / "0.txt").unlink()
    # The tokenizer was trained on the training texts, and is saved with the model.
    whole.model.save_to_preset(tmp_path / "preset")
    saved = models.from_preset(str(tmp_path / "preset"))
    assert saved.generate("the cat", max_length=8).startswith("the cat")
    # The last batch is filled, and what fills it does not count.
    texts = list(data.load_texts(source, "test"))
    rows = saved.training_inputs(texts)
    assert len(rows["targets"]) % 4
    saved.compile()
    perplexity = saved.evaluate(rows, verbose=0, return_dict=True)["perplexity"]
    assert perplexity == pytest.approx(whole.score, rel=1e-5)


def test_a_smaller_vocabulary_is_trained_by_the_run(source):
    settings = {"model.vocabulary_size": 530, "data.source": source}
    recipe = training.load_recipe("moepp_lm_python", **settings)
    model = recipe.new_model(None)
    recipe.objective.prepare(model, recipe.data)
    assert model.preprocessor.vocabulary_size <= 530
    with pytest.raises(ValueError, match=r"at most the 530.*vocabulary_size=1024"):
        models.from_preset("moepp_lm_python", vocabulary_size=530)


def test_rows_are_packed_documents(source):
    mine = text_recipe(source)
    model = mine.new_model(None)
    mine.objective.prepare(model, mine.data)
    datasets = mine.datasets(model)
    train_rows = models.pack(
        model.preprocessor.documents(data.load_texts(source, "train")), 16
    )
    count = len(train_rows["token_ids"])
    assert datasets.steps_per_epoch == count // 4
    seen = datasets.train.take(2 * datasets.steps_per_epoch)

    def pairs(batch):
        rows = np.stack([batch["token_ids"], batch["padding_mask"]], axis=1)
        return {row.tobytes() for row in rows.astype("int32")}

    rows = set().union(*map(pairs, seen.as_numpy_iterator()))
    assert rows <= pairs(train_rows)
    # An epoch leaves out less than a batch.
    assert len(rows) > count - 4
    # Packed once, though a run asks for its data again when it goes on.
    packed = dict(mine.data.packed)
    mine.datasets(model, start_step=3)
    assert all(mine.data.packed[key] is value for key, value in packed.items())


def test_sources_are_mixed_by_weight(source, tmp_path):
    other = write_texts(tmp_path, seed=1)
    mine = text_recipe({source: 3, other: 1})
    assert mine.data.evaluated_source == source
    model = mine.new_model(None)
    mine.objective.prepare(model, mine.data)
    batch = next(iter(mine.datasets(model).train))
    documents = model.preprocessor.documents(data.load_texts(other, "train"))
    own = {tuple(row) for row in models.pack(documents, 16)["token_ids"].tolist()}
    ids = np.asarray(batch["token_ids"])
    assert [tuple(row) in own for row in ids.tolist()] == [False] * 3 + [True]


def test_settings_of_texts():
    config = TextData(batch_size=4, source="text:a", test_split="test")
    assert config.replace(source="text:b").test_split == "validation"
    refuses("Expected no augment for texts", TextData, batch_size=4, augment=["flip"])
    refuses("vocabulary_size", NextToken, tokenizer="clip", vocabulary_size=600)
    # Pretraining mixtures name all their sources, as the paper's table does.
    mixture = training.load_recipe("moepp_lm_0.6b").data.weights
    assert sum(mixture.values()) == pytest.approx(100)
