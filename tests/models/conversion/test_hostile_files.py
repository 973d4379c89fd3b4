"""Files that are made to harm, or whose values are none, are refused by name."""

import io
import warnings
import zipfile

import msgpack
import numpy as np
import pytest

from keras_moe import models
from keras_moe.models.conversion._readers import NpzCheckpoint
from tests.models.conversion.test_conversion import timm_folder
from tests.models.conversion.test_refusals import classic, refused, vmoe_arrays
from tests.models.conversion.writers import write_vmoe

pytestmark = pytest.mark.backend_free

MEMBER = "embedding/kernel.npy"


def npy(shape=(2,), data=b"\0" * 8):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    return header.getvalue() + data


def patched(content, offset, value):
    """Both headers of the only member, local and central, with another field."""
    content = bytearray(content)
    for magic, place in ((b"PK\3\4", offset), (b"PK\1\2", offset + 2)):
        start = content.index(magic) + place
        content[start : start + 2] = value.to_bytes(2, "little")
    return content


@pytest.mark.parametrize(
    ("offset", "value", "word"),
    [(6, 1, "encrypted"), (8, 97, "compression")],
)
def test_members_that_cannot_be_read(tmp_path, offset, value, word):
    path = tmp_path / "vit.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, npy())
    path.write_bytes(patched(path.read_bytes(), offset, value))
    refused(str(path), "vit.npz", "embedding/kernel", word)


def test_members_that_are_no_arrays(tmp_path):
    path = tmp_path / "vit.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("embedding/kernel", npy())
    refused(str(path), "vit.npz", "'embedding/kernel'", ".npy")
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr(MEMBER, npy())
        archive.writestr(MEMBER, npy())
    refused(str(path), "vit.npz", MEMBER, "once")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        *((shape, "of at least 1") for shape in ((0,), (2, 0), (-2, -1), (True,))),
        ((1 << 62, 4), "stored size"),
        ((1 << 64,), "stored size"),
        ((1 << 32, 1 << 32, 2), "stored size"),
    ],
)
def test_sizes_that_are_none(tmp_path, shape, words):
    # The product of some is 0 in 64 bits, as many as the bytes that follow.
    size = 8 if shape == (-2, -1) else 4 * (shape == (True,))
    with zipfile.ZipFile(tmp_path / "vit.npz", "w") as archive:
        archive.writestr(MEMBER, npy(shape, b"\0" * size))
    refused(str(tmp_path / "vit.npz"), "vit.npz", "embedding/kernel", words)


def test_a_corrupt_deflated_stream(tmp_path):
    path = tmp_path / "vit.npz"
    np.savez_compressed(path, **classic())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo(MEMBER).header_offset
    content = bytearray(path.read_bytes())
    lengths = content[start + 26 : start + 30]
    start += 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    # A block of a type that deflate has not.
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


def test_products_that_overflow(tmp_path):
    def change(tensors):
        for name in ("ls1", "ls2"):
            gamma = np.full(32, 3e38, "float32")
            tensors.update({f"blocks.{i}.{name}.gamma": gamma for i in "01"})
        tensors["blocks.0.attn.proj.weight"] = np.full((32, 32), 1e30, "float32")

    with np.errstate(over="ignore"):
        refused(
            timm_folder(tmp_path, "vit_token", change=change),
            "blocks.0.attn.proj.weight",
            "finite",
        )


def test_values_at_the_edge_of_float32_are_kept(tmp_path):
    bias = np.zeros(7, "float64")
    bias[0] = np.finfo("float32").max
    np.savez(tmp_path / "vit.npz", **classic(head__bias=bias))
    model = models.from_preset(str(tmp_path / "vit.npz"))
    assert model.count_params() > 0


def test_an_index_with_keys_of_two_types(tmp_path):
    def edit(index):
        index["index"][b"x"] = index["index"]["head"]

    prefix = write_vmoe(tmp_path / "x", vmoe_arrays(), edit_index=edit)
    # msgpack writes bytes as bytes: the keys are of two types when read.
    with open(f"{prefix}.index", "rb") as file:
        assert b"x" in msgpack.unpackb(file.read())["index"]
    refused(prefix, "x.index", "names as keys")
