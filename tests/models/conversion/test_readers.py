"""Checkpoints are read exactly; damaged and dangerous files are refused by name."""

import json
import shutil
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from keras_moe import models
from keras_moe.models.conversion._readers import (
    NpzCheckpoint,
    SafetensorsCheckpoint,
    VMoECheckpoint,
)
from tests import golden, published
from tests.compare import assert_close, assert_same
from tests.refusals import refuses

MEMBER = "embedding/kernel.npy"
TIMM = published.part(golden.load("12_timm/vit_token")[0], "state_dict/")


@pytest.mark.parametrize(("changes", "words"), [
    ({"head__bias": None}, ("'head/bias'", "(7,)", "vit.npz", "shape=None")),
    ({"conv_root__kernel": np.zeros(3)}, ("1 left over", "conv_root/kernel")),
    ({"cls": np.zeros((1, 1, 24), "int32")}, ("cls", "dtype=int32")),
    ({"embedding__kernel": np.zeros((8, 8, 24))}, ("4 axes", "embedding/kernel")),
    ({"Transformer__posembed_input__pos_embedding": np.zeros((1, 16, 24))},
     ("15 patches",)),
    ({"head__kernel": np.zeros((23, 7))}, ("(24, 7)", "(23, 7)", "head/kernel")),
])  # fmt: skip
def test_a_tensor_that_does_not_fit(tmp_path, changes, words):
    np.savez(tmp_path / "vit.npz", **published.classic(**changes))
    published.refused(str(tmp_path / "vit.npz"), *words)


def test_objects_are_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path(tmp_path / "exploded").touch, ())

    bombs = np.array([Bomb()] * 7)
    np.savez(tmp_path / "vit.npz", **published.classic(head__bias=bombs))
    published.refused(str(tmp_path / "vit.npz"), "head/bias", "dtype=object")
    message = r"'head/bias' in .*allow_pickle=False"
    file = NpzCheckpoint(tmp_path / "vit.npz")
    with file, pytest.raises(ValueError, match=message):
        file.read("head/bias")
    assert not (tmp_path / "exploded").exists()


def test_a_truncated_or_foreign_npz(tmp_path):
    content = (published.CHECKPOINTS / "vit_classic.npz").read_bytes()
    path = tmp_path / "vit.npz"
    path.write_bytes(content[: len(content) // 2])
    published.refused(str(path), "vit.npz", "truncated")
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        models.from_preset(str(tmp_path / "none.npz"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, b"not an array")
    published.refused(str(path), "embedding/kernel", "vit.npz")
    header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)}
    with zipfile.ZipFile(path, "w") as archive, archive.open(MEMBER, "w") as member:
        np.lib.format.write_array_header_1_0(member, header)
    published.refused(str(path), "embedding/kernel", "more than the file can hold")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_values(tmp_path, save):
    path = tmp_path / "vit.npz"
    save(path, **published.classic())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo(MEMBER).header_offset
    content = bytearray(path.read_bytes())
    content[start + 10_000] ^= 0xFF
    path.write_bytes(content)
    published.refused(str(path), "whole array as 'embedding/kernel'", "vit.npz")


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (1e300, "f8")])
def test_values_that_are_no_numbers(tmp_path, value, dtype):
    kernel = np.zeros((24, 7), dtype)
    kernel[3, 4] = value
    np.savez(tmp_path / "vit.npz", **published.classic(head__kernel=kernel))
    with np.errstate(over="ignore"):
        published.refused(str(tmp_path / "vit.npz"), "head/kernel", "vit.npz", "finite")


def vmoe_arrays():
    with VMoECheckpoint(published.CHECKPOINTS / "vmoe_tiny/vmoe_tiny") as file:
        return {name: file.read(name) for name in file}


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(published.CHECKPOINTS / "vmoe_tiny", tmp_path / "x")
    return tmp_path / "x" / "vmoe_tiny"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_slices_may_lie_in_any_shard(tmp_path, dtype):
    generator = np.random.default_rng(0)
    arrays = {
        name: generator.normal(size=shape).astype(dtype)
        for name, shape in {"b/10/x": (7, 2, 3), "b/2/x": (5,), "a": (1, 4)}.items()
    }
    arrays["s"] = np.float32(3.0)
    with VMoECheckpoint(published.write_vmoe(tmp_path / "x", arrays, shards=4)) as file:
        assert list(file) == ["a", "b/10/x", "b/2/x", "s"]
        for name, array in arrays.items():
            assert_same(file.read(name), array)


