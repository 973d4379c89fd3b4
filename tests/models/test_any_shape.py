"""Images of any shape in one batch, as patches: padding changes nothing."""

import math

import keras
import numpy as np
import pytest
from PIL import Image

from keras_moe import analysis, evaluation, layers, models, training
from keras_moe.report import write_report
from tests.backends import every_backend_for
from tests.compare import assert_close, assert_same
from tests.refusals import refuses
from tests.small_models import with_weights

GRIDS = ((2, 3), (5, 4), (1, 1))
MOST, SIDE = 24, 4
SIZES = {
    "image_shape": (16, 16, 3), "patch_size": SIDE, "hidden_dim": 16, "num_layers": 2,
    "num_heads": 2, "mlp_dim": 16, "seed": 1,
}  # fmt: skip
EXPERTS = {"moe_layers": [1], "num_experts": 4}
# What reads or passes on the mask.
KINDS = {
    "learned": {"moe": EXPERTS},
    "sincos": {"position_embedding": "sincos", "class_token": False},
    "rotary_2d": {"position_embedding": "rotary_2d", "register_tokens": 2},
    "golden_2d": {"position_embedding": "golden_2d", "moe": EXPERTS},
    "expert choice": {"moe": {**EXPERTS, "router": "softmax_expert_choice"}},
    "soft": {"position_embedding": None, "moe": {**EXPERTS, "router": "soft"}},
    "sinks": {"attention_sinks": True, "norm": "plain_rms", "class_token": False},
}


def backbone(**options):
    return with_weights(models.ViTBackbone(max_patches=MOST, **{**SIZES, **options}))


def padded(grids=GRIDS, length=MOST):
    """Random patches of images of these grids, with large numbers for padding."""
    generator = np.random.default_rng(0)
    patches = np.full((len(grids), length, 3 * SIDE**2), 7.0, "float32")
    for row, (rows, columns) in zip(patches, grids):
        count = rows * columns
        row[:count] = generator.uniform(-1, 1, (count, row.shape[1]))
    return {"patches": patches, "grids": np.array(grids, "int32")}


def one(inputs, index):
    """One image alone, without padding."""
    grid = inputs["grids"][index]
    patches = inputs["patches"][index : index + 1, : math.prod(grid)]
    return {"patches": patches, "grids": grid[None]}


def whole(inputs, index):
    """One image as pixels (1, height, width, channels)."""
    rows, columns = inputs["grids"][index]
    patches = inputs["patches"][index, : rows * columns]
    image = patches.reshape(rows, columns, SIDE, SIDE, 3).swapaxes(1, 2)
    return image.reshape(1, rows * SIDE, columns * SIDE, 3)


def features_of(model, inputs):
    return keras.Model(model.input, model.features).predict(inputs, verbose=0)


@pytest.mark.every_backend
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_alone_and_among_others(kind):
    model, inputs = backbone(**KINDS[kind]), padded()
    among = features_of(model, inputs)
    assert np.isfinite(among["tokens"]).all()
    for index, (rows, columns) in enumerate(GRIDS):
        alone = features_of(model, one(inputs, index))
        count = rows * columns
        assert_close(among["pooled"][index], alone["pooled"][0], 1e-5, 1e-5)
        received = among["patches"][index, :count]
        assert_close(received, alone["patches"][0], 1e-5, 1e-5)


@pytest.mark.parametrize("kind", ["learned", "sincos", "rotary_2d", "golden_2d"])
def test_the_same_as_images_of_one_shape(tmp_path, kind):
    """Weights go over, learned positions resized as on loading."""
    for interpolation in layers.position_embedding.INTERPOLATIONS:
        options = {**KINDS[kind], "position_interpolation": interpolation}
        model, inputs = backbone(**options), padded()
        model.save_to_preset(tmp_path / interpolation)
        rows, columns = GRIDS[1]
        fixed = models.from_preset(
            str(tmp_path / interpolation),
            image_shape=(rows * SIDE, columns * SIDE, 3),
            max_patches=None,
        )
        expected = fixed.predict(whole(inputs, 1), verbose=0)
        received = model.predict(one(inputs, 1), verbose=0)
        assert_close(received, expected, 1e-5, 1e-5)
        if kind != "learned":
            break


def test_patches_by_hand():
    image = np.arange(16.0).reshape(2, 8, 1)
    inputs = models.pad_patches([image, image[:, :2]], patch_size=2)
    assert_same(inputs["grids"], [[1, 4], [1, 1]])
    assert_same(inputs["patches"][0, :2], [[0, 1, 8, 9], [2, 3, 10, 11]])
    assert_same(inputs["patches"][1], [[0, 1, 8, 9], *[[0] * 4] * 3])


