"""The objective of pairs: its settings, its tokenizer, and runs that go on exactly."""

import shutil

import numpy as np
import pytest

from keras_moe import data, models, training
from keras_moe.losses import SigmoidContrastiveLoss, SoftmaxContrastiveLoss
from keras_moe.models.preprocessing import tokenizer
from keras_moe.training import Contrastive, Datasets, train
from tests.refusals import refuses
from tests.training.pair_folder import pair_recipe as recipe
from tests.training.pair_folder import write_pairs
from tests.training.runs import Ends, assert_same_arrays


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"))


pytestmark = pytest.mark.filterwarnings("ignore:. of .* captions have more")
OPTIONS = {"verbose": 0, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def uninterrupted(folder, tmp_path_factory):
    """A run to its end, whose model and history nobody changes, and its folder."""
    place = tmp_path_factory.mktemp("whole")
    mine = recipe(folder, **{"data.unreadable": "exclude"})
    return train(mine, checkpoint_dir=place, **OPTIONS), place


def leave_half_a_tokenizer(mine, folder, monkeypatch):
    """Leaves in `folder` what a kill leaves while the tokenizer is being written."""
    place = folder.with_name("written")

    def end(*_):
        # As it is on disk: what an exception cleans up comes later.
        shutil.copytree(place, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tokenizer, "write_json", end)
        with pytest.raises(KeyboardInterrupt):
            train(mine, checkpoint_dir=place, **OPTIONS)
    assert (folder / "tokenizer" / "assets").is_dir()
    assert not (folder / "tokenizer" / "text_tokenizer.json").exists()


def test_a_run_trains_and_goes_on_exactly(folder, uninterrupted, tmp_path, monkeypatch):
    mine = recipe(folder, **{"data.unreadable": "exclude"})
    options = OPTIONS
    whole, place = uninterrupted
    shutil.copytree(place, tmp_path / "whole")
    names = ("loss", "contrastive_accuracy")
    assert set(whole.history) == {*names, *(f"val_{name}" for name in names)}
    assert whole.score == whole.history["val_contrastive_accuracy"][-1]
    state = training.find_checkpoint(tmp_path / "whole").state
    # Only images have indices of those left out.
    assert "unreadable_images" not in state["settings"]
    # Nine images make two batches of four; a step is one draw of captions.
    assert int(whole.model.optimizer.iterations) == 4
    left = tmp_path / "left"
    leave_half_a_tokenizer(mine, left, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(mine, checkpoint_dir=left, callbacks=[Ends(3)], **options)
    merges = left / "tokenizer/assets/tokenizer/merges.txt"
    kept = merges.read_bytes()
    again = train(mine, checkpoint_dir=left, **options)
    assert merges.read_bytes() == kept
    one, other = (x.model.preprocessor.tokenizer for x in (whole, again))
    assert (one.vocabulary, one.merges) == (other.vocabulary, other.merges)
    assert again.history == whole.history
    assert_same_arrays(again, whole)
    # The tokenizer was trained on the captions, and takes others.
    assert whole.model.preprocessor.max_length == 8
    whole.model.save_to_preset(tmp_path / "preset")
    saved = models.from_preset(str(tmp_path / "preset"))
    captions = ["a blue square", "grey"]
    np.testing.assert_array_equal(
        saved.encode_text(captions), whole.model.encode_text(captions)
    )
    # The run keeps its vocabulary, and so its tokens keep their meanings.
    others = ["quite other words"] * 9
    with monkeypatch.context() as patched:
        patched.setattr(data, "load_captions", lambda *_, **__: others)
        again = train(mine, checkpoint_dir=tmp_path / "whole", **options).model
        assert (
            again.preprocessor.tokenizer.merges == saved.preprocessor.tokenizer.merges
        )
        shutil.rmtree(tmp_path / "whole" / "tokenizer")
        with pytest.raises(ValueError, match="tokenizer_sha256"):
            train(mine, checkpoint_dir=tmp_path / "whole", **options)
    # The monitored metric is that of `evaluate`.
    test = mine.datasets(whole.model).test
    values = whole.model.evaluate(test, verbose=0, return_dict=True)
    assert values["contrastive_accuracy"] == pytest.approx(whole.score)


def test_pairs_of_ones_own_and_a_loss_that_is_not_finite(folder):
    mine = recipe(folder, **{"schedule.epochs": 1})
    model = mine.new_model(None)
    mine.objective.prepare(model, mine.data)
    own = mine.datasets(model)
    actual = train(mine, Datasets(own.train, own.test, None, 1), verbose=0)
    # Nobody knows the tokenizer of such pairs.
    assert actual.model.preprocessor is None
    bad = own.train.map(lambda x, ids: ({**x, "images": x["images"] * np.nan}, ids))
    bad = Datasets(bad, own.test, None, 2)
    refuses("NaN or Inf was in the images or labels", train, mine, bad, verbose=0)


def test_tokenizers(folder, tmp_path):
    mine = recipe(folder)
    model = mine.new_model(None)
    mine.objective.prepare(model, mine.data)
    trained = model.preprocessor
    assert trained.vocabulary_size <= 530
    captions = data.load_captions(mine.data.source, "train")
    expected = models.TextTokenizer.trained(captions, 530, 8)
    np.testing.assert_array_equal(
        trained(captions)["token_ids"], expected(captions)["token_ids"]
    )
    # Captions that are left out of training teach it nothing.
    file = tmp_path / "exclude.json"
    data.write_exclusion(file, mine.data.source, "train", 9, [*range(7)])
    config = mine.data.replace(exclude=str(file))
    fewer = Contrastive().new_tokenizer(model.backbone, config, None)
    expected = models.TextTokenizer.trained(captions[14:], 530, 8)
    actual = fewer(captions)["token_ids"]
    np.testing.assert_array_equal(actual, expected(captions)["token_ids"])
    assert not np.array_equal(actual, trained(captions)["token_ids"])
    # A preset's own stays, unless the settings name another.
    mine.objective.prepare(model, mine.data)
    assert model.preprocessor is trained
    trained.save_to_preset(tmp_path / "saved")
    for settings, size, length in (
        ({"tokenizer": "trained", "vocabulary_size": 520, "max_length": 5}, 520, 5),
        ({"tokenizer": str(tmp_path / "saved")}, trained.vocabulary_size, 8),
    ):
        objective = Contrastive(**settings)
        objective.prepare(model, mine.data)
        assert model.preprocessor.vocabulary_size == size
        assert model.preprocessor.max_length == length
    # A setting without an effect is refused, by name.
    saved = str(tmp_path / "saved")
    model.preprocessor = trained
    for settings, message in (
        ({"vocabulary_size": 520}, "vocabulary_size=520 with the preset's"),
        ({"max_length": 5}, "own max_length=8.*received: max_length=5"),
        ({"max_length": 5, "tokenizer": saved}, "own max_length=8.*max_length=5"),
    ):
        refuses(message, Contrastive(**settings).prepare, model, mine.data)
    Contrastive(max_length=8).prepare(model, mine.data)
    assert model.preprocessor is trained
    large = Contrastive(max_length=9, tokenizer="trained")
    with pytest.raises(ValueError, match="max_length of at most the 8 of the backbone"):
        large.prepare(model, mine.data)
    refuses("Expected .*none", Contrastive(tokenizer="none").prepare, model, mine.data)


def test_the_loss_is_the_models_or_that_of_the_settings(folder):
    model = recipe(folder).new_model(None)
    settings = {"chunk_size": 2, "similarity_dtype": "bfloat16", "multi_positive": True}
    loss, metrics = Contrastive(**settings).loss_and_metrics(model, recipe(folder).data)
    assert type(loss) is SoftmaxContrastiveLoss
    assert {name: getattr(loss, name) for name in settings} == settings
    assert [(x.name, x.chunk_size) for x in metrics] == [("contrastive_accuracy", 2)]
    biased = recipe(folder, **{"model.temperature": "siglip"}).new_model(None)
    for name, with_bias in (("auto", biased), ("sigmoid", biased)):
        loss, _ = Contrastive(loss=name).loss_and_metrics(with_bias, None)
        assert type(loss) is SigmoidContrastiveLoss
    mine = recipe(folder, **{"objective.loss": "sigmoid"})
    refuses(r"without \['logit_bias'\]", mine.compile, model, 2)


def test_captions_of_training_and_of_the_evaluation(folder):
    mine = recipe(folder, **{"objective.evaluation_batch_size": 9})
    model = mine.new_model(None)
    model.preprocessor = None
    own = mine.datasets(model)
    (inputs, _), *others = own.test.as_numpy_iterator()
    assert not others
    # The first caption of each, in the order of the file.
    first = [text.decode() for text in inputs["captions"]]
    assert first[:2] == ["a red square on black", "a red square on white"]
    drawn = {
        text
        for inputs, _ in own.train.take(12).as_numpy_iterator()
        for text in inputs["captions"].tolist()
    }
    assert drawn > {b"red black", b"a red square on black"}
    every = mine.replace(**{"data.captions": "all"}).datasets(model)
    assert every.steps_per_epoch == 18 // 4
    assert mine.replace(**{"data.epoch_size": 40}).datasets(model).steps_per_epoch == 10
    large = mine.replace(**{"data.batch_size": 10})
    refuses(r"no larger than .*batch_size=10", large.datasets, model)


def test_a_mixture_is_trained_and_its_first_source_evaluated(folder):
    mine = recipe(folder, **{"data.source": {folder: 2, "digits": 1}})
    settings = {"templates": "the digit {}", "epoch_size": 4}
    mine = mine.replace(data=settings, schedule={"epochs": 1})
    trained = train(mine, verbose=0)
    assert np.isfinite(trained.history["val_loss"]).all()
    trained.model.preprocessor = None
    test = mine.datasets(trained.model).test
    captions = [x.decode() for batch, _ in test for x in batch["captions"].numpy()]
    assert len(captions) == 9
    assert captions[0] == "a red square on black"
    of_digits = mine.replace(**{"data.test_source": "digits"})
    inputs, _ = next(iter(of_digits.datasets(trained.model).test))
    assert inputs["captions"].numpy()[0].startswith(b"the digit")
    assert of_digits.replace(**{"data.source": "emoji"}).data.test_source is None
