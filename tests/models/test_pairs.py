"""Backbones of pairs and their task: towers, LIMoE's trunk, overrides, bad input."""

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.layers import PatchEmbedding
from keras_moe.losses import (
    ContrastiveLoss,
    SigmoidContrastiveLoss,
    SoftmaxContrastiveLoss,
    Temperature,
)
from tests.backends import every_backend_for
from tests.calls import call
from tests.compare import assert_close, assert_same
from tests.pair_models import (
    FOUR,
    IDS,
    IMAGE,
    IMAGES,
    MOE,
    PAIRS,
    TEXT,
    TEXTS,
    clip,
    limoe,
    one_block,
)
from tests.refusals import refuses
from tests.small_models import images, with_weights

KINDS = ("clip", "limoe")


@pytest.fixture(scope="module", params=KINDS)
def backbone(request):
    keras.utils.set_random_seed(1)
    return with_weights({"clip": clip, "limoe": limoe}[request.param]())


def outputs(model, inputs, training=False):
    results = call(model, inputs, training=training)
    return keras.tree.map_structure(keras.ops.convert_to_numpy, results)


@pytest.mark.usefixtures("op_by_op")
def test_modalities_and_examples_do_not_see_each_other(backbone):
    expected = outputs(backbone, PAIRS)
    for name, value in expected.items():
        assert value.shape == (3, 4), name
        assert_close(np.linalg.norm(value, axis=-1), 1, 1e-5)
    # Each modality alone, and other neighbours, at inference.
    alone = outputs(backbone.encoder("image"), IMAGES)
    assert_close(alone, expected["image_embeddings"], atol=2e-6)
    alone = outputs(backbone.encoder("text"), TEXTS)
    assert_close(alone, expected["text_embeddings"], atol=2e-6)
    other = {**PAIRS, "images": IMAGES[::-1].copy()}
    received = outputs(backbone, other)
    for name, order in (("text", [0, 1, 2]), ("image", [2, 1, 0])):
        name = f"{name}_embeddings"
        assert_close(received[name], expected[name][order], atol=2e-6)


def test_limoe_attends_within_a_modality_while_training():
    """Without experts nothing but attention could mix them."""
    model = with_weights(limoe(moe=None, mask_padding=True))
    expected = outputs(model, PAIRS, training=True)
    other = {**PAIRS, "images": IMAGES + 1}
    received = outputs(model, other, training=True)
    text, image = "text_embeddings", "image_embeddings"
    assert_close(received[text], expected[text], atol=2e-6)
    assert np.abs(received[image] - expected[image]).max() > 1e-3
    # Masked padding has no part in a text.
    ids = np.where(IDS == 0, 9, IDS)
    received = outputs(model, {**PAIRS, "token_ids": ids})
    assert_close(received[text], expected[text], atol=2e-6)
    routed = with_weights(limoe(moe=None))
    before, after = (
        outputs(routed, {**PAIRS, "token_ids": x})[text] for x in (IDS, ids)
    )
    assert np.abs(after - before)[[0, 2]].max() > 1e-3


@pytest.mark.usefixtures("op_by_op")
def test_limoe_routes_both_modalities_of_a_group_together():
    """With room for one token of a group an expert serves one modality's alone."""
    moe = {"examples_per_group": None, "evaluation": "official", "eval_capacity": 1}
    moe.update(num_experts=1, auxiliary_losses=None)
    model = with_weights(limoe(moe))
    routing = keras.Model(model.input, model.routing)
    records = outputs(routing, PAIRS)
    served = {name: record.combined.sum() > 0 for name, record in records.items()}
    # First come: images come first.
    assert served == {"image/block_1": True, "text/block_1": False}
    counts = sum((record.combined > 0).sum() for record in records.values())
    assert counts == 1
    first = with_weights(limoe({**moe, "priority": [1, 0]}))
    records = outputs(keras.Model(first.input, first.routing), PAIRS)
    assert records["text/block_1"].combined.sum() > 0
    assert records["image/block_1"].combined.sum() == 0


