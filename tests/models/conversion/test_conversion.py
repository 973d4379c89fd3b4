"""Weights of others give the same logits and features in our models."""

import json
import shutil
import tracemalloc
import weakref

import keras
import keras_hub
import ml_dtypes
import numpy as np
import pytest

from keras_moe import models
from keras_moe.layers import resize_patch_kernel
from keras_moe.models.conversion import PublishedWeights
from keras_moe.models.conversion._readers import NpzCheckpoint, SafetensorsCheckpoint
from keras_moe.models.conversion._vmoe_checkpoint import VMoECheckpoint
from tests import golden
from tests.models.conversion.writers import write_folder, write_vmoe

pytestmark = pytest.mark.usefixtures("op_by_op")

CHECKPOINTS = golden.FOLDER / "07_checkpoints"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
HALF = [0.5] * 3


def predict(model, images):
    return model.predict(images, verbose=0)


def random_images(shape, batch=2):
    return np.random.default_rng(1).uniform(-1, 1, (batch, *shape)).astype("float32")


def values(model, name):
    (weight,) = [weight for weight in model.weights if weight.path == name]
    return keras.ops.convert_to_numpy(weight.value)


# Google's releases


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("case", "source", "scheme"),
    [
        ("vit_classic", "vit_classic.npz", "ViT"),
        ("vit_classic_prelogits", "vit_classic_prelogits.npz", "ViT"),
        ("mixer", "mixer.npz", "MLP-Mixer"),
        ("vmoe_tiny", "vmoe_tiny/vmoe_tiny", "V-MoE"),
        ("vmoe_tiny", "vmoe_tiny/vmoe_tiny.index", "V-MoE"),
    ],
)
def test_logits_of_the_releases(case, source, scheme):
    arrays, _ = golden.load(f"07_checkpoints/{case}_expected")
    model, report = models.convert(str(CHECKPOINTS / source))
    actual = predict(model, arrays["inputs/images"])
    np.testing.assert_allclose(actual, arrays["outputs/logits"], **TOLERANCE)
    assert report.scheme == f"{scheme} (Google)"
    assert report.licence == "Apache-2.0"
    assert not report.new
    assert not report.ignored
    paths = {w.path for w in model.weights if keras.backend.is_float_dtype(w.dtype)}
    assert {weight.weight for weight in report.weights} == paths
    assert json.loads(json.dumps(report.to_dict()))["scheme"] == report.scheme
    np.testing.assert_array_equal(
        predict(models.from_preset(str(CHECKPOINTS / source)), arrays["inputs/images"]),
        actual,
    )


def test_every_leaf_of_a_vmoe_checkpoint_is_read_whole():
    arrays, _ = golden.load("07_checkpoints/vmoe_tiny_expected")
    with VMoECheckpoint(CHECKPOINTS / "vmoe_tiny/vmoe_tiny") as file:
        sums = {f"sums/{name}": file.read(name).sum() for name in file}
        rows = file.read("head/kernel", slice(2, 5))
        np.testing.assert_array_equal(rows, file.read("head/kernel")[2:5])
    expected = {name: x for name, x in arrays.items() if name.startswith("sums/")}
    assert sums.keys() == expected.keys()
    for name, total in sums.items():
        np.testing.assert_allclose(total, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.backend_free
@pytest.mark.parametrize("version", ["20220622", None])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_slices_may_lie_in_any_shard(tmp_path, version, dtype):
    generator = np.random.default_rng(0)
    arrays = {
        name: generator.normal(size=shape).astype(dtype)
        for name, shape in {"b/10/x": (7, 2, 3), "b/2/x": (5,), "a": (1, 4)}.items()
    }
    arrays["s"] = np.float32(3.0)

    def edit(index):
        index["version"] = version

    prefix = write_vmoe(tmp_path / "x", arrays, shards=4, pieces=5, edit_index=edit)
    with VMoECheckpoint(prefix) as file:
        assert list(file) == ["a", "b/10/x", "b/2/x", "s"]
        for name, array in arrays.items():
            np.testing.assert_array_equal(file.read(name), array.astype("float32"))


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "case",
    [
        "soft_moe_vit_gap",
        "vmoe_k2_map_bpr",
        "vmoe_k2_token_cap4_nodrop",
        "dense_vit_token",
    ],
)
def test_models_of_vmoes_code(tmp_path, case):
    arrays, config = golden.load(f"06_vmoe_models/{case}")
    prefix = write_vmoe(
        tmp_path / "checkpoint",
        {
            k.removeprefix("params/"): v
            for k, v in arrays.items()
            if k.startswith("params/")
        },
    )
    overrides = {}
    if "bpr" in case:
        # Weights do not tell with which capacity images compete.
        overrides = {
            "capacity_factor": 1.0,
            "eval_capacity_factor": 1.0,
            "examples_per_group": 3,
            "priority": "max_gate",
        }
    model, report = models.convert(prefix, **overrides)
    assert model.count_params() == config["param_count"]
    np.testing.assert_allclose(
        predict(model, arrays["inputs/images"]), arrays["outputs/logits"], **TOLERANCE
    )
    if "soft" in case:
        assert report.scheme == "Soft MoE (Google)"
        assert report.arguments["num_slots"] == 3


def parameters_of(arrays):
    return {
        name.removeprefix("params/"): array
        for name, array in arrays.items()
        if name.startswith("params/")
    }