@pytest.mark.every_backend
@pytest.mark.parametrize("kind", ["axial", "golden"])
def test_rotary_positions_of_a_grid_in_half_precision(kind):
    """Angles are float32: 128 columns are more than bfloat16 tells apart."""
    x = np.random.default_rng(0).normal(size=(1, 257, 2, 8))
    of_grid = layers.RotaryEmbedding2D((2, 128), kind, dtype="bfloat16")
    of_any = layers.RotaryEmbedding2D(None, kind, first=1, dtype="bfloat16")
    received = of_any(x, positions=np.array([[2, 128]], "int32"))
    both = [keras.ops.cast(each, "float32") for each in (received, of_grid(x))]
    assert_close(*both, 1e-2, 1e-2)
    options = {"position_embedding": f"{'rotary' if kind == 'axial' else kind}_2d"}
    model = backbone(**options, dtype="mixed_bfloat16")
    fixed = models.ViTBackbone(
        **{**SIZES, **options, "image_shape": (20, 16, 3)}, dtype="mixed_bfloat16"
    )
    for weight, own in zip(fixed.weights, model.weights, strict=True):
        assert weight.path == own.path
        weight.assign(own)
    inputs = padded()
    expected = fixed.predict(whole(inputs, 1), verbose=0).astype("float32")
    received = model.predict(one(inputs, 1), verbose=0).astype("float32")
    assert_close(received, expected, 0.02, 0.02)


@pytest.mark.every_backend
def test_padding_has_no_part_in_training():
    """Neither in the losses of routers nor in the slots of experts."""
    router = {
        "name": "softmax_token_choice", "num_selected_experts": 1, "noise_std": 0.0,
        "capacity_factor": 2.0, "capacity_multiple_of": 1,
    }  # fmt: skip
    options = {"moe": {**EXPERTS, "router": router}}
    model, inputs = backbone(**options), padded()
    record = model.routing["block_1"]
    probe = keras.Model(model.input, [model.output, record.dispatched, record.gates])
    tokens, *records = probe(inputs, training=True)
    dispatched, gates = map(keras.ops.convert_to_numpy, records)
    counts = np.array([1 + math.prod(grid) for grid in GRIDS])
    real = np.arange(1 + MOST) < counts[:, None]
    assert not dispatched[~real].any()
    # Each expert has half of the slots, which padding would fill first.
    choices = np.bincount(gates[real].argmax(axis=-1), minlength=4)
    capacity = math.ceil(real.size / 2)
    assert choices.max() <= capacity < (~real).sum()
    assert_same(dispatched[real].sum(axis=0), choices)
    short = padded(length=20)
    other = probe(short, training=True)[0]
    assert_close(tokens[:, :21][real[:, :21]], other[real[:, :21]], 1e-5, 1e-5)
    losses = []
    for batch in (inputs, short):
        model(batch, training=True)
        losses.append([float(x) for x in model.losses])
    assert_close(losses[0], losses[1], 1e-5, 1e-6)


@pytest.mark.parametrize(
    "pooling", every_backend_for(["class_token", "patch_average", "map"], "map")
)
def test_a_classifier_fits_and_round_trips(tmp_path, pooling):
    inputs, labels = padded(), np.array([0, 1, 2])
    model = models.ViTImageClassifier(
        models.ViTBackbone(max_patches=MOST, moe=EXPERTS, **SIZES),
        num_classes=3,
        pooling=pooling,
    )
    model.compile(keras.optimizers.Adam(0.01))
    history = model.fit(inputs, labels, epochs=5, verbose=0).history["loss"]
    assert history[-1] < history[0]
    expected = model.predict(inputs, verbose=0)
    for index in range(len(GRIDS)):
        alone = model.predict(one(inputs, index), verbose=0)
        assert_close(alone[0], expected[index], 1e-5, 1e-5)
    model.save(tmp_path / "model.keras")
    model.save_to_preset(tmp_path / "preset")
    for again in (
        keras.saving.load_model(tmp_path / "model.keras"),
        models.from_preset(str(tmp_path / "preset")),
        model.copy(),
    ):
        assert_same(again.predict(inputs, verbose=0), expected)
    description = models.describe(model)
    assert description.num_tokens == 1 + MOST
    trained = sum(math.prod(x.shape) for x in model.trainable_weights)
    assert description.parameters == trained