def test_by_hand():
    """Without blocks' weights the embedding is that of the averaged input."""
    model = limoe(moe=None, num_layers=1)
    for weight in model.weights:
        if "block_0" in weight.path or "positions" in weight.path:
            weight.assign(np.zeros(weight.shape))
    table = model.get_layer("token_embedding").embeddings
    tokens = keras.ops.convert_to_numpy(table)[IDS]
    tokens = tokens - tokens.mean(-1, keepdims=True)
    tokens = tokens / np.sqrt(tokens.var(-1, keepdims=True) + 1e-6)
    kernel = keras.ops.convert_to_numpy(model.get_layer("text_projection").kernel)
    expected = tokens.mean(1) @ kernel
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    received = outputs(model, PAIRS)["text_embeddings"]
    assert_close(received, expected, atol=1e-5)


def test_patches_are_padded():
    model = limoe(moe=None, image_shape=(10, 8, 3))
    assert model.grid == (3, 2)
    embedding = with_weights(model).get_layer("patch_embedding")
    exact = PatchEmbedding(8, 4)
    padded = np.pad(images(1, 10, 8, 3), ((0, 0), (1, 1), (0, 0), (0, 0)))
    exact.build(padded.shape)
    exact.set_weights(embedding.get_weights())
    expected = keras.ops.convert_to_numpy(exact(padded))
    received = keras.ops.convert_to_numpy(embedding(images(1, 10, 8, 3)))
    assert_close(received, expected, atol=1e-6)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "kind", every_backend_for(["clip", "limoe", "shared"], "shared")
)
def test_pairs_are_told_apart_after_training(kind):
    keras.utils.set_random_seed(1)
    if kind == "shared":
        losses = {"load_balance": 0.01, "router_z": 1e-4}
        moe = {"num_selected_experts": 2, "auxiliary_losses": losses}
        backbone = one_block("limoe", moe)
    elif kind == "limoe":
        backbone = one_block(kind)
    else:
        backbone = clip()
    model = models.ContrastiveModel(backbone)
    model.compile(keras.optimizers.Adam(1e-2))
    scale = model.backbone.logit_scale
    before = float(scale.parameters()["logit_scale"])
    history = model.fit(PAIRS, batch_size=3, epochs=25, verbose=0).history["loss"]
    assert np.isfinite(history).all()
    assert float(scale.parameters()["logit_scale"]) != before
    # Auxiliary losses are those of training alone.
    logits = model.similarity(IMAGES, TEXTS)
    losses = -(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).diagonal()
    losses -= (logits - np.logaddexp.reduce(logits, axis=0, keepdims=True)).diagonal()
    evaluated = model.evaluate(PAIRS, batch_size=3, verbose=0)
    # Three pairs that are not told apart have a loss of log 3 = 1.10.
    assert evaluated < 1.0
    # The loss of float32 logits of about 10 is rounded to 1e-6.
    assert_close(evaluated, losses.mean() / 2, 1e-4, 2e-6)


def test_the_sigmoid_loss_is_the_default_with_a_bias():
    model = models.ContrastiveModel(clip(temperature="siglip"))
    assert isinstance(model.loss, SigmoidContrastiveLoss)
    logits = model.similarity(IMAGES, TEXTS)
    signs = 2 * np.eye(3) - 1
    expected = np.logaddexp(0, -signs * logits).sum() / 3
    assert model.evaluate(PAIRS, verbose=0) == pytest.approx(expected, rel=1e-4)
    assert isinstance(models.ContrastiveModel(clip()).loss, SoftmaxContrastiveLoss)


def test_padded_pairs_do_not_count():
    """The weights of arrays reach the loss, with ids and without."""
    model = models.ContrastiveModel(with_weights(clip()))
    expected = model.evaluate(PAIRS, verbose=0)
    weights = np.array([1.0, 1.0, 1.0, 0.0])
    options = {"sample_weight": weights, "verbose": 0}
    assert model.evaluate(FOUR, **options) == pytest.approx(expected, rel=1e-5)
    assert model.test_on_batch(FOUR, None, weights) == pytest.approx(expected, rel=1e-5)
    model.compile(
        keras.optimizers.SGD(0.0), SoftmaxContrastiveLoss(multi_positive=True)
    )
    ids = {"image_ids": np.arange(4)}
    assert model.evaluate(FOUR, ids, **options) == pytest.approx(expected, rel=1e-5)
    validation = (FOUR, None, weights)
    history = model.fit(FOUR, validation_data=validation, **options).history
    assert history["val_loss"][0] == pytest.approx(expected, rel=1e-5)
    refuses("for each of 4 pairs", model.evaluate, FOUR, sample_weight=weights[:2])