@pytest.mark.backend_free
@pytest.mark.parametrize("pooling", ["map", "first"])
def test_normalised_queries_and_keys_of_vmoes_code(tmp_path, pooling):
    arrays, config = golden.load(f"16_query_key_norm/{pooling}")
    prefix = write_vmoe(tmp_path / "checkpoint", parameters_of(arrays))
    # Without weights of its own, the first token's pooling is to be told.
    overrides = {"pooling": "first"} if pooling == "first" else {}
    model, _ = models.convert(prefix, **overrides)
    assert model.pooling == pooling
    assert model.count_params() == config["param_count"]
    description = models.describe(model)
    assert description.parameters == model.count_params()
    actual = predict(model, arrays["inputs/images"])
    np.testing.assert_allclose(actual, arrays["outputs/logits"], **TOLERANCE)


@pytest.mark.backend_free
def test_a_head_that_normalises_where_the_blocks_do_not(tmp_path):
    arrays, _ = golden.load("16_query_key_norm/map")
    parameters = parameters_of(arrays)
    norms = ("query_ln/scale", "key_ln/scale")
    of_head = {
        name: array
        for name, array in parameters.items()
        if name.startswith("MapHead") or not name.endswith(norms)
    }
    model, _ = models.convert(write_vmoe(tmp_path / "head", of_head))
    assert model.pooling_query_key_norm is True
    assert not model.backbone.get_config()["query_key_norm"]
    of_blocks = {
        name: array
        for name, array in parameters.items()
        if not name.startswith("MapHead") or not name.endswith(norms)
    }
    model, _ = models.convert(write_vmoe(tmp_path / "blocks", of_blocks))
    assert model.pooling_query_key_norm is False
    # A trained model's head comes with another number of classes, too.
    model.save_to_preset(tmp_path / "preset")
    again = models.from_preset(str(tmp_path / "preset"), num_classes=2)
    assert again.count_params() == model.count_params() - 3 * (16 + 1)


@pytest.mark.backend_free
@pytest.mark.parametrize("prefix", ["params", "target"])
def test_a_training_state_gives_its_parameters(tmp_path, prefix):
    arrays, config = golden.load("16_query_key_norm/map")
    parameters = parameters_of(arrays)
    state = {"step": np.int32(7), "rngs/dropout": np.zeros(2, "uint32")}
    for name, array in parameters.items():
        state[f"{prefix}/{name}"] = array
        state[f"opt_state/0/mu/{name}"] = np.zeros_like(array)
    state["opt_state/0/count"] = np.int32(7)
    model, report = models.convert(write_vmoe(tmp_path / "state", state))
    actual = predict(model, arrays["inputs/images"])
    np.testing.assert_allclose(actual, arrays["outputs/logits"], **TOLERANCE)
    assert set(report.ignored) == {x for x in state if not x.startswith(prefix)}
    assert "opt_state" in report.ignored["opt_state/0/count"]
    assert "optimizer" in report.ignored["opt_state/0/count"]
    assert report.ignored["step"].endswith("no parameter: step")
    description = models.describe(str(tmp_path / "state"))
    assert description.parameters == config["param_count"]


@pytest.mark.backend_free
def test_released_names_say_what_weights_do_not(tmp_path):
    for file in (CHECKPOINTS / "vmoe_tiny").iterdir():
        name = file.name.replace("vmoe_tiny", "vmoe_b16_imagenet21k_randaug_strong")
        shutil.copy(file, tmp_path / name)
    model, report = models.convert(
        str(tmp_path / "vmoe_b16_imagenet21k_randaug_strong"), load_weights=False
    )
    assert report.arguments["examples_per_group"] == 8
    assert model.multi_label
    assert not report.notes
    assert not report.weights


@pytest.mark.backend_free
def test_the_names_of_big_vision_and_linen(tmp_path):
    arrays = dict(np.load(CHECKPOINTS / "vit_classic.npz"))
    renamed = {}
    for name, array in arrays.items():
        for old, new in (
            ("LayerNorm_2", "LayerNorm_1"),
            ("MlpBlock_3", "MlpBlock_0"),
            ("Attention_1", "Attention_0"),
            ("Transformer/posembed_input/", ""),
        ):
            name = name.replace(old, new)
        renamed[f"params/{name}"] = array
    np.savez(tmp_path / "vit.npz", **renamed)
    expected, _ = golden.load("07_checkpoints/vit_classic_expected")
    model = models.from_preset(tmp_path / "vit.npz")
    np.testing.assert_allclose(
        predict(model, expected["inputs/images"]),
        expected["outputs/logits"],
        **TOLERANCE,
    )


# Overrides


