"""Files that are not whole, not what they seem, or dangerous are refused by name."""

import io
import json
import shutil
import sys
import zipfile
from pathlib import Path

import keras_hub
import msgpack
import numpy as np
import pytest

from keras_moe import models
from keras_moe.models.conversion import sources
from keras_moe.models.conversion._readers import SafetensorsCheckpoint
from keras_moe.models.conversion._vmoe_checkpoint import VMoECheckpoint
from tests import golden
from tests.models.conversion.test_conversion import clip_tensors, timm_folder
from tests.models.conversion.writers import write_folder, write_vmoe

CHECKPOINTS = golden.FOLDER / "07_checkpoints"

pytestmark = pytest.mark.backend_free


def refused(source, *words, **overrides):
    with pytest.raises(ValueError, match="received") as caught:
        models.from_preset(source, **overrides)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


# .npz


def classic(**changes):
    arrays = dict(np.load(CHECKPOINTS / "vit_classic.npz"))
    for name, array in changes.items():
        name = name.replace("__", "/")
        if array is None:
            del arrays[name]
        else:
            arrays[name] = array
    return arrays


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head__bias": None}, ("head/bias", "vit.npz", "none")),
        ({"embedding__bias": None}, ("embedding/bias", "vit.npz")),
        ({"conv_root__kernel": np.zeros(3)}, ("1 left over", "conv_root/kernel")),
        ({"head__bias": np.zeros(8)}, ("head/bias", "(7,)", "(8,)", "vit.npz")),
        ({"cls": np.zeros((1, 1, 24), "int32")}, ("cls", "dtype=int32")),
        ({"embedding__kernel": np.zeros((8, 8, 24))}, ("4 axes", "embedding/kernel")),
        (
            {"Transformer__posembed_input__pos_embedding": np.zeros((1, 16, 24))},
            ("15 patches",),
        ),
        ({"head__kernel": np.zeros((23, 7))}, ("(24, 7)", "(23, 7)", "head/kernel")),
    ],
)
def test_a_tensor_that_does_not_fit(tmp_path, changes, words):
    np.savez(tmp_path / "vit.npz", **classic(**changes))
    refused(str(tmp_path / "vit.npz"), *words)


def test_objects_are_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path(tmp_path / "exploded").touch, ())

    bomb = np.array([Bomb()], dtype=object)
    np.savez(tmp_path / "vit.npz", **classic(head__bias=bomb))
    refused(str(tmp_path / "vit.npz"), "head/bias", "Python objects")
    assert not (tmp_path / "exploded").exists()


def test_a_truncated_or_foreign_npz(tmp_path):
    content = (CHECKPOINTS / "vit_classic.npz").read_bytes()
    path = tmp_path / "vit.npz"
    path.write_bytes(content[: len(content) // 2])
    refused(str(path), "vit.npz", "truncated")
    path.write_bytes(b"PK not a zip file")
    refused(str(path), "vit.npz", "another format")
    refused(str(tmp_path / "none.npz"), "none.npz")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("embedding/kernel.npy", b"not an array")
    refused(str(path), "embedding/kernel", "vit.npz")


def test_damaged_values(tmp_path):
    path = tmp_path / "vit.npz"
    np.savez(path, **classic())
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo("embedding/kernel.npy").header_offset
    content = bytearray(path.read_bytes())
    content[place + 10_000] ^= 0xFF
    path.write_bytes(content)
    refused(str(path), "whole values", "embedding/kernel", "CRC")


def test_a_declared_size_is_compared_before_it_is_allocated(tmp_path):
    # 4 TB declared, of which 16 bytes are there.
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)}
    )
    with zipfile.ZipFile(tmp_path / "vit.npz", "w") as archive:
        archive.writestr("embedding/kernel.npy", header.getvalue() + b"\0" * 16)
    refused(str(tmp_path / "vit.npz"), "embedding/kernel", "stored size")


def test_a_fortran_ordered_array(tmp_path):
    kernel = np.asfortranarray(np.zeros((24, 7), "float32"))
    np.savez(tmp_path / "vit.npz", **classic(head__kernel=kernel))
    refused(str(tmp_path / "vit.npz"), "head/kernel", "fortran_order=True")


# V-MoE


def vmoe_arrays():
    with VMoECheckpoint(CHECKPOINTS / "vmoe_tiny/vmoe_tiny") as file:
        return {name: file.read(name) for name in file}


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(CHECKPOINTS / "vmoe_tiny", tmp_path / "x")
    return tmp_path / "x" / "vmoe_tiny"