def test_classify_takes_photos_of_any_shape(tmp_path):
    options = {"max_patches": MOST, "patch_size": SIDE}
    model = models.ViTImageClassifier(
        backbone(), 2, preprocessor=models.ImagePreprocessor((16, 16, 3), **options)
    )
    generator = np.random.default_rng(0)
    photos = [
        generator.integers(0, 255, shape, "uint8") for shape in ((40, 60, 3), (90, 30))
    ]
    results = model.classify(photos)
    assert [len(x) for x in results] == [2, 2]
    single = model.classify(Image.fromarray(photos[1]))
    assert_close(single[0].probability, results[1][0].probability)
    assert model.classify([]) == []
    model.save_to_preset(tmp_path)
    assert models.from_preset(str(tmp_path)).classify(photos) == results
    narrow = models.from_preset(str(tmp_path), max_patches=9)
    assert narrow.preprocessor.max_patches == 9
    fixed = models.from_preset(str(tmp_path), max_patches=None)
    assert fixed.preprocessor.max_patches is None
    assert len(fixed.classify(photos)) == 2


# Rounded, by SigLino's rule: (480, 640) is 1,200 patches, and of 256 at the same ratio
# 13.9 x 18.5; (100, 50) is 6 x 3, and of 64 it is 11.3 x 5.7.
@pytest.mark.parametrize(("size", "least", "grid"), [
    ((480, 640), 64, (13, 18)),
    ((100, 50), 64, (12, 6)),
    ((480, 640), None, (14, 18)),
    ((5, 900), None, (1, 180)),
])  # fmt: skip
def test_budgets_keep_the_aspect_ratio(size, least, grid):
    make = models.ImagePreprocessor(
        (256, 256, 3), max_patches=256, min_patches=least, patch_size=16
    )
    inputs = make(np.zeros((*size, 3), "uint8"))
    assert tuple(inputs["grids"]) == grid
    assert inputs["patches"].shape == (256, 768)
    count = math.prod(grid)
    # Black, and zeros for padding.
    assert (inputs["patches"][:count] == -1).all()
    assert not inputs["patches"][count:].any()


def test_images_are_those_of_transformers():
    transformers = pytest.importorskip("transformers.models.siglip2")
    theirs = transformers.image_processing_pil_siglip2.Siglip2ImageProcessorPil(
        patch_size=16, max_num_patches=64
    )
    ours = models.ImagePreprocessor(
        (128, 128, 3), max_patches=64, patch_size=16, antialias=True
    )
    generator = np.random.default_rng(0)
    for size in ((480, 640), (37, 500), (16, 16), (300, 301), (901, 77)):
        photo = generator.integers(0, 255, (*size, 3), "uint8")
        expected = theirs(Image.fromarray(photo), return_tensors="np")
        received = ours(photo)
        assert_same(received["grids"], expected["spatial_shapes"][0])
        count = math.prod(received["grids"])
        error = received["patches"][:count] - expected["pixel_values"][0, :count]
        # Pillow rounds to whole grey levels.
        assert np.abs(error).max() <= 1.01 / 127.5


def test_pairs_of_images_of_any_shape_and_texts(tmp_path):
    image = {**SIZES, "class_token": False, "max_patches": MOST, "moe": EXPERTS}
    text = {"vocabulary_size": 20, "max_length": 6, **SIZES}
    del text["image_shape"], text["patch_size"]
    pair = models.CLIPBackbone(
        image=image, text=text, image_pooling="map", projection_dim=8
    )
    preprocessor = models.ImagePreprocessor(
        (16, 16, 3), max_patches=MOST, patch_size=SIDE, min_patches=4
    )
    model = models.ContrastiveModel(pair, image_preprocessor=preprocessor)
    ids = np.array([[1, 7, 19, 0], [1, 5, 6, 19], [1, 2, 19, 0]])
    texts, images = {"token_ids": ids, "padding_mask": ids != 0}, padded()
    model.compile("adam")
    assert np.isfinite(model.fit({**images, **texts}, verbose=0).history["loss"])
    expected = model.encode_images(images)
    for index in range(len(GRIDS)):
        alone = model.encode_images(one(images, index))
        assert_close(alone[0], expected[index], 1e-5, 1e-5)
    photos = [np.zeros((40, 60, 3), "uint8"), np.zeros((9, 30, 3), "uint8")]
    similarity = model.similarity(photos, texts)
    model.save_to_preset(tmp_path)
    again = models.from_preset(str(tmp_path))
    assert again.image_preprocessor == preprocessor
    assert_same(again.similarity(photos, texts), similarity)
    pairs = {**images, **texts}, None
    embeddings = evaluation.encode_pairs(model, pairs)
    assert_close(embeddings.images, expected, 1e-6, 1e-6)
    assert len(embeddings.texts) == 3
    refuses("patches, grids, token_ids", model.predict, texts)
    refuses("patches, grids alone", model.encode_images, {"patches": 1})