def distances(y_true, y_pred):
    images, texts = y_pred["image_embeddings"], y_pred["text_embeddings"]
    return y_pred["logit_scale"] * keras.ops.sum(keras.ops.square(images - texts), -1)


class OwnLoss(ContrastiveLoss):
    def call(self, y_true, y_pred):
        return distances(y_true, y_pred)


class KerasLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return distances(y_true, y_pred)


@pytest.mark.parametrize(
    "loss",
    [distances, OwnLoss(), pytest.param(KerasLoss(), marks=pytest.mark.every_backend)],
)
def test_any_loss_of_the_outputs_trains(loss):
    model = models.ContrastiveModel(with_weights(one_block("clip")))
    embeddings = model.predict(PAIRS, verbose=0)
    expected = float(keras.ops.exp(model.backbone.logit_scale.log_scale)) * np.mean(
        np.sum((embeddings["image_embeddings"] - embeddings["text_embeddings"]) ** 2, 1)
    )
    model.compile(keras.optimizers.SGD(0.01), loss)
    weights = np.array([1.0, 1.0, 1.0, 0.0])
    actual = model.evaluate(FOUR, sample_weight=weights, verbose=0)
    assert actual == pytest.approx(expected, rel=1e-4)
    model.fit(PAIRS, verbose=0)
    assert model.evaluate(PAIRS, verbose=0) < expected


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("kind", every_backend_for(KINDS, "limoe"))
def test_texts_of_any_length_in_a_dataset(kind):
    tf = pytest.importorskip("tensorflow")
    again = {"rematerialize": True} if kind == "limoe" else {}
    model = models.ContrastiveModel(one_block(kind, **again))
    lengths = [{**PAIRS, **{k: x[:, :n] for k, x in TEXTS.items()}} for n in (3, 5)]
    signature = {
        "images": tf.TensorSpec((None, 8, 8, 3)),
        "token_ids": tf.TensorSpec((None, None), "int32"),
        "padding_mask": tf.TensorSpec((None, None), "bool"),
    }
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(lengths), output_signature=signature
    )
    assert np.isfinite(model.fit(dataset, verbose=0).history["loss"]).all()
    extra = dataset.map(lambda x: {**x, "image_ids": x["token_ids"][:, 0]})
    refuses(r"alone; received: .*'image_ids'", model.predict, extra, verbose=0)


@pytest.fixture(scope="module")
def tokenizer():
    return models.TextTokenizer.trained(["two cats", "a cat"], vocabulary_size=518)


@pytest.fixture(scope="module", params=KINDS)
def model(request, tokenizer):
    keras.utils.set_random_seed(1)
    rows = models.TextTokenizer(
        tokenizer.tokenizer, 9, tokenizer.start_id, tokenizer.end_id
    )
    sizes = {"vocabulary_size": 520, "max_length": 9}
    if request.param == "clip":
        backbone = clip(text={**TEXT, **MOE, **sizes}, temperature=Temperature(5, 50))
    else:
        backbone = limoe(mask_padding=True, **sizes)
    prepared = models.ImagePreprocessor((8, 8, 3), mean=0.4)
    return models.ContrastiveModel(with_weights(backbone), rows, prepared)


def test_presets_files_and_copies_keep_the_tokenizer_and_the_results(model, tmp_path):
    captions = ["two cats", "a cat"]
    expected = model.similarity(IMAGES, captions)
    model.save_to_preset(tmp_path / "pairs")
    again = models.from_preset(str(tmp_path / "pairs"))
    assert type(again) is models.ContrastiveModel
    assert again.image_preprocessor == model.image_preprocessor
    assert again.backbone.get_config() == model.backbone.get_config()
    model.save(tmp_path / "pairs.keras")
    of_file = keras.saving.load_model(tmp_path / "pairs.keras")
    for other in (again, of_file, model.copy()):
        assert_same(other.similarity(IMAGES, captions), expected)
    # Photos of any size go through the preprocessor.
    photo = np.full((5, 7, 3), 200, "uint8")
    assert model.encode_images([photo, photo[:3]]).shape == (2, 4)
    assert model.encode_images(IMAGES[:0]).shape == (0, 4)