def test_the_written_checkpoint_is_the_golden_one(tmp_path):
    # Without the changes of the cases below the checkpoint is whole.
    prefix = write_vmoe(tmp_path / "vmoe", vmoe_arrays())
    expected, _ = golden.load("07_checkpoints/vmoe_tiny_expected")
    actual = models.from_preset(prefix).predict(expected["inputs/images"], verbose=0)
    np.testing.assert_allclose(actual, expected["outputs/logits"], rtol=1e-4, atol=1e-5)


def test_a_missing_shard(copy):
    copy.with_name("vmoe_tiny.data-00001-of-00003").unlink()
    refused(str(copy), "data-00001-of-00003", "3 shards")


def test_a_missing_index(copy):
    copy.with_name("vmoe_tiny.index").unlink()
    refused(f"{copy}.index", "vmoe_tiny.index", "none")


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.5, 0.98])
@pytest.mark.parametrize("name", ["vmoe_tiny.index", "vmoe_tiny.data-00002-of-00003"])
def test_a_truncated_file(copy, name, kept):
    path = copy.with_name(name)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    refused(str(copy), "truncated")


def test_a_shard_that_lost_only_its_end(tmp_path):
    # Padding elsewhere keeps the sum of the sizes.
    prefix = write_vmoe(tmp_path / "x", vmoe_arrays(), shards=2)
    first, second = (Path(f"{prefix}.data-0000{i}-of-00002") for i in range(2))
    content = second.read_bytes()
    second.write_bytes(content[:-10])
    refused(prefix, second.name, "truncated")
    second.write_bytes(content)
    first.write_bytes(first.read_bytes() + b"\0" * 100)
    refused(prefix, first.name, "the end of")


def set_leaf(index, name, value):
    *path, leaf = name.split("/")
    node = index["index"]
    for key in path:
        node = node[key]
    node[leaf] = value(node[leaf]) if callable(value) else value


def entry(shape=None, dtype=None, bounds=None, shards=None):
    """Changes an entry of the index."""

    def change(packed):
        shaped, slices, where = msgpack.unpackb(packed.data)
        old_shape, old_dtype, *_ = msgpack.unpackb(shaped)
        shaped = msgpack.packb((shape or old_shape, dtype or old_dtype, False, {}))
        if bounds is not None:
            slices = [
                msgpack.packb(tuple(msgpack.packb((a, b, None)) for a, b in each))
                for each in bounds
            ]
        return msgpack.ExtType(
            6 + 2, msgpack.packb((shaped, slices, where if shards is None else shards))
        )

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda i: i.update(version="30000101"), ("30000101", ".index")),
        (lambda i: i.update(shard_count=0), ("shard_count=0",)),
        (lambda i: i.update(shard_count="../../x"), ("no dict of tensors",)),
        (lambda i: i.pop("index"), ("KeyError", ".index")),
        (lambda i: set_leaf(i, "head/bias", 3), ("head/bias", "received: 3")),
        (lambda i: set_leaf(i, "head/bias", entry(shards=[7])), ("head/bias", "[7]")),
        (lambda i: set_leaf(i, "head/bias", entry(shards=[-1] * 3)), ("head/bias",)),
        (lambda i: set_leaf(i, "head/bias", entry(shards=["../x"])), ("../x",)),
        (lambda i: set_leaf(i, "head/bias", entry(dtype="object")), ("'object'",)),
        (
            lambda i: set_leaf(i, "head/bias", entry(dtype="int32")),
            ("int32", "float32"),
        ),
        (lambda i: set_leaf(i, "head/bias", entry(shape=[1 << 50])), ("declares",)),
        (lambda i: set_leaf(i, "head/bias", entry(shape=[9])), ("head/bias", "(9,)")),
        (
            lambda i: set_leaf(i, "head/bias", entry(bounds=[[(0, 4)]] * 3)),
            ("head/bias", "slice"),
        ),
        (
            lambda i: set_leaf(i, "head/bias", entry(bounds=[[(5, 2)]] * 3)),
            ("slice(5, 2, None)",),
        ),
    ],
)
def test_a_wrong_index(tmp_path, change, words):
    refused(write_vmoe(tmp_path / "x", vmoe_arrays(), edit_index=change), *words)