@pytest.mark.backend_free
def test_another_head_and_image_size():
    source = str(CHECKPOINTS / "vit_classic_prelogits.npz")
    old = models.from_preset(source, task="backbone")
    model, report = models.convert(
        source, num_classes=3, image_shape=(48, 32, 1), dropout=0.1
    )
    assert model.output_shape == (None, 3)
    assert model.representation_dim is None
    assert report.new == ["predictions/kernel", "predictions/bias"]
    assert set(report.ignored) == {
        f"{layer}/{what}"
        for layer in ("head", "pre_logits")
        for what in ("kernel", "bias")
    }
    kernel, table = "patch_embedding/kernel", "position_embedding/embedding"
    np.testing.assert_allclose(
        values(model, kernel)[:, :, 0],
        values(old, kernel).sum(axis=2),
        rtol=1e-5,
        atol=1e-6,
    )
    assert values(model, table).shape == (1, 1 + 6 * 4, 24)
    corners = values(model, table)[0, [0, 1, 4, 21, 24]]
    np.testing.assert_allclose(corners, values(old, table)[0, [0, 1, 4, 13, 16]])
    how = {weight.weight: weight.how for weight in report.weights}
    assert how[kernel] == "folded to 1 channels"
    assert how[table] == "resized from (4, 4) to (6, 4), bilinear"
    assert predict(model, np.zeros((2, 48, 32, 1))).shape == (2, 3)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("case", "patch_size", "scale"),
    [("vit_classic", 16, (2, 2)), ("mixer", (8, 24), (1, 3)), ("vmoe_tiny", 16, 2)],
)
def test_another_patch_size(case, patch_size, scale):
    source = CHECKPOINTS / ("vmoe_tiny/vmoe_tiny" if "vmoe" in case else f"{case}.npz")
    old = models.from_preset(str(source))
    patch = old.backbone.get_config()["patch_size"]
    height, width, _ = old.backbone.image_shape
    rows, columns = np.broadcast_to(scale, 2)
    model, report = models.convert(
        str(source),
        patch_size=patch_size,
        image_shape=(rows * height, columns * width, 3),
    )
    # Patches of one colour are themselves when they are resized.
    small = random_images((height // patch, width // patch, 3))
    small = small.repeat(patch, axis=1).repeat(patch, axis=2)
    large = small.repeat(rows, axis=1).repeat(columns, axis=2)
    np.testing.assert_allclose(predict(model, large), predict(old, small), **TOLERANCE)
    new = model.backbone.get_layer("patch_embedding").patch_size
    how = {weight.weight: weight.how for weight in report.weights}
    assert how["patch_embedding/kernel"] == f"resized from {(patch, patch)} to {new}"


@pytest.mark.backend_free
def test_a_smaller_patch_size_with_the_images_normalisation(tmp_path):
    arrays, _ = golden.load("12_timm/vit_token")
    mean, std = np.array([0.4, 0.5, 0.3]), np.array([0.2, 0.3, 0.25])
    folder = timm_folder(tmp_path, "vit_token", mean.tolist(), std.tolist())
    model, report = models.convert(folder, patch_size=4)
    images = random_images((32, 32, 3))
    kernel = arrays["state_dict/patch_embed.proj.weight"].transpose(2, 3, 1, 0)
    kernel = resize_patch_kernel(kernel, 4, "bicubic")
    # timm's resized kernel reads normalised images.
    seen = ((images + 1) / 2 - mean) / std
    seen = seen.reshape(2, 8, 4, 8, 4, 3)
    expected = np.einsum("byixjc,ijcd->byxd", seen, kernel).reshape(2, 64, -1)
    actual = model.backbone.get_layer("patch_embedding")(images)
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(actual),
        expected + arrays["state_dict/patch_embed.proj.bias"],
        **TOLERANCE,
    )
    how = {weight.weight: weight.how for weight in report.weights}
    positions = how["position_embedding/embedding"]
    assert positions == "resized from (4, 4) to (8, 8), bicubic"


@pytest.mark.backend_free
@pytest.mark.parametrize("case", range(4))
def test_positions_are_resized_as_the_releases_do_it(tmp_path, case):
    arrays, config = golden.load("07_checkpoints/posemb_interpolation")
    old, new = (
        arrays[f"inputs/{case}/pos_embedding"],
        arrays[f"outputs/{case}/pos_embedding"],
    )
    dim = old.shape[-1]
    classic = np.load(CHECKPOINTS / "vit_classic.npz")
    shapes = {name: classic[name].shape for name in classic.files}
    shapes = {
        name: tuple({24: dim, 3: 1, 8: dim}.get(n, n) for n in shape)
        for name, shape in shapes.items()
        if "encoderblock_" not in name or "encoderblock_0" in name
    }
    shapes["embedding/kernel"] = (2, 2, 3, dim)
    has_token = config["cases"][case]["cls_token"]
    if not has_token:
        del shapes["cls"]
    tensors = {name: np.zeros(shape, "float32") for name, shape in shapes.items()}
    tensors["Transformer/posembed_input/pos_embedding"] = old
    np.savez(tmp_path / "vit.npz", **tensors)
    size = 2 * config["cases"][case]["new_grid"]
    model = models.from_preset(
        str(tmp_path / "vit.npz"), task="backbone", image_shape=(size, size, 3)
    )
    actual = values(model, "position_embedding/embedding")
    np.testing.assert_allclose(actual, new, rtol=1e-5, atol=1e-5)


@pytest.mark.backend_free
def test_a_new_pooling_comes_with_a_new_head():
    source = str(CHECKPOINTS / "vit_classic.npz")
    model, report = models.convert(source, num_classes=3, pooling="map")
    assert "pooler/probe" in report.new
    assert model.pooling == "map"
    with pytest.raises(ValueError, match=r"none for 'pooler/probe'"):
        models.convert(source, pooling="map")


@pytest.mark.every_backend
@pytest.mark.parametrize("source", ["vit_classic.npz", "vmoe_tiny/vmoe_tiny"])
def test_only_weights_without_a_rule_are_drawn(monkeypatch, source):
    source, draws = str(CHECKPOINTS / source), []

    def recorded(draw):
        def call(self, shape, dtype=None):
            draws.append(tuple(shape))
            return draw(self, shape, dtype=dtype)

        return call

    for name in ("VarianceScaling", "RandomNormal", "TruncatedNormal", "RandomUniform"):
        cls = getattr(keras.initializers, name)
        monkeypatch.setattr(cls, "__call__", recorded(cls.__call__))

    def converted(**overrides):
        draws.clear()
        keras.utils.set_random_seed(0)
        model, report = models.convert(source, **overrides)
        arrays = {w.path: keras.ops.convert_to_numpy(w.value) for w in model.weights}
        return arrays, set(report.new), sorted(draws)

    assert not converted()[2]
    assert not converted(task="backbone")[2]
    new_head = {"num_classes": 3, "pooling": "map"}
    arrays, new, head = converted(**new_head)
    # All other weights are the source's, and the head's draws are not moved by them.
    monkeypatch.setattr(PublishedWeights, "fills_backbone", lambda self: False)
    expected, _, everything = converted(**new_head)
    assert head
    assert len(head) < len(everything)
    assert set(head) <= {arrays[path].shape for path in new}
    for path, array in expected.items():
        np.testing.assert_array_equal(arrays[path], array)


@pytest.mark.every_backend
def test_weights_that_are_not_loaded_are_drawn():
    source = str(CHECKPOINTS / "vit_classic.npz")
    model, _ = models.convert(source, load_weights=False)
    assert np.any(values(model, "patch_embedding/kernel"))


@pytest.mark.backend_free
def test_upcycled_arguments_are_refused_rather_than_left_empty():
    with pytest.raises(ValueError, match=r"none for 'block_1/moe"):
        models.convert(str(CHECKPOINTS / "vit_classic.npz"), moe_layers=[1])


@pytest.mark.backend_free
def test_a_converted_model_is_saved_and_comes_back(tmp_path):
    arrays, _ = golden.load("12_timm/vit_avg")
    model = models.from_preset(timm_folder(tmp_path / "timm", "vit_avg"))
    model.save_to_preset(tmp_path / "ours")
    again = models.from_preset(str(tmp_path / "ours"))
    images = arrays["inputs/images"]
    np.testing.assert_array_equal(predict(again, images), predict(model, images))
    description = models.describe(str(tmp_path / "ours"), num_classes=7)
    assert description.parameters == model.count_params()


# timm


def timm_folder(folder, case, mean=HALF, std=HALF, change=None, **config):
    arrays, info = golden.load(f"12_timm/{case}")
    kwargs = info["kwargs"]
    tensors = {
        name.removeprefix("state_dict/"): array
        for name, array in arrays.items()
        if name.startswith("state_dict/")
    }
    if change:
        change(tensors)
    content = {
        "architecture": "vit_base_patch16_224",
        "num_classes": 7,
        "global_pool": kwargs.get("global_pool", "token"),
        "model_args": kwargs,
        "pretrained_cfg": {"input_size": [3, 32, 32], "mean": mean, "std": std},
    }
    return write_folder(folder, tensors, {**content, **config})


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "case", ["vit_token", "vit_avg", "mixer", "vit_qk_norm", "vit_qk_norm_map"]
)
def test_logits_of_timm(tmp_path, case):
    arrays, _ = golden.load(f"12_timm/{case}")
    model, report = models.convert(timm_folder(tmp_path, case))
    assert models.describe(model).parameters == model.count_params()
    images = arrays["inputs/images"]
    np.testing.assert_allclose(
        predict(model, images), arrays["outputs/logits"], **TOLERANCE
    )
    assert report.scheme.endswith("(timm)")
    features = keras.Model(model.input, [model.backbone.output, model.features])
    encoded, pooled = predict(features, images)
    np.testing.assert_allclose(encoded, arrays["outputs/forward_features"], **TOLERANCE)
    np.testing.assert_allclose(pooled, arrays["outputs/pre_logits"], **TOLERANCE)