def test_what_looks_at_a_model_leaves_padding_out(tmp_path):
    inputs, labels = padded(), np.array([0, 1, 0])
    model = models.ViTImageClassifier(backbone(moe=EXPERTS), 2)
    usage = analysis.expert_usage(model, (inputs, labels)).blocks["block_1"]
    real = sum(1 + math.prod(grid) for grid in GRIDS)
    assert usage.first_choices.sum() == real
    assert usage.tokens.sum() == 2 * real
    pooled = keras.Model(model.backbone.input, model.backbone.features["pooled"])
    data = inputs, np.array([0, 1, 2])
    features = evaluation.extract_features(pooled, data, verbose=0)
    assert evaluation.linear_probe(*features, *features) == 1
    refuses("max_patches=None", write_report, model, (inputs, labels), tmp_path)


def test_a_dense_model_becomes_sparse():
    sparse, report = training.upcycle(backbone(), num_experts=4, moe_layers=[1])
    assert report.preserved
    assert report.largest_difference < 1e-5
    assert sparse.max_patches == MOST
    sparse.enable_lora(2)
    assert np.isfinite(sparse.predict(padded(), verbose=0)).all()


def test_raw_pixels_are_told():
    with pytest.warns(UserWarning, match=r"in \[-1, 1\]"):
        backbone().predict({**padded(), "patches": np.full((3, 24, 48), 255)})


def test_onnx(tmp_path):
    if keras.backend.backend() == "torch":
        onnxruntime = pytest.importorskip("onnxruntime")
        inputs, path = padded(), str(tmp_path / "model.onnx")
        moe = {**EXPERTS, "moe_layers": [0]}
        model = backbone(moe=moe, position_embedding="golden_2d", num_layers=1)
        model.export(path, format="onnx", verbose=False)
        session = onnxruntime.InferenceSession(path)
        (received,) = session.run(None, inputs)
        expected = model.predict(inputs, verbose=0)
        assert_close(received, expected, 1e-5, 1e-5)


def test_bad_inputs():
    model, good = backbone(), padded()
    image, wide = np.zeros((8, 8, 3)), np.array([[1, 1], [3, 7], [2, 2]])
    for message, call, *arguments in (
        ("patches and grids", model.predict, np.zeros((1, 16, 16, 3))),
        ("max_patches=24", model.predict, padded(length=25)),
        ("from 1 to 20 patches", model.predict, {**padded(length=20), "grids": wide}),
        ("from 1 to 24", model.predict, {**good, "grids": good["grids"] - 1}),
        ("integers", model.predict, {**good, "grids": good["grids"] + 0.5}),
        ("a grid for each", model.predict, {**good, "grids": good["grids"][:2]}),
        ("None, 48", model.predict, {**good, "patches": np.zeros((3, 24, 47))}),
        ("patch_size=\\(3, 3\\) divides", models.pad_patches, [image], 3),
        ("at least one image", models.pad_patches, [], 4),
    ):
        refuses(message, call, *arguments)
    with pytest.raises(ValueError, match="images of one shape"):
        _ = model.grid
    refuses("max_patches=0", models.ViTBackbone, **{**SIZES, "max_patches": 0})


def test_a_preprocessor_that_does_not_fit():
    make = models.ImagePreprocessor(
        (16, 16, 3), max_patches=9, patch_size=4, min_patches=1
    )
    refuses("aspect ratio", make, np.zeros((4, 400, 3), "uint8"))
    model = models.ViTImageClassifier(backbone(), 2)
    with pytest.raises(ValueError, match="a preprocessor of"):
        model.preprocessor = make


@pytest.mark.parametrize(("options", "message"), [
    ({"max_patches": 9}, "patch_size=None"),
    ({"patch_size": 4}, "max_patches=None"),
    ({"min_patches": 4}, "min_patches=4"),
    ({"max_patches": 9, "patch_size": 4, "center_crop": 0.9}, "center_crop=0.9"),
])  # fmt: skip
def test_bad_budgets(options, message):
    refuses(message, models.ImagePreprocessor, (16, 16, 3), **options)