def test_slices_that_overlap(tmp_path):
    # Twice the first half: of the right size in sum.
    arrays = {"a": np.zeros(4, "float32")}

    def index(i):
        set_leaf(i, "a", entry(bounds=[[(0, 2)], [(0, 2)]], shards=[0, 1]))

    def shard(number, content):
        part = content["0"][0]
        bounds = msgpack.packb((msgpack.packb((0, 2, None)),))
        content["0"] = [[part[0], msgpack.ExtType(6, bounds)]]

    prefix = write_vmoe(
        tmp_path / "x", arrays, pieces=2, edit_index=index, edit_shard=shard
    )
    refused(prefix, "fill 'a'", "once")


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ({"entry_code": 2}, ("type 8", "type 2", ".index")),
        ({"array_code": 42}, ("(1, 3)", "type 42", "data-0000", "'")),
    ],
)
def test_an_unknown_msgpack_type(tmp_path, codes, words):
    refused(write_vmoe(tmp_path / "x", vmoe_arrays(), **codes), *words)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda n, s: s.pop("0", None), ("encoder_norm/bias", "no slice")),
        (lambda n, s: s.update({"999": []}), ("'999'", "data-0000")),
        (lambda n, s: s.update({"../x": []}), ("'../x'",)),
        (lambda n, s: s.update({"0": "text"}), ("msgpack's array", "data-0000")),
        (lambda n, s: s.update({"0": [[[], [], []]]}), ("pairs",)),
    ],
)
def test_a_wrong_shard(tmp_path, edit, words):
    refused(write_vmoe(tmp_path / "x", vmoe_arrays(), edit_shard=edit), *words)


def test_values_of_another_size(tmp_path):
    def edit(number, shard):
        for key, chunks in shard.items():
            if key.isdigit():
                chunks[0][0].append(chunks[0][0][0])

    refused(
        write_vmoe(tmp_path / "x", vmoe_arrays(), edit_shard=edit),
        "bytes for the slice",
    )


def test_an_ensemble_of_experts_is_another_model(copy):
    for path in list(copy.parent.iterdir()):
        path.rename(path.with_name(path.name.replace("vmoe_tiny", "eee_s32")))
    refused(str(copy.with_name("eee_s32")), "ensemble", "eee_s32")


def test_without_position_embeddings_the_size_is_to_be_given(tmp_path):
    arrays = vmoe_arrays()
    del arrays["Encoder/posembed_input/pos_embedding"]
    prefix = write_vmoe(tmp_path / "x", arrays)
    refused(prefix, "image_shape=")
    model = models.from_preset(prefix, image_shape=(32, 16, 3))
    assert model.backbone.get_config()["position_embedding"] == "sincos"


# .safetensors and pickles


def test_pickles_are_refused(tmp_path):
    for name in ("x.pt", "x.bin", "x.pth"):
        refused(str(tmp_path / name), name, "runs the code")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(str(tmp_path), "runs the code", str(tmp_path))
    (tmp_path / "config.json").write_text('{"architecture": "vit_base_patch16_224"}')
    refused(str(tmp_path), "no .safetensors")


def test_a_truncated_safetensors_file(tmp_path):
    folder = timm_folder(tmp_path, "vit_token")
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for damaged in (content[:-4], content[:100], b"", b"\xff" * 64):
        path.write_bytes(damaged)
        refused(folder, "model.safetensors", "truncated")


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../model.safetensors"}, ("same folder", "../model.safetensors")),
        ({"a": "/etc/x.safetensors"}, ("same folder", "/etc/x.safetensors")),
        ({"a": "model.bin"}, ("same folder", "model.bin")),
        ({"a": "model.safetensors"}, ("'a'", "file without it")),
        (3, ("weight_map",)),
        ({"a": 3}, ("weight_map",)),
    ],
)
def test_a_wrong_index_of_safetensors(tmp_path, weight_map, words):
    write_folder(tmp_path / "x", {"b": np.zeros(3)})
    index = tmp_path / "x" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    refused(str(index), *words)