@pytest.mark.backend_free
@pytest.mark.parametrize("case", ["vit_token", "mixer"])
def test_the_normalisation_of_timms_images_is_kept(tmp_path, case):
    arrays, _ = golden.load(f"12_timm/{case}")
    mean, std = np.array([0.4, 0.5, 0.3]), np.array([0.2, 0.3, 0.25])
    folder = timm_folder(tmp_path, case, mean.tolist(), std.tolist())
    model, report = models.convert(folder)
    # timm sees (pixels in [0, 1] - mean) / std.
    images = 2 * (arrays["inputs/images"] * std + mean) - 1
    np.testing.assert_allclose(
        predict(model, images), arrays["outputs/logits"], **TOLERANCE
    )
    assert "mean=(0.4, 0.5, 0.3)" in report.notes[0]


@pytest.mark.backend_free
def test_timms_images_are_not_normalised_if_the_preprocessor_says_so(tmp_path):
    arrays, _ = golden.load("12_timm/vit_token")
    folder = timm_folder(tmp_path, "vit_token", [0.4, 0.5, 0.3], [0.2, 0.3, 0.25])
    preprocessor = tmp_path / "preprocessor_config.json"
    preprocessor.write_text(json.dumps({"do_normalize": False}))
    model, report = models.convert(folder)
    np.testing.assert_allclose(
        predict(model, 2 * arrays["inputs/images"] - 1),
        arrays["outputs/logits"],
        **TOLERANCE,
    )
    assert "mean=(0.0, 0.0, 0.0) and std=(1.0, 1.0, 1.0)" in report.notes[0]