def test_adapted_and_quantised_models_encode_with_their_new_weights(model):
    captions = ["two cats", "a cat"]
    adapted, quantised = model.copy(), model.copy()
    before = adapted.similarity(IMAGES, captions)
    adapted.enable_lora(2)
    for weight in adapted.trainable_weights:
        if "lora" in weight.name:
            weight.assign(np.ones(weight.shape))
    assert np.abs(adapted.similarity(IMAGES, captions) - before).max() > 1e-3
    quantised.similarity(IMAGES, captions)
    quantised.quantize("int8")
    received = quantised.similarity(IMAGES, captions)
    assert 0 < np.abs(received - before).max() < 2


def test_routing_and_features_have_both_modalities(model):
    records = keras.Model(model.input, model.routing).predict(PAIRS, verbose=0)
    assert set(records) == {"image/block_1", "text/block_1"}
    assert records["text/block_1"].gates.shape == (3, 5, 4)
    features = keras.Model(model.input, model.features).predict(PAIRS, verbose=0)
    assert features["text/block_0"].shape == (3, 5, 8)
    assert features["image_embeddings"].shape == (3, 4)
    assert model.get_layer("text/block_1").feed_forward.router


def test_towers_of_ones_own_bring_their_weights():
    image = with_weights(models.ViTBackbone(**IMAGE))
    text = with_weights(models.TextBackbone(**TEXT), seed=2)
    pair = models.CLIPBackbone(image=image, text=text, projection_dim=4)
    of_images, of_texts = (pair.tower_backbone(name) for name in ("image", "text"))
    assert_same(outputs(of_images, IMAGES), outputs(image, IMAGES))
    assert_same(outputs(of_texts, TEXTS)["tokens"], outputs(text, TEXTS)["tokens"])
    image.enable_lora(2)
    with pytest.raises(ValueError, match="weight list of length 20"):
        models.CLIPBackbone(image=image, text=text, projection_dim=4)


def test_overrides_go_to_their_tower():
    def experts(**overrides):
        blueprint = models.resolve("clip_up_b32", overrides)
        return [
            (blueprint.config[name]["moe"] or {}).get("num_experts")
            for name in ("image", "text")
        ]

    assert experts() == [8, 8]
    assert experts(num_experts=16) == [16, 16]
    assert experts(num_experts=16, text={"num_experts": 4}) == [16, 4]
    assert experts(image={"moe": None}) == [None, 8]
    config = models.resolve("clip_b32", {"image_shape": (64, 64, 3)}).config
    assert config["image"]["image_shape"] == (64, 64, 3)
    assert "image_shape" not in config["text"]
    refuses("num_experts", models.resolve, "clip_b32", {"num_expert": 3})
    refuses("num_experts", models.resolve, "clip_b32", {"image": {"num_expert": 3}})


@pytest.mark.parametrize(("preset", "gflops"), [
    # CLIP-UP, Table 2 (two digits more than there).
    ("clip_b32", 14.78), ("clip_b16", 41.09), ("clip_l14", 175.33),
    ("clip_up_b32", 19.55), ("clip_up_b16", 54.20), ("clip_up_l14", 231.48),
])  # fmt: skip
def test_published_operations(preset, gflops):
    assert models.describe(preset).gflops == pytest.approx(gflops, rel=0.005)


@pytest.mark.parametrize(("preset", "millions", "active", "gflops"), [
    ("limoe_s32", 304, 43.8, 3.48), ("limoe_s16", 303, 42.7, 11.49),
    ("limoe_b32", 991, 113.0, 11.39), ("limoe_b16", 990, 111.3, 37.73),
    ("limoe_l32", 3462, 339.7, 39.9), ("limoe_l16", 3460, 337.5, 132.3),
    # LIMoE, section 3.2: 5.6B and 675M. 551 GFLOPs are those of 20 x 20 patches;
    # with padding there are 21 x 21.
    ("limoe_h14", 5554, 675.7, 608.1),
])  # fmt: skip
def test_sizes_of_limoe(preset, millions, active, gflops):
    received = models.describe(preset)
    assert received.parameters / 1e6 == pytest.approx(millions, rel=0.005)
    assert received.active_parameters / 1e6 == pytest.approx(active, rel=0.005)
    assert received.gflops == pytest.approx(gflops, rel=0.005)


