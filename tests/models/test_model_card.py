"""Model cards: what a preset's README.md says, and whose it is."""

import ast

import huggingface_hub
import keras_hub
import pytest

from keras_moe import models
from keras_moe.models.base.model_card import CARD, MARK, licence_of
from tests.refusals import refuses

SIZES = {"image_shape": (8, 8, 1), "patch_size": 4, "hidden_dim": 8, "mlp_dim": 12}
SIZES |= {"num_layers": 2, "num_heads": 2, "moe_layers": [1], "num_experts": 3}


@pytest.fixture(scope="module")
def classifier():
    return models.from_preset("vmoe_s32", num_classes=4, **SIZES)


def page_of(folder):
    return (folder / CARD).read_text(encoding="utf-8")


def test_a_card_says_what_is_known(classifier, tmp_path):
    picture = tmp_path / "experts.PNG"
    picture.write_bytes(b"png")
    card = models.ModelCard(
        description="Three experts.", license="apache-2.0", data="photos",
        base_model="hf://ann/tower", base_license="mit",
        attribution="The photos are Ann's, under CC BY 4.0.",
        recipe={"schedule.epochs": 3, "seed": 0, "notes": ""},
        results=[models.CardResult("accuracy", 0.98764, "photos", "validation")],
        picture=picture, tags=["tiny"],
    )  # fmt: skip
    folder = tmp_path / "tiny_moe"
    classifier.save_to_preset(folder, card=card)
    page = page_of(folder)
    for line in [
        "# tiny_moe",
        "Three experts.",
        "![What the experts of the model do](card.png)",
        "| class | ViTImageClassifier |",
        "| moe.num_experts | 3 |",
        f"| parameters | {classifier.count_params():,} |",
        "| tokens of each image | 5 |",
        "| schedule.epochs | 3 |",
        "| seed | 0 |",
        "| accuracy | 0.9876 | photos, validation |",
        "The licence of the weights is apache-2.0.",
        "The training started from `hf://ann/tower`, whose licence is mit.",
        "The photos are Ann's, under CC BY 4.0.",
        MARK,
    ]:
        assert line in page, line
    assert "notes" not in page
    assert (folder / "card.png").read_bytes() == b"png"
    # Hugging Face reads the same.
    data = huggingface_hub.ModelCard(page).data
    assert (data.license, data.base_model) == ("apache-2.0", "ann/tower")
    assert data.pipeline_tag == "image-classification"
    assert data.tags == ["keras", "mixture-of-experts", "tiny"]
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.9876)
    assert (result.dataset_name, result.dataset_split) == ("photos", "validation")
    # The folder is a preset as before.
    assert models.from_preset(folder).backbone.moe.num_experts == 3


def test_the_licence_of_a_model_is_its_card_s(classifier, tmp_path):
    assert licence_of("vmoe_digits") == "apache-2.0"
    assert licence_of("vmoe_s32") is None
    folder = tmp_path / "preset"
    assert licence_of(str(folder)) is None
    classifier.save_to_preset(folder, card=models.ModelCard(license="mit"))
    assert licence_of(str(folder)) == "mit"
    (folder / CARD).write_text("---\nlicense: [\n---\n", encoding="utf-8")
    assert licence_of(str(folder)) is None


def test_names_and_values_are_texts_wherever_they_stand(classifier):
    """In cells of tables, and in the snippet that people copy as well."""
    card = models.ModelCard(recipe={"notes": "one | two\nthree <script>alert(1)"})
    page = card.text(classifier, "x")
    assert "| notes | one \\| two three " in page
    assert "<script" not in page
    name = 'a")\nimport os\n# <b>[x](http://y)'
    card = models.ModelCard(picture_text="](http://x)\n# hi", tags=["a\n---\nb"])
    page = card.text(classifier, name, "card.png")
    headings = [line for line in page.split("\n") if line.startswith("# ")]
    assert headings == ['# a") import os # &lt;b>\\[x\\](http://y)']
    assert "![\\](http://x) # hi](card.png)" in page
    snippet = page.split("```python\n")[1].split("```")[0]
    *_, call = ast.parse(snippet).body
    assert [x.value for x in call.value.args] == [name]
    assert len(ast.parse(snippet).body) == 2
    assert huggingface_hub.ModelCard(page).data.tags[-1] == "a\n---\nb"


def test_the_author_s_page_stays(classifier, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "preset"
    classifier.save_to_preset("~/preset")
    # Ours is written anew.
    (folder / CARD).write_text(f"yesterday\n{MARK}\n", encoding="utf-8")
    classifier.save_to_preset(folder)
    assert "yesterday" not in page_of(folder)
    (folder / CARD).write_text("# By hand", encoding="utf-8")
    for path in (folder, "~/preset"):
        classifier.save_to_preset(path)
        assert page_of(folder) == "# By hand"
    # Unless a card is wanted.
    classifier.save_to_preset(folder, card=models.ModelCard(name="asked for"))
    assert "# asked for" in page_of(folder)


def test_the_working_directory_is_not_replaced(classifier, tmp_path, monkeypatch):
    folder = tmp_path / "new" / "below"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    for target in (".", "..", tmp_path / "new"):
        refuses("that the program runs in", classifier.save_to_preset, target)
    classifier.save_to_preset("../other")
    assert folder.samefile(".")
    assert (tmp_path / "new" / "other" / CARD).is_file()


def test_only_whole_presets_are_uploaded(classifier, tmp_path, monkeypatch):
    uploads = []
    monkeypatch.setattr(keras_hub, "upload_preset", lambda *a: uploads.append(a))
    for uri in ("hf://", "hf://a", "hf://a/b/c", "kaggle://a/b"):
        refuses(f"hf://USER/MODEL or .*received: '{uri}'", models.upload, uri, tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        models.upload("kaggle://a/b/keras/c", tmp_path / "nowhere")
    folder = tmp_path / "preset"
    classifier.save_to_preset(folder)
    models.upload("kaggle://a/b/keras/c", folder)
    assert uploads == [("kaggle://a/b/keras/c", str(folder))]
    weights = folder / "model.weights.h5"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    refuses(r"model\.weights\.h5", models.upload, "kaggle://a/b/keras/c", folder)
    assert len(uploads) == 1