@pytest.mark.backend_free
def test_layer_scale_becomes_part_of_the_kernels(tmp_path):
    arrays, _ = golden.load("12_timm/vit_token")
    gamma = np.random.default_rng(0).uniform(0.5, 2.0, 32).astype("float32")

    def change(tensors):
        for block in "01":
            for layer, scale in (("attn.proj", "ls1"), ("mlp.fc2", "ls2")):
                name = f"blocks.{block}.{layer}"
                tensors[f"{name}.weight"] = tensors[f"{name}.weight"] / gamma[:, None]
                tensors[f"{name}.bias"] = tensors[f"{name}.bias"] / gamma
                tensors[f"blocks.{block}.{scale}.gamma"] = gamma

    model = models.from_preset(timm_folder(tmp_path, "vit_token", change=change))
    np.testing.assert_allclose(
        predict(model, arrays["inputs/images"]), arrays["outputs/logits"], **TOLERANCE
    )


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("architecture", "activation", "epsilon"),
    [
        ("vit_base_patch16_224", "gelu", 1e-6),
        ("vit_base_patch16_clip_quickgelu_224", "quick_gelu", 1e-5),
        ("vit_base_patch16_siglip_224", "gelu", 1e-6),
        ("vit_so400m_patch16_siglip_256", "gelu_tanh", 1e-6),
        ("vit_large_patch16_siglip_gap_512", "gelu_tanh", 1e-6),
    ],
)
def test_what_only_timms_name_tells(tmp_path, architecture, activation, epsilon):
    folder = timm_folder(tmp_path, "vit_token", architecture=architecture)
    _, report = models.convert(folder, load_weights=False)
    assert report.arguments["activation"] == activation
    assert report.arguments["layer_norm_epsilon"] == epsilon


@pytest.mark.backend_free
def test_positions_without_a_row_for_the_class_token(tmp_path):
    arrays, _ = golden.load("12_timm/vit_token")

    def change(tensors):
        # The row's part moves into the token itself.
        tensors["cls_token"] = tensors["cls_token"] + tensors["pos_embed"][:, :1]
        tensors["pos_embed"] = tensors["pos_embed"][:, 1:]

    model = models.from_preset(timm_folder(tmp_path, "vit_token", change=change))
    np.testing.assert_allclose(
        predict(model, arrays["inputs/images"]), arrays["outputs/logits"], **TOLERANCE
    )


@pytest.mark.backend_free
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_tensors(tmp_path, dtype):
    exact = {}

    def change(tensors):
        for name, array in tensors.items():
            exact[name] = array.astype(dtype).astype("float32")

    whole = timm_folder(tmp_path / "whole", "vit_token", change=change)
    path = tmp_path / "half.safetensors"
    write_half(path, exact, dtype)
    with SafetensorsCheckpoint(path) as file:
        for name, array in exact.items():
            np.testing.assert_array_equal(file.read(name), array)
            np.testing.assert_array_equal(file.read(name, slice(0, 1)), array[:1])
    assert whole


def write_half(path, arrays, dtype):
    header, start, parts = {}, 0, []
    for name, array in arrays.items():
        data = array.astype(getattr(ml_dtypes, dtype, dtype)).tobytes()
        header[name] = {
            "dtype": {"float16": "F16", "bfloat16": "BF16"}[dtype],
            "shape": list(array.shape),
            "data_offsets": [start, start + len(data)],
        }
        start += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


@pytest.mark.backend_free
def test_weights_in_several_files(tmp_path):
    arrays, _ = golden.load("12_timm/vit_token")
    folder = tmp_path / "timm"
    timm_folder(folder, "vit_token")
    with SafetensorsCheckpoint(folder / "model.safetensors") as file:
        tensors = {name: file.read(name) for name in file}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:])):
        file = f"model-{number:05d}-of-00002.safetensors"
        write_folder(folder, {name: tensors[name] for name in part}, name=file)
        weight_map.update(dict.fromkeys(part, file))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    model = models.from_preset(str(folder))
    np.testing.assert_allclose(
        predict(model, arrays["inputs/images"]), arrays["outputs/logits"], **TOLERANCE
    )


# KerasHub


def randomized(model):
    generator = np.random.default_rng(0)
    for weight in model.weights:
        if keras.backend.is_float_dtype(weight.dtype):
            value = generator.normal(scale=0.3, size=weight.shape)
            weight.assign(value + ("gamma" in weight.path))
    return model


def hub_vit(**kwargs):
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16}
    return keras_hub.models.ViTBackbone((8, 12, 3), 4, **{**sizes, **kwargs})


def hub_clip():
    vision = keras_hub.models.CLIPVisionEncoder(
        4, 8, 2, 2, 16, image_shape=(8, 8, 3), name="vision"
    )
    text = keras_hub.models.CLIPTextEncoder(10, 8, 8, 1, 2, 16, max_sequence_length=5)
    return keras_hub.models.CLIPBackbone(vision, text, 6)


def hub_siglip(activation="gelu_approximate"):
    vision = keras_hub.models.SigLIPVisionEncoder(
        4, 8, 2, 2, 16, activation, image_shape=(8, 8, 3)
    )
    text = keras_hub.models.SigLIPTextEncoder(10, 8, 8, 1, 2, 16, max_sequence_length=5)
    return keras_hub.models.SigLIPBackbone(vision, text)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"use_mha_bias": False, "use_mlp_bias": False, "use_patch_bias": False},
        {"use_class_token": False, "layer_norm_epsilon": 1e-3, "name": "mine"},
    ],
)
def test_features_of_keras_hubs_vit(kwargs):
    hub = randomized(hub_vit(**kwargs))
    images = random_images((8, 12, 3))
    backbone, report = models.convert(hub)
    assert isinstance(backbone, models.ViTBackbone)
    assert len(hub.weights) == len({n for w in report.weights for n in w.sources})
    np.testing.assert_allclose(
        predict(backbone, images), predict(hub, images), **TOLERANCE
    )


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"pooling": "gap", "intermediate_dim": 5, "activation": "softmax"}],
)
def test_logits_of_keras_hubs_vit(kwargs):
    hub = keras_hub.models.ViTImageClassifier(hub_vit(), 3, **kwargs)
    images = random_images((8, 12, 3))
    model = models.from_preset(randomized(hub))
    np.testing.assert_allclose(
        predict(model, images), predict(hub, images), **TOLERANCE
    )


