"""Checkpoints are read exactly; damaged and dangerous files are refused by name."""

import io
import json
import shutil
import sys
import warnings
import zipfile
from pathlib import Path

import ml_dtypes
import msgpack
import numpy as np
import pytest

from keras_moe import models
from keras_moe.models.conversion._readers import NpzCheckpoint, SafetensorsCheckpoint
from keras_moe.models.conversion._vmoe_checkpoint import VMoECheckpoint
from tests import golden
from tests.published import (
    CHECKPOINTS,
    classic,
    part,
    predict,
    refused,
    slice_nd,
    timm_folder,
    write_folder,
    write_vmoe,
)

MEMBER = "embedding/kernel.npy"


def npy(shape=(2,), data=b"\0" * 8):
    """A member of an `.npz`, whose header may lie."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    return header.getvalue() + data


def write_member(path, data=None, name=MEMBER):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, npy() if data is None else data)
    return str(path)


# .npz


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
        (
            {"head__kernel": np.asfortranarray(np.zeros((24, 7), "float32"))},
            ("head/kernel", "fortran_order=True"),
        ),
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
    refused(write_member(path, b"not an array"), "embedding/kernel", "vit.npz")
    refused(write_member(path, name="embedding/kernel"), "'embedding/kernel'", ".npy")
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr(MEMBER, npy())
        archive.writestr(MEMBER, npy())
    refused(str(path), "vit.npz", MEMBER, "once")


@pytest.mark.parametrize(
    ("offset", "value", "word"),
    [(6, 1, "encrypted"), (8, 97, "compression")],
)
def test_members_that_cannot_be_read(tmp_path, offset, value, word):
    path = write_member(tmp_path / "vit.npz")
    content = bytearray(Path(path).read_bytes())
    # A field in both headers of the only member, local and central.
    for magic, place in ((b"PK\3\4", offset), (b"PK\1\2", offset + 2)):
        start = content.index(magic) + place
        content[start : start + 2] = value.to_bytes(2, "little")
    Path(path).write_bytes(content)
    refused(path, "vit.npz", "embedding/kernel", word)


@pytest.mark.parametrize(
    ("shape", "size", "words"),
    [
        ((0,), 0, "of at least 1"),
        ((2, 0), 0, "of at least 1"),
        ((-2, -1), 8, "of at least 1"),
        ((True,), 4, "of at least 1"),
        # 4 TB, of which 16 bytes are there.
        ((1 << 40,), 16, "stored size"),
        # Sizes whose product is 0 in 64 bits.
        ((1 << 62, 4), 0, "stored size"),
        ((1 << 64,), 0, "stored size"),
        ((1 << 32, 1 << 32, 2), 0, "stored size"),
    ],
)
def test_declared_sizes_are_compared_before_they_are_allocated(
    tmp_path, shape, size, words
):
    path = write_member(tmp_path / "vit.npz", npy(shape, b"\0" * size))
    refused(path, "vit.npz", "embedding/kernel", words)


def test_damaged_values(tmp_path):
    path = tmp_path / "vit.npz"
    np.savez(path, **classic())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo(MEMBER).header_offset
    content = bytearray(path.read_bytes())
    content[start + 10_000] ^= 0xFF
    path.write_bytes(content)
    refused(str(path), "whole values", "embedding/kernel", "CRC")


def test_a_corrupt_deflated_stream(tmp_path):
    path = tmp_path / "vit.npz"
    np.savez_compressed(path, **classic())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo(MEMBER).header_offset
    content = bytearray(path.read_bytes())
    lengths = content[start + 26 : start + 30]
    start += 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    # Deflate has no block of this type.
    content[start] = 0xFF
    with NpzCheckpoint(path) as file:
        with open(path, "r+b") as stream:
            stream.write(content)
        with pytest.raises(ValueError, match=r"'embedding/kernel' in .*vit\.npz"):
            file.read("embedding/kernel")
    refused(str(path), "vit.npz", "embedding/kernel")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(np.nan, "float32"), (np.inf, "float16"), (-np.inf, "float32"), (1e300, "f8")],
)
def test_values_that_are_no_numbers(tmp_path, value, dtype):
    kernel = np.zeros((24, 7), dtype)
    kernel[3, 4] = value
    np.savez(tmp_path / "vit.npz", **classic(head__kernel=kernel))
    refused(str(tmp_path / "vit.npz"), "head/kernel", "vit.npz", "finite")


def test_values_at_the_edge_of_float32_are_kept(tmp_path):
    bias = np.zeros(7, "float64")
    bias[0] = np.finfo("float32").max
    np.savez(tmp_path / "vit.npz", **classic(head__bias=bias))
    model = models.from_preset(str(tmp_path / "vit.npz"))
    assert model.count_params() > 0


# V-MoE


def vmoe_arrays():
    with VMoECheckpoint(CHECKPOINTS / "vmoe_tiny/vmoe_tiny") as file:
        return {name: file.read(name) for name in file}


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(CHECKPOINTS / "vmoe_tiny", tmp_path / "x")
    return tmp_path / "x" / "vmoe_tiny"


def test_every_leaf_is_read_whole():
    arrays, _ = golden.load("07_checkpoints/vmoe_tiny_expected")
    with VMoECheckpoint(CHECKPOINTS / "vmoe_tiny/vmoe_tiny") as file:
        sums = {name: file.read(name).sum() for name in file}
        rows = file.read("head/kernel", slice(2, 5))
        np.testing.assert_array_equal(rows, file.read("head/kernel")[2:5])
    expected = part(arrays, "sums/")
    assert sums.keys() == expected.keys()
    for name, total in sums.items():
        np.testing.assert_allclose(total, expected[name], rtol=1e-4, atol=1e-4)


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


def test_the_written_checkpoint_is_the_golden_one(tmp_path):
    # Without the changes of the cases below the checkpoint is whole.
    prefix = write_vmoe(tmp_path / "vmoe", vmoe_arrays())
    expected, _ = golden.load("07_checkpoints/vmoe_tiny_expected")
    actual = predict(models.from_preset(prefix), expected["inputs/images"])
    np.testing.assert_allclose(actual, expected["outputs/logits"], rtol=1e-4, atol=1e-5)


def test_missing_files(copy):
    copy.with_name("vmoe_tiny.data-00001-of-00003").unlink()
    refused(str(copy), "data-00001-of-00003", "3 shards")
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
            slices = [slice_nd(each) for each in bounds]
        where = where if shards is None else shards
        return msgpack.ExtType(8, msgpack.packb((shaped, slices, where)))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "30000101"}, ("30000101", ".index")),
        ({"shard_count": 0}, ("shard_count=0",)),
        ({"shard_count": "../../x"}, ("no dict of tensors",)),
        ({"index": None}, ("no dict of tensors", ".index")),
        (3, ("head/bias", "received: 3")),
        (entry(shards=[7]), ("head/bias", "[7]")),
        (entry(shards=[-1] * 3), ("head/bias",)),
        (entry(shards=["../x"]), ("../x",)),
        (entry(dtype="object"), ("'object'",)),
        (entry(dtype="int32"), ("int32", "float32")),
        (entry(shape=[1 << 50]), ("declares",)),
        (entry(shape=[9]), ("head/bias", "(9,)")),
        (entry(bounds=[[(0, 4)]] * 3), ("head/bias", "slice")),
        (entry(bounds=[[(5, 2)]] * 3), ("slice(5, 2, None)",)),
    ],
)
def test_a_wrong_index(tmp_path, change, words):
    def edit(index):
        if isinstance(change, dict):
            index.update(change)
        else:
            set_leaf(index, "head/bias", change)

    refused(write_vmoe(tmp_path / "x", vmoe_arrays(), edit_index=edit), *words)


def test_an_index_with_keys_of_two_types(tmp_path):
    def edit(index):
        index["index"][b"x"] = index["index"]["head"]

    prefix = write_vmoe(tmp_path / "x", vmoe_arrays(), edit_index=edit)
    # msgpack writes bytes as bytes: the keys are of two types when read.
    with open(f"{prefix}.index", "rb") as file:
        assert b"x" in msgpack.unpackb(file.read())["index"]
    refused(prefix, "x.index", "names as keys")


def test_slices_that_overlap(tmp_path):
    # Twice the first half: the sum of the sizes is right.
    arrays = {"a": np.zeros(4, "float32")}

    def index(i):
        set_leaf(i, "a", entry(bounds=[[(0, 2)], [(0, 2)]], shards=[0, 1]))

    def shard(number, content):
        first = content["0"][0]
        content["0"] = [[first[0], msgpack.ExtType(6, slice_nd([(0, 2)]))]]

    prefix = write_vmoe(
        tmp_path / "x", arrays, pieces=2, edit_index=index, edit_shard=shard
    )
    refused(prefix, "fill 'a'", "once")


def _repeat_a_piece(number, shard):
    for key, chunks in shard.items():
        if key.isdigit():
            chunks[0][0].append(chunks[0][0][0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"entry_code": 2}, ("type 8", "type 2", ".index")),
        ({"array_code": 42}, ("(1, 3)", "type 42", "data-0000", "'")),
        (lambda n, s: s.pop("0", None), ("encoder_norm/bias", "no slice")),
        (lambda n, s: s.update({"999": []}), ("'999'", "data-0000")),
        (lambda n, s: s.update({"../x": []}), ("'../x'",)),
        (lambda n, s: s.update({"0": "text"}), ("msgpack's array", "data-0000")),
        (lambda n, s: s.update({"0": [[[], [], []]]}), ("pairs",)),
        (_repeat_a_piece, ("bytes for the slice",)),
    ],
)
def test_a_wrong_shard(tmp_path, change, words):
    options = {"edit_shard": change} if callable(change) else change
    refused(write_vmoe(tmp_path / "x", vmoe_arrays(), **options), *words)


def test_without_position_embeddings_the_size_must_be_given(tmp_path):
    arrays = vmoe_arrays()
    del arrays["Encoder/posembed_input/pos_embedding"]
    prefix = write_vmoe(tmp_path / "x", arrays)
    refused(prefix, "image_shape=")
    model = models.from_preset(prefix, image_shape=(32, 16, 3))
    assert model.backbone.get_config()["position_embedding"] == "sincos"


# .safetensors and pickles


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_tensors(tmp_path, dtype):
    arrays = {
        name: array.astype(dtype).astype("float32")
        for name, array in part(
            golden.load("12_timm/vit_token")[0], "state_dict/"
        ).items()
    }
    path = tmp_path / "half.safetensors"
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
    with SafetensorsCheckpoint(path) as file:
        for name, array in arrays.items():
            np.testing.assert_array_equal(file.read(name), array)
            np.testing.assert_array_equal(file.read(name, slice(0, 1)), array[:1])


def test_weights_in_several_files(tmp_path):
    arrays, _ = golden.load("12_timm/vit_token")
    folder = Path(timm_folder(tmp_path / "timm", "vit_token"))
    (folder / "model.safetensors").unlink()
    tensors = part(arrays, "state_dict/")
    names = sorted(tensors)
    weight_map = {}
    for number, some in enumerate((names[:9], names[9:])):
        file = f"model-{number:05d}-of-00002.safetensors"
        write_folder(folder, {name: tensors[name] for name in some}, name=file)
        weight_map.update(dict.fromkeys(some, file))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    actual = predict(models.from_preset(str(folder)), arrays["inputs/images"])
    np.testing.assert_allclose(actual, arrays["outputs/logits"], rtol=1e-4, atol=1e-4)


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


def test_a_normalisation_that_overflows(tmp_path):
    folder = timm_folder(tmp_path, "vit_token", std=[1e-44] * 3)
    with np.errstate(over="ignore"):
        refused(folder, "patch_embed.proj.weight", "finite")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ImportError, match=r"msgpack.*keras-moe\[convert\]"):
        models.convert(str(CHECKPOINTS / "vmoe_tiny/vmoe_tiny"))
