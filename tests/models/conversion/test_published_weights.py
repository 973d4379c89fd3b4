"""Published weights fill models with other arguments, one tensor at a time."""

import tracemalloc

import keras
import numpy as np
import pytest

from keras_moe import models
from keras_moe.layers import resize_patch_kernel
from keras_moe.models.conversion import PublishedWeights, _readers
from keras_moe.ops import _initializers
from tests import golden, published
from tests.compare import assert_close, assert_same

pytestmark = pytest.mark.usefixtures("op_by_op")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def test_another_head_and_image_size():
    source = str(published.CHECKPOINTS / "vit_classic_prelogits.npz")
    old = models.from_preset(source, task="backbone")
    model, report = models.convert(
        source, num_classes=3, image_shape=(48, 32, 1), dropout=0.1
    )
    assert model.output_shape == (None, 3)
    assert model.representation_dim is None
    assert report.new == ["predictions/kernel", "predictions/bias"]
    names = [(x, y) for x in ("head", "pre_logits") for y in ("kernel", "bias")]
    assert set(report.ignored) == set(map("/".join, names))
    kernel, table = "patch_embedding/kernel", "position_embedding/embedding"
    grey = published.values(old, kernel).sum(axis=2)
    assert_close(published.values(model, kernel)[:, :, 0], grey, 1e-5, 1e-6)
    assert published.values(model, table).shape == (1, 1 + 6 * 4, 24)
    corners = published.values(model, table)[0, [0, 1, 4, 21, 24]]
    assert_close(corners, published.values(old, table)[0, [0, 1, 4, 13, 16]])
    how = {weight.weight: weight.how for weight in report.weights}
    assert how[kernel] == "folded to 1 channels"
    assert how[table] == "resized from (4, 4) to (6, 4), bilinear"
    assert published.predict(model, np.zeros((2, 48, 32, 1))).shape == (2, 3)


def test_a_smaller_patch_size_with_the_images_normalisation(tmp_path):
    arrays, _ = golden.load("12_timm/vit_token")
    mean, std = np.array([0.4, 0.5, 0.3]), np.array([0.2, 0.3, 0.25])
    folder = published.timm_folder(tmp_path, "vit_token", mean.tolist(), std.tolist())
    model, report = models.convert(folder, patch_size=4)
    images = published.random_images((32, 32, 3))
    kernel = arrays["state_dict/patch_embed.proj.weight"].transpose(2, 3, 1, 0)
    kernel = resize_patch_kernel(kernel, 4, "bicubic")
    # timm's resized kernel reads normalised images.
    seen = ((images + 1) / 2 - mean) / std
    seen = seen.reshape(2, 8, 4, 8, 4, 3)
    expected = np.einsum("byixjc,ijcd->byxd", seen, kernel).reshape(2, 64, -1)
    actual = model.backbone.get_layer("patch_embedding")(images)
    bias = arrays["state_dict/patch_embed.proj.bias"]
    assert_close(actual, expected + bias, **TOLERANCE)
    how = {weight.weight: weight.how for weight in report.weights}
    positions = how["position_embedding/embedding"]
    assert positions == "resized from (4, 4) to (8, 8), bicubic"


def test_a_new_pooling_comes_with_a_new_head():
    source = str(published.CHECKPOINTS / "vit_classic.npz")
    model, report = models.convert(source, num_classes=3, pooling="map")
    assert "pooler/probe" in report.new
    assert model.pooling == "map"
    with pytest.raises(ValueError, match=r"none for 'pooler/probe'"):
        models.convert(source, pooling="map")


@pytest.mark.every_backend
@pytest.mark.parametrize("source", ["vit_classic.npz", "vmoe_tiny/vmoe_tiny"])
def test_only_weights_without_a_rule_are_drawn(monkeypatch, source):
    source, draws = str(published.CHECKPOINTS / source), []

    generator = _initializers._generator

    def recorded(stream):
        # Seed, class and path of the weight.
        draws.append(stream.split("/", 2)[2])
        return generator(stream)

    monkeypatch.setattr(_initializers, "_generator", recorded)

    def converted(**overrides):
        draws.clear()
        keras.utils.set_random_seed(0)
        model, report = models.convert(source, **overrides)
        arrays = {w.path: keras.ops.convert_to_numpy(w.value) for w in model.weights}
        return arrays, set(report.new), sorted(draws)

    assert not converted()[2]
    assert not converted(task="backbone")[2]
    assert converted(load_weights=False)[2]
    new_head = {"num_classes": 3, "pooling": "map"}
    arrays, new, head = converted(**new_head)
    # All other weights are the source's, and the head's draws are not moved by them.
    monkeypatch.setattr(PublishedWeights, "fills_backbone", lambda self: False)
    expected, _, everything = converted(**new_head)
    assert head
    assert len(head) < len(everything)
    assert set(head) <= new
    for path, array in expected.items():
        assert_same(arrays[path], array)