@pytest.mark.backend_free
def test_the_head_of_keras_hubs_vit_keeps_its_dtype():
    backbone = hub_vit(dtype="bfloat16")
    hub = keras_hub.models.ViTImageClassifier(backbone, 3, head_dtype="float32")
    model, _ = models.convert(hub)
    assert model.backbone.dtype_policy.name == "bfloat16"
    assert model.output_dense.dtype_policy.name == "float32"
    assert model.get_config()["head_dtype"] == "float32"
    same = keras_hub.models.ViTImageClassifier(backbone, 3)
    assert models.convert(same)[0].get_config()["head_dtype"] is None


@pytest.mark.backend_free
@pytest.mark.parametrize("trained_ids", [True, False])
def test_embeddings_of_keras_hubs_clip(trained_ids):
    clip = randomized(hub_clip())
    if trained_ids:
        # Its presets have these; a new model has zeros.
        clip.vision_encoder.embedding.position_ids.assign(np.arange(5)[None])
    images = random_images((8, 8, 3))
    model, report = models.convert(clip, tower="image")
    expected = keras.ops.convert_to_numpy(clip.get_vision_embeddings(images))
    np.testing.assert_allclose(predict(model, images), expected, **TOLERANCE)
    assert report.notes == ["the text tower and the logits' scale are left out"]
    # The encoder alone has no projection.
    backbone = models.from_preset(clip.vision_encoder)
    assert isinstance(backbone, models.ViTBackbone)
    expected = predict(clip.vision_encoder, {"images": images})
    np.testing.assert_allclose(predict(backbone, images), expected, **TOLERANCE)


@pytest.mark.backend_free
@pytest.mark.parametrize("activation", ["gelu_approximate", "gelu"])
def test_embeddings_of_keras_hubs_siglip(activation):
    siglip = randomized(hub_siglip(activation))
    images = random_images((8, 8, 3))
    expected = predict(siglip.vision_encoder, {"images": images})
    for source in (siglip, siglip.vision_encoder):
        model = models.convert(source, tower="image")[0]
        np.testing.assert_allclose(predict(model, images), expected, **TOLERANCE)


@pytest.mark.backend_free
def test_a_keras_hub_preset(tmp_path):
    hub = randomized(hub_vit())
    hub.save_to_preset(tmp_path / "hub")
    images = random_images((8, 12, 3))
    backbone = models.from_preset(str(tmp_path / "hub"))
    assert isinstance(backbone, models.ViTBackbone)
    np.testing.assert_allclose(
        predict(backbone, images), predict(hub, images), **TOLERANCE
    )


# CLIP, against a reference in NumPy


def gelu(x):
    # erf by its integral's series is too slow: the logistic form is CLIP's own.
    return x / (1 + np.exp(-1.702 * x))