def accuracy(outputs, ids=None, weights=None, **options):
    metric = models.ContrastiveAccuracy(**options)
    metric.update_state(ids, outputs, weights)
    return float(metric.result())


def brute_force(outputs, ids, weights):
    """Image by image and text by text."""
    of_images, of_texts = outputs["image_embeddings"], outputs["text_embeddings"]
    total = 0.0
    counted = np.flatnonzero(weights)
    for i in counted:
        same = {j for x in ids.values() for j in np.flatnonzero(x == x[i])} | {i}
        own = [j for j in counted if j in same]
        others = [j for j in counted if j not in own]
        for x, y in ((of_images, of_texts), (of_texts, of_images)):
            x, y = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y))
            nearest = max((x[i] @ y[j] for j in others), default=-np.inf)
            total += weights[i] * 0.5 * (max(x[i] @ y[j] for j in own) > nearest)
    return total / weights.sum()


@pytest.mark.every_backend
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_equals_brute_force(chunk_size):
    draw = np.random.default_rng(0)
    of_images = draw.normal(size=(11, 3)).astype("float32")
    of_texts = (of_images + 0.6 * draw.normal(size=of_images.shape)).astype("float32")
    outputs = {"image_embeddings": of_images, "text_embeddings": of_texts}
    weights = np.array([1, 2, 1, 0, 1, 0.5, 1, 1, 0, 1, 1], "float32")
    ids = {
        "image_ids": np.array([0, 1, 2, 3, 0, 5, 6, 0, 8, 9, 10]),
        "text_ids": np.array([0, 1, 1, 3, 4, 5, 6, 7, 8, 9, 9]),
    }
    for some in ({}, ids):
        expected = brute_force(outputs, some, weights)
        assert 0.2 < expected < 0.9
        # NaN in padding is no neighbour of any token.
        outputs["text_embeddings"][3] = np.nan
        actual = accuracy(outputs, some or None, weights, chunk_size=chunk_size)
        outputs["text_embeddings"][3] = 1.0
        assert actual == pytest.approx(expected, rel=1e-6)


def test_accuracy_by_hand():
    x = np.eye(3, dtype="float32")
    # Two captions changed places, which are one caption by their ids.
    outputs = {"image_embeddings": x, "text_embeddings": x[[1, 0, 2]]}
    assert accuracy(outputs) == pytest.approx(1 / 3)
    assert accuracy(outputs, {"text_ids": np.array([5, 5, 7])}) == 1.0
    # A model that tells nothing apart.
    same = {name: np.ones((3, 2), "float32") for name in outputs}
    assert accuracy(same) == 0.0
    # The mean over pairs, not over batches.
    metric = models.ContrastiveAccuracy()
    metric.update_state(None, outputs)
    metric.update_state(None, {name: x[:1] for name in outputs})
    assert float(metric.result()) == pytest.approx(2 / 4)


@pytest.mark.every_backend
def test_fit_and_evaluate_report_it(tmp_path):
    model = models.ContrastiveModel(with_weights(one_block("clip")))
    metrics = [models.ContrastiveAccuracy()]
    model.compile(keras.optimizers.SGD(0.0), SoftmaxContrastiveLoss(), metrics=metrics)
    expected = accuracy(model.predict(PAIRS, verbose=0))
    weights = np.array([1.0, 1.0, 1.0, 0.0])
    options = {"sample_weight": weights, "batch_size": 4, "verbose": 0}
    history = model.fit(FOUR, validation_data=(FOUR, None, weights), **options).history
    names = {"loss", "contrastive_accuracy"}
    assert set(history) == names | {f"val_{name}" for name in names}
    assert history["val_contrastive_accuracy"] == [pytest.approx(expected)]
    # The compiled state comes back with the model, and the metric is no weight of it.
    model.save(tmp_path / "pairs.keras")
    again = keras.saving.load_model(tmp_path / "pairs.keras")
    actual = again.evaluate(PAIRS, verbose=0, return_dict=True)
    assert actual["contrastive_accuracy"] == pytest.approx(expected)
    again.compile(loss=SoftmaxContrastiveLoss())
    assert set(again.evaluate(PAIRS, verbose=0, return_dict=True)) == {"loss"}