def sizes_of_many(folder):
    """A dense ViT with many equal tensors, as .npz, .safetensors and V-MoE's."""
    dim, generator = 128, np.random.default_rng(0)
    sizes, in_attention = {24: dim, 40: 4 * dim}, {3: 2, 8: dim // 2, 24: dim}
    tensors = {}
    for name, array in published.classic().items():
        if "encoderblock_1" in name or "encoderblock_2" in name:
            continue
        table = in_attention if "Attention" in name else sizes
        shape = tuple(table.get(n, n) for n in array.shape)
        for i in range(8 if "encoderblock_0" in name else 1):
            value = generator.normal(size=shape).astype("float32")
            tensors[name.replace("block_0", f"block_{i}")] = value
    np.savez(folder / "vit.npz", **tensors)
    published.write_folder(folder / "flax", tensors)
    published.write_vmoe(folder / "vit", tensors)
    return tensors


def test_one_tensor_at_a_time(tmp_path):
    tensors = sizes_of_many(tmp_path)
    total = sum(array.nbytes for array in tensors.values())
    largest = max(array.nbytes for array in tensors.values())
    assert total > 20 * largest
    del tensors
    for source, reader in (
        (tmp_path / "vit.npz", _readers.NpzCheckpoint),
        (tmp_path / "flax" / "model.safetensors", _readers.SafetensorsCheckpoint),
        (tmp_path / "vit", _readers.VMoECheckpoint),
    ):
        with reader(source) as file:
            assert peak(lambda file=file: [file.read(x).sum() for x in file]) < (
                2.5 * largest + 200_000
            )
        models.convert(str(source))  # Compiled programs are made once.
        # NumPy's memory is that of the weights on CPUs, and counts: until they are
        # read it is unwritten, and JAX and TensorFlow take over what has been read.
        bare = peak(
            lambda source=source: models.convert(str(source), load_weights=False)
        )
        used = peak(lambda source=source: models.convert(str(source)))
        assert used < bare + total + 3 * largest + 0.1 * total, source


def peak(function):
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("overrides", "word"), [
    ({"num_layers": 2}, "encoderblock_2"),
    ({"num_layers": 4}, "block_3"),
    ({"patch_size": 5}, "patch_size=(5, 5)"),
    ({"hidden_dim": 48}, "(8, 8, 3, 48)"),
    # Experts are not upcycled here.
    ({"moe_layers": [1]}, "none for 'block_1/moe"),
])  # fmt: skip
def test_arguments_that_do_not_fit(overrides, word):
    published.refused(str(published.CHECKPOINTS / "vit_classic.npz"), word, **overrides)


def test_a_mixer_serves_one_image_size():
    source = str(published.CHECKPOINTS / "mixer.npz")
    published.refused(source, "received: shape=(16, 20)", image_shape=(64, 64, 3))
    published.refused(source, "received: shape=(16, 20)", patch_size=4)
    assert models.from_preset(source, image_shape=(32, 32, 1)).input_shape[-1] == 1


def test_without_a_head_num_classes_is_needed(tmp_path):
    arrays = published.classic(head__kernel=None, head__bias=None)
    np.savez(tmp_path / "vit.npz", **arrays)
    source = str(tmp_path / "vit.npz")
    assert isinstance(models.from_preset(source), models.ViTBackbone)
    published.refused(source, "num_classes=None", task="image_classifier")
    assert models.from_preset(source, num_classes=3).output_shape == (None, 3)


@pytest.mark.parametrize(
    ("case", "patch_size", "scale"),
    [("vit_classic", 16, (2, 2)), ("mixer", (8, 24), (1, 3)), ("vmoe_tiny", 16, 2)],
)
def test_another_patch_size(case, patch_size, scale):
    source = published.CHECKPOINTS / (
        "vmoe_tiny/vmoe_tiny" if "vmoe" in case else f"{case}.npz"
    )
    old = models.from_preset(str(source))
    patch = old.backbone.get_config()["patch_size"]
    height, width, _ = old.backbone.image_shape
    rows, columns = np.broadcast_to(scale, 2)
    shape = (rows * height, columns * width, 3)
    model, report = models.convert(
        str(source), patch_size=patch_size, image_shape=shape
    )
    # Patches of one colour are themselves when they are resized.
    small = published.random_images((height // patch, width // patch, 3))
    small = small.repeat(patch, axis=1).repeat(patch, axis=2)
    large = small.repeat(rows, axis=1).repeat(columns, axis=2)
    expected = published.predict(old, small)
    assert_close(published.predict(model, large), expected, **TOLERANCE)
    new = model.backbone.get_layer("patch_embedding").patch_size
    how = {weight.weight: weight.how for weight in report.weights}
    assert how["patch_embedding/kernel"] == f"resized from {(patch, patch)} to {new}"