def layer_norm(x, p, name):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def clip_tower(p, images, heads=2):
    """OpenCLIP's image tower, from its equations; images are normalised, NHWC."""
    p = {name: array.astype("float64") for name, array in p.items()}
    kernel = p["visual.conv1.weight"]
    dim, _, size, _ = kernel.shape
    batch, height, width, _ = images.shape
    patches = images.reshape(batch, height // size, size, width // size, size, 3)
    x = np.einsum("byixjc,dcij->byxd", patches, kernel).reshape(batch, -1, dim)
    token = np.broadcast_to(p["visual.class_embedding"], (batch, 1, dim))
    x = np.concatenate([token, x], 1) + p["visual.positional_embedding"]
    x = layer_norm(x, p, "visual.ln_pre")
    for i in range(2):
        block = f"visual.transformer.resblocks.{i}."
        h = layer_norm(x, p, f"{block}ln_1")
        h = h @ p[f"{block}attn.in_proj_weight"].T + p[f"{block}attn.in_proj_bias"]
        q, k, v = (
            y.reshape(batch, -1, heads, dim // heads) for y in np.split(h, 3, axis=-1)
        )
        logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(dim // heads)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        h = np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, -1, dim)
        out = f"{block}attn.out_proj."
        x = x + h @ p[f"{out}weight"].T + p[f"{out}bias"]
        h = layer_norm(x, p, f"{block}ln_2")
        h = gelu(h @ p[f"{block}mlp.c_fc.weight"].T + p[f"{block}mlp.c_fc.bias"])
        x = x + h @ p[f"{block}mlp.c_proj.weight"].T + p[f"{block}mlp.c_proj.bias"]
    return layer_norm(x[:, 0], p, "visual.ln_post") @ p["visual.proj"]


def clip_tensors(dim=8, mlp=16, embedding=6):
    shapes = {
        "visual.conv1.weight": (dim, 3, 4, 4),
        "visual.class_embedding": (dim,),
        "visual.positional_embedding": (5, dim),
        "visual.proj": (dim, embedding),
        "logit_scale": (),
        "token_embedding.weight": (10, dim),
        "transformer.resblocks.0.ln_1.weight": (dim,),
    }
    for i in range(2):
        block = f"visual.transformer.resblocks.{i}."
        shapes[f"{block}attn.in_proj_weight"] = (3 * dim, dim)
        shapes[f"{block}attn.in_proj_bias"] = (3 * dim,)
        for name, inputs, outputs in (
            ("attn.out_proj", dim, dim),
            ("mlp.c_fc", dim, mlp),
            ("mlp.c_proj", mlp, dim),
        ):
            shapes[f"{block}{name}.weight"] = (outputs, inputs)
            shapes[f"{block}{name}.bias"] = (outputs,)
        for name in ("ln_1", "ln_2"):
            shapes[f"{block}{name}.weight"] = shapes[f"{block}{name}.bias"] = (dim,)
    for name in ("ln_pre", "ln_post"):
        shapes[f"visual.{name}.weight"] = shapes[f"visual.{name}.bias"] = (dim,)
    generator = np.random.default_rng(0)
    return {
        name: generator.normal(scale=0.4, size=shape).astype("float32")
        for name, shape in shapes.items()
    }


def as_transformers(tensors):
    """The same tensors under transformers' names."""
    renamed = {
        "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
        "vision_model.embeddings.class_embedding": "visual.class_embedding",
        "vision_model.embeddings.position_embedding.weight": (
            "visual.positional_embedding"
        ),
        "logit_scale": "logit_scale",
        "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    }
    renamed = {new: tensors[old] for new, old in renamed.items()}
    renamed["vision_model.embeddings.position_ids"] = np.arange(5)[None]
    renamed["visual_projection.weight"] = tensors["visual.proj"].T
    for new, old in (("pre_layrnorm", "ln_pre"), ("post_layernorm", "ln_post")):
        for what in ("weight", "bias"):
            renamed[f"vision_model.{new}.{what}"] = tensors[f"visual.{old}.{what}"]
    for i in range(2):
        old, new = (
            f"visual.transformer.resblocks.{i}.",
            f"vision_model.encoder.layers.{i}.",
        )
        for what in ("weight", "bias"):
            fused = np.split(tensors[f"{old}attn.in_proj_{what}"], 3)
            for name, part in zip("qkv", fused):
                renamed[f"{new}self_attn.{name}_proj.{what}"] = part
            for theirs, name in (
                ("self_attn.out_proj", "attn.out_proj"),
                ("layer_norm1", "ln_1"),
                ("layer_norm2", "ln_2"),
                ("mlp.fc1", "mlp.c_fc"),
                ("mlp.fc2", "mlp.c_proj"),
            ):
                renamed[f"{new}{theirs}.{what}"] = tensors[f"{old}{name}.{what}"]
    return renamed


MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])


@pytest.mark.every_backend
@pytest.mark.parametrize("kind", ["openclip", "file", "transformers"])
def test_embeddings_of_clip(tmp_path, kind):
    tensors = clip_tensors()
    overrides = {}
    if kind == "openclip":
        source = write_folder(
            tmp_path,
            tensors,
            name="open_clip_model.safetensors",
            open_clip_config={
                "model_cfg": {
                    "quick_gelu": True,
                    "vision_cfg": {"width": 8, "head_width": 4},
                },
                "preprocess_cfg": {"mean": MEAN.tolist(), "std": STD.tolist()},
            },
        )
    elif kind == "file":
        source = write_folder(tmp_path, tensors) + "/model.safetensors"
        overrides = {"activation": "quick_gelu", "num_heads": 2}
    else:
        config = {"model_type": "clip", "vision_config": {"num_attention_heads": 2}}
        source = write_folder(tmp_path, as_transformers(tensors), config)
    model, report = models.convert(source, tower="image", **overrides)
    images = random_images((8, 8, 3))
    expected = clip_tower(tensors, ((images + 1) / 2 - MEAN) / STD)
    np.testing.assert_allclose(predict(model, images), expected, **TOLERANCE)
    assert model.backbone.get_config()["activation"] == "quick_gelu"
    assert "of the text tower" in report.ignored.values()
    assert "normalisation" in report.notes[0]


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("preprocessor", "seen"),
    [
        ({"do_normalize": True, "do_rescale": True}, lambda p: (p - MEAN) / STD),
        ({"do_normalize": False, "image_mean": HALF}, lambda p: p),
        ({"rescale_factor": 2 / 255}, lambda p: (2 * p - MEAN) / STD),
        (
            {"do_rescale": False, "image_mean": [100.0] * 3, "image_std": [50.0] * 3},
            lambda p: (255 * p - 100) / 50,
        ),
        ({"do_rescale": False, "do_normalize": False}, lambda p: 255 * p),
    ],
)
def test_what_transformers_preprocessor_leaves_out(tmp_path, preprocessor, seen):
    tensors = clip_tensors()
    config = {"model_type": "clip", "vision_config": {"num_attention_heads": 2}}
    source = write_folder(
        tmp_path, as_transformers(tensors), config, preprocessor_config=preprocessor
    )
    images = random_images((8, 8, 3))
    expected = clip_tower(tensors, seen((images + 1) / 2))
    model = models.convert(source, tower="image")[0]
    actual = predict(model, images)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.backend_free
def test_layer_scale_of_openclip(tmp_path):
    tensors = clip_tensors()
    expected = clip_tower(tensors, random_images((8, 8, 3)))
    generator = np.random.default_rng(0)
    for i in range(2):
        block = f"visual.transformer.resblocks.{i}."
        for layer, scale in (("attn.out_proj", "ls_1"), ("mlp.c_proj", "ls_2")):
            gamma = generator.uniform(0.5, 2.0, 8).astype("float32")
            tensors[f"{block}{scale}.gamma"] = gamma
            tensors[f"{block}{layer}.weight"] /= gamma[:, None]
            tensors[f"{block}{layer}.bias"] /= gamma
    source = write_folder(
        tmp_path,
        tensors,
        open_clip_config={
            "model_cfg": {
                "quick_gelu": True,
                "vision_cfg": {"width": 8, "head_width": 4},
            },
            "preprocess_cfg": {"mean": HALF, "std": HALF},
        },
    )
    model = models.from_preset(source, task="image_classifier")
    actual = predict(model, random_images((8, 8, 3)))
    np.testing.assert_allclose(actual, expected, **TOLERANCE)


@pytest.mark.backend_free
def test_embeddings_of_transformers_siglip(tmp_path):
    hub = randomized(hub_siglip()).vision_encoder
    get = {w.path: keras.ops.convert_to_numpy(w.value) for w in hub.weights}
    root = "vision_model."
    tensors = {
        f"{root}embeddings.patch_embedding.weight": get[
            "embedding/patch_embedding/kernel"
        ].transpose(3, 2, 0, 1),
        f"{root}embeddings.patch_embedding.bias": get["embedding/patch_embedding/bias"],
        f"{root}embeddings.position_embedding.weight": get[
            "embedding/position_embedding/embeddings"
        ],
        f"{root}post_layernorm.weight": get["post_layer_norm/gamma"],
        f"{root}post_layernorm.bias": get["post_layer_norm/beta"],
        f"{root}head.probe": next(
            x for n, x in get.items() if n.count("/") == 1 and "head" in n
        ),
        f"{root}head.layernorm.weight": get["head/layernorm/gamma"],
        f"{root}head.layernorm.bias": get["head/layernorm/beta"],
    }

    def dense(new, old, rows=None):
        kernel, bias = get[f"{old}/kernel"], get[f"{old}/bias"]
        tensors[f"{new}.weight"] = kernel.reshape(rows or len(kernel), -1).T
        tensors[f"{new}.bias"] = bias.reshape(-1)

    for i in range(2):
        old, new = f"encoder_block_{i}/", f"{root}encoder.layers.{i}."
        for n in "12":
            tensors[f"{new}layer_norm{n}.weight"] = get[f"{old}layer_norm{n}/gamma"]
            tensors[f"{new}layer_norm{n}.bias"] = get[f"{old}layer_norm{n}/beta"]
            dense(f"{new}mlp.fc{n}", f"{old}mlp/fc{n}")
        for theirs, name in (("q", "query"), ("k", "key"), ("v", "value")):
            dense(f"{new}self_attn.{theirs}_proj", f"{old}self_attn/{name}")
        dense(f"{new}self_attn.out_proj", f"{old}self_attn/attention_output", 8)
    for n in "12":
        dense(f"{root}head.mlp.fc{n}", f"head/mlp/fc{n}")
    dense(f"{root}head.attention.out_proj", "head/attention/attention_output", 8)
    for what, axis in (("kernel", 0), ("bias", None)):
        parts = [get[f"head/attention/{x}/{what}"] for x in ("query", "key", "value")]
        flat = [x.reshape(8, -1).T if axis == 0 else x.reshape(-1) for x in parts]
        name = "weight" if what == "kernel" else "bias"
        tensors[f"{root}head.attention.in_proj_{name}"] = np.concatenate(flat)
    config = {"model_type": "siglip", "vision_config": {"num_attention_heads": 2}}
    model = models.from_preset(write_folder(tmp_path, tensors, config))
    images = random_images((8, 8, 3))
    expected = predict(hub, {"images": images})
    np.testing.assert_allclose(predict(model, images), expected, **TOLERANCE)


# Memory


def sizes_of_many(folder):
    """A dense ViT with many equal tensors, as .npz, .safetensors and V-MoE's."""
    dim, generator = 128, np.random.default_rng(0)
    classic = np.load(CHECKPOINTS / "vit_classic.npz")
    tensors = {}
    for name in classic.files:
        if "encoderblock_1" in name or "encoderblock_2" in name:
            continue
        shape = tuple(
            {24: dim, 40: 4 * dim, 8: 8}.get(n, n) for n in classic[name].shape
        )
        if "Attention" in name:
            shape = tuple(
                {3: 2, 8: dim // 2, 24: dim}.get(n, n) for n in classic[name].shape
            )
        for i in range(8 if "encoderblock_0" in name else 1):
            tensors[name.replace("block_0", f"block_{i}")] = generator.normal(
                size=shape
            ).astype("float32")
    np.savez(folder / "vit.npz", **tensors)
    write_folder(folder / "flax", tensors)
    write_vmoe(folder / "vit", tensors)
    return tensors


@pytest.mark.backend_free
def test_one_tensor_at_a_time(tmp_path):
    tensors = sizes_of_many(tmp_path)
    total = sum(array.nbytes for array in tensors.values())
    largest = max(array.nbytes for array in tensors.values())
    assert total > 20 * largest
    del tensors
    for source, reader in (
        (tmp_path / "vit.npz", NpzCheckpoint),
        (tmp_path / "flax" / "model.safetensors", SafetensorsCheckpoint),
        (tmp_path / "vit", VMoECheckpoint),
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


@pytest.mark.backend_free
def test_no_tensor_stays_when_the_next_is_read(tmp_path, monkeypatch):
    arrays = dict(np.load(CHECKPOINTS / "vit_classic.npz"))
    # Half precision, so that no backend takes their memory over.
    arrays = {name: array.astype("float16") for name, array in arrays.items()}
    np.savez(tmp_path / "vit.npz", **arrays)
    alive, most = [], []
    read = NpzCheckpoint.read

    def watched(self, name, rows=None):
        most.append(sum(reference() is not None for reference in alive))
        array = read(self, name, rows)
        alive.append(weakref.ref(array))
        return array

    monkeypatch.setattr(NpzCheckpoint, "read", watched)
    models.convert(str(tmp_path / "vit.npz"))
    assert len(most) == len(arrays)
    assert max(most) == 0


def peak(function):
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