def test_a_tensor_in_two_files(tmp_path):
    for file in ("1", "2"):
        write_folder(tmp_path, {"a": np.zeros(3)}, name=f"{file}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    with pytest.raises(ValueError, match=r"each tensor once.*'a'"):
        SafetensorsCheckpoint(index)


def test_names_of_no_known_model(tmp_path):
    folder = write_folder(tmp_path, {"layer1.weight": np.zeros(3)})
    refused(folder, "layer1.weight", "the names of a ViT")
    tower = write_folder(tmp_path / "b", {"visual.trunk.pos_embed": np.zeros(3)})
    refused(tower, "visual.trunk")
    refused_source = tmp_path / "nothing"
    with pytest.raises(ValueError, match="weights to convert"):
        models.convert(str(refused_source))


def test_what_timm_has_and_we_have_not(tmp_path):
    def registers(tensors):
        tensors["reg_token"] = np.zeros((1, 4, 32), "float32")

    def distilled(tensors):
        tensors["head_dist.weight"] = tensors["head.weight"]

    def norms(tensors):
        # One block alone has it, and without the keys'.
        tensors["blocks.0.attn.q_norm.weight"] = np.ones(8, "float32")

    def fewer(tensors):
        del tensors["blocks.0.attn.proj.bias"]

    for number, (change, word) in enumerate(
        (
            (registers, "register tokens"),
            (distilled, "head_dist.weight"),
            (norms, "blocks.0.attn.q_norm.bias"),
            (fewer, "blocks.0.attn.proj.bias"),
        )
    ):
        folder = timm_folder(tmp_path / str(number), "vit_token", change=change)
        refused(folder, word)
    folder = timm_folder(tmp_path / "pool", "vit_token", global_pool="max")
    refused(folder, "global_pool='max'")
    folder = timm_folder(tmp_path / "mean", "vit_token", mean=[0.5], std=[0.5])
    refused(folder, "3 channels")
    rpn = "vit_base_patch16_rpn_224"
    folder = timm_folder(tmp_path / "rpn", "vit_token", architecture=rpn)
    refused(folder, f"architecture={rpn!r}")
    args = {"num_heads": 4, "block_fn": "parallel"}
    refused(timm_folder(tmp_path / "args", "vit_token", model_args=args), "block_fn")
    args = {"depth": 2, "embed_dim": 32}
    refused(timm_folder(tmp_path / "h", "vit_token", model_args=args), "num_heads=")
    refused(
        timm_folder(tmp_path / "act", "vit_token", act_layer="silu"), "act_layer='silu'"
    )


def test_what_a_clip_file_does_not_tell(tmp_path):
    source = write_folder(tmp_path, clip_tensors()) + "/model.safetensors"
    refused(source, "activation='quick_gelu'", num_heads=2)
    refused(source, "num_heads=", activation="gelu")


# Arguments


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ({"task": "segmenter"}, "task='segmenter'"),
        ({"num_layer": 2}, "num_layer=2"),
        ({"num_layers": 2}, "encoderblock_2"),
        ({"num_layers": 4}, "block_3"),
        ({"patch_size": 5}, "patch_size=(5, 5)"),
        ({"patch_size": "8"}, "patch_size='8'"),
        ({"image_shape": 32}, "image_shape=32"),
        ({"class_token": False}, "class_token"),
        ({"hidden_dim": 48}, "(8, 8, 3, 48)"),
        ({"task": "backbone", "dropout": 0.5}, "dropout=0.5"),
        ({"backbone": None}, "backbone="),
    ],
)
def test_arguments_that_do_not_fit(overrides, word):
    refused(str(CHECKPOINTS / "vit_classic.npz"), word, **overrides)


def test_a_mixer_serves_one_image_size():
    source = str(CHECKPOINTS / "mixer.npz")
    refused(source, "image_shape", image_shape=(64, 64, 3))
    refused(source, "patch_size=4, which make (8, 8)", patch_size=4)
    assert models.from_preset(source, image_shape=(32, 32, 1)).input_shape[-1] == 1


def test_a_norm_with_two_epsilons():
    encoder = keras_hub.models.SigLIPVisionEncoder(
        4, 8, 1, 2, 16, layer_norm_epsilon=1e-3, image_shape=(8, 8, 3)
    )
    with pytest.raises(ValueError, match=r"received: 0\.001"):
        models.convert(encoder)


def test_without_a_head_num_classes_is_needed(tmp_path):
    arrays = classic(head__kernel=None, head__bias=None)
    np.savez(tmp_path / "vit.npz", **arrays)
    source = str(tmp_path / "vit.npz")
    assert isinstance(models.from_preset(source), models.ViTBackbone)
    refused(source, "num_classes=None", task="image_classifier")
    assert models.from_preset(source, num_classes=3).output_shape == (None, 3)


@pytest.mark.parametrize(
    ("package", "source"),
    [("msgpack", "vmoe_tiny/vmoe_tiny"), ("safetensors", "x.safetensors")],
)
def test_a_missing_package_is_named(monkeypatch, package, source):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}.*keras-moe\[convert\]"):
        models.convert(str(CHECKPOINTS / source))


def test_other_presets_are_left_alone(tmp_path):
    models.from_preset("vmoe_digits", load_weights=False).save_to_preset(
        tmp_path / "ours"
    )
    for source in ("vmoe_b32", "resnet", 3, tmp_path / "ours", tmp_path):
        assert not sources.is_convertible(source)
