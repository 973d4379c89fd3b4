"""`keras-moe train` on pairs, and a run that begins with an upcycled model."""

import json

import numpy as np

from keras_moe import models
from tests.training.pair_folder import write_pairs

SMALL = ("num_layers=2", "hidden_dim=8", "num_heads=2", "mlp_dim=16")
# Pictures of 8 pixels, and the largest vocabulary that their captions fill.
SIZES = ("image_shape=[8,8,3]", "patch_size=4", "vocabulary_size=530", "max_length=12")
SHORT = ("schedule.epochs=2", "schedule.warmup_steps=0", "data.batch_size=4")


def test_a_dense_run_is_upcycled_and_goes_on(done, tmp_path):
    (tmp_path / "pairs").mkdir()
    source = write_pairs(tmp_path / "pairs")
    common = ("--data", source, "--recipe-set", *SHORT, "data.augment=[]")
    dense, up, sparse = (tmp_path / name for name in ("dense", "up", "sparse"))
    output = done(
        "train", "clip_emoji", "--output", dense, *common,
        "--retrieval-every", 2, "--set", *SMALL, *SIZES,
    )  # fmt: skip
    results = json.loads((dense / "results.json").read_text())
    names = ("loss", "contrastive_accuracy")
    recalls = [x for x in results["history"] if x.startswith("retrieval/")]
    own = {*names, *(f"val_{name}" for name in names)}
    assert set(results["history"]) == {*own, *recalls}
    # Nine images: no recall among ten.
    (record,) = results["evaluations"]
    assert record["epoch"] == 2
    ways = ("image_to_text", "text_to_image")
    assert set(recalls) == {f"retrieval/{way}_r{k}" for way in ways for k in (1, 5)}
    assert results["metric"] == "val_contrastive_accuracy"
    assert f"val_contrastive_accuracy {results['score']:.4f}" in output
    assert (dense / "training.png").read_bytes().startswith(b"\x89PNG")
    # The preset has the tokenizer that was trained on the captions.
    model = models.from_preset(str(dense / "preset"))
    captions = ["a red square on white", "blue grey"]
    assert model.encode_text(captions).shape == (2, 64)
    # And takes photos of any size, as the last line says.
    assert '.classify(photo, ["a cat", "a dog"])' in output
    found = model.classify(np.zeros((20, 12, 3), "uint8"), captions)
    assert {row.name for row in found} == {*captions}
    done("upcycle", dense / "preset", up, "--settings", "clip_up")
    arguments = ("clip_up_emoji", "--preset", up, "--output", sparse, *common)
    done("train", *arguments)
    results = json.loads((sparse / "results.json").read_text())
    assert results["recipe"]["model"]["preset"] == str(up)
    # The settings of CLIP-UP.
    moe = models.from_preset(str(up)).backbone.get_config()["image"]["moe"]
    assert moe["auxiliary_losses"] == {"load_balance": 0.01, "router_z": 1e-4}
    layers = {row["layer"] for row in results["router_health"]}
    assert layers == {"image/block_1", "text/block_1"}
    assert (sparse / "router_health.png").read_bytes().startswith(b"\x89PNG")
    # It began with the dense model's weights and its tokenizer.
    again = models.from_preset(str(sparse / "preset"))
    tokens = model.preprocessor(captions)["token_ids"]
    np.testing.assert_array_equal(again.preprocessor(captions)["token_ids"], tokens)
    embeddings = [
        np.asarray(x.backbone.get_layer("text/token_embedding").get_weights()[0])
        for x in (model, again)
    ]
    np.testing.assert_allclose(*embeddings, atol=0.01)
    assert np.abs(embeddings[0]).max() > 0.02