def test_missing_files(copy):
    for name in ("vmoe_tiny.data-00001-of-00003", "vmoe_tiny.index"):
        copy.with_name(name).unlink()
        with pytest.raises(FileNotFoundError, match=name):
            models.from_preset(f"{copy}.index")


@pytest.mark.parametrize("kept", [0.0, 0.98])
@pytest.mark.parametrize("name", ["vmoe_tiny.index", "vmoe_tiny.data-00002-of-00003"])
def test_a_truncated_file(copy, name, kept):
    path = copy.with_name(name)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    published.refused(str(copy), name, "truncated")


def test_a_shard_of_another_checkpoint(tmp_path):
    def edit(number, shard):
        shard.pop("0", None)

    prefix = published.write_vmoe(tmp_path / "x", vmoe_arrays(), edit_shard=edit)
    published.refused(prefix, "bytes of 'Encoder/encoder_norm/bias'", "received: 0")


def test_without_position_embeddings_the_size_must_be_given(tmp_path):
    arrays = vmoe_arrays()
    del arrays["Encoder/posembed_input/pos_embedding"]
    prefix = published.write_vmoe(tmp_path / "x", arrays)
    published.refused(prefix, "image_shape=")
    model = models.from_preset(prefix, image_shape=(32, 16, 3))
    assert model.backbone.get_config()["position_embedding"] == "sincos"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_tensors(tmp_path, dtype):
    arrays = {
        name: array.astype(getattr(ml_dtypes, dtype, dtype))
        for name, array in TIMM.items()
    }
    path = tmp_path / "half.safetensors"
    save_file(arrays, path)
    with SafetensorsCheckpoint(path) as file:
        for name, array in arrays.items():
            assert_same(file.read(name), array)
    model = models.from_preset(str(path), num_heads=4)
    expected = arrays["head.weight"].astype("float32").T
    assert_same(published.values(model, "predictions/kernel"), expected)


def test_weights_in_several_files(tmp_path):
    arrays, _ = golden.load("12_timm/vit_token")
    folder = Path(published.timm_folder(tmp_path / "timm", "vit_token"))
    (folder / "model.safetensors").unlink()
    names = sorted(TIMM)
    weight_map = {}
    for number, some in enumerate((names[:9], names[9:])):
        file = f"model-{number:05d}-of-00002.safetensors"
        published.write_folder(folder, {name: TIMM[name] for name in some}, name=file)
        weight_map.update(dict.fromkeys(some, file))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    actual = published.predict(models.from_preset(str(folder)), arrays["inputs/images"])
    assert_close(actual, arrays["outputs/logits"], 1e-4, 1e-4)


def test_pickles_are_refused(tmp_path):
    for name in ("x.pt", "x.bin", "x.pth"):
        published.refused(str(tmp_path / name), name, "runs the code")
    refuses("runs the code", models.describe, str(tmp_path / "x.pt"))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    published.refused(str(tmp_path), "runs the code", str(tmp_path))
    (tmp_path / "config.json").write_text('{"architecture": "vit_base_patch16_224"}')
    published.refused(str(tmp_path), "no .safetensors")


def test_a_truncated_safetensors_file(tmp_path):
    folder = published.timm_folder(tmp_path, "vit_token")
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for damaged in (content[:-4], content[:100], b"", b"\xff" * 64):
        path.write_bytes(damaged)
        published.refused(folder, "model.safetensors", "truncated")


@pytest.mark.parametrize(("content", "word"), [
    ('{"weight_map": {"a": "../x.safetensors"}}', "same folder"),
    ('{"weight_map": {"a": "/etc/x.safetensors"}}', "same folder"),
    ('{"weight_map": {"a": "x.saf', "truncated"),
    ("{}", "a weight_map"),
])  # fmt: skip
def test_an_index_that_is_wrong(tmp_path, content, word):
    published.write_folder(tmp_path / "x", {"b": np.zeros(3)})
    index = tmp_path / "x" / "model.safetensors.index.json"
    index.write_text(content)
    published.refused(str(index), str(index), word)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ImportError, match=r"msgpack.*\[convert\]"):
        models.convert(str(published.CHECKPOINTS / "vmoe_tiny/vmoe_tiny"))
