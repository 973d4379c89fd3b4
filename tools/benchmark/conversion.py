"""Converting a checkpoint over reading its bytes and over building the model.

python tools/benchmark/conversion.py
"""

import argparse
import tempfile
from pathlib import Path

import keras
import msgpack
import numpy as np
from runner import Report, run
from safetensors.numpy import save_file

from keras_moe import models


def tensors(hidden_dim: int, num_layers: int) -> dict[str, np.ndarray]:
    """A ViT of patch 16 under the names of Google's releases."""
    heads, mlp_dim = hidden_dim // 64, 4 * hidden_dim
    shapes = {
        "embedding/kernel": (16, 16, 3, hidden_dim),
        "embedding/bias": (hidden_dim,),
        "cls": (1, 1, hidden_dim),
        "Transformer/posembed_input/pos_embedding": (1, 197, hidden_dim),
        "head/kernel": (hidden_dim, 1000),
        "head/bias": (1000,),
    }
    norms = ["Transformer/encoder_norm"]
    for i in range(num_layers):
        block = f"Transformer/encoderblock_{i}"
        norms += [f"{block}/LayerNorm_0", f"{block}/LayerNorm_2"]
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for name in ("query", "key", "value"):
            shapes[f"{attention}/{name}/kernel"] = (hidden_dim, heads, 64)
            shapes[f"{attention}/{name}/bias"] = (heads, 64)
        shapes[f"{attention}/out/kernel"] = (heads, 64, hidden_dim)
        shapes[f"{attention}/out/bias"] = (hidden_dim,)
        shapes[f"{block}/MlpBlock_3/Dense_0/kernel"] = (hidden_dim, mlp_dim)
        shapes[f"{block}/MlpBlock_3/Dense_0/bias"] = (mlp_dim,)
        shapes[f"{block}/MlpBlock_3/Dense_1/kernel"] = (mlp_dim, hidden_dim)
        shapes[f"{block}/MlpBlock_3/Dense_1/bias"] = (hidden_dim,)
    for norm in norms:
        shapes[f"{norm}/scale"] = shapes[f"{norm}/bias"] = (hidden_dim,)
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(shape, dtype="float32")
        for name, shape in shapes.items()
    }


def write_vmoe(prefix: Path, arrays: dict[str, np.ndarray]) -> None:
    """A V-MoE checkpoint of one shard, each tensor in one piece."""
    tree = {}
    for name in arrays:
        *path, leaf = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = name

    def pack(array):
        slices = msgpack.packb([msgpack.packb((0, n, None)) for n in array.shape])
        shaped = msgpack.packb((array.shape, "float32", False, {}))
        entry = msgpack.packb((shaped, (slices,), (0,)))
        values = msgpack.packb(((array.size,), "float32", array.tobytes()))
        piece = [[msgpack.ExtType(1, values)], msgpack.ExtType(6, slices)]
        return msgpack.ExtType(8, entry), [piece]

    shard = {"__msgpack_array_chunk_a87ca2__": True}

    def walk(node):
        for key in sorted(node):
            if isinstance(node[key], dict):
                walk(node[key])
            else:
                number = str(len(shard) - 1)
                node[key], shard[number] = pack(arrays[node[key]])

    walk(tree)
    index = {"shard_count": 1, "index": tree, "version": "20220622"}
    Path(f"{prefix}.index").write_bytes(msgpack.packb(index))
    Path(f"{prefix}.data-00000-of-00001").write_bytes(msgpack.packb(shard))


def read(path: Path) -> None:
    """Reads a file's bytes, into one buffer again and again."""
    buffer = bytearray(1 << 24)
    with open(path, "rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden-dim", type=int, default=768)
    parser.add_argument("--num-layers", type=int, default=12)


def measure(args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        arrays = tensors(args.hidden_dim, args.num_layers)
        size = sum(array.nbytes for array in arrays.values()) / 1e6
        np.savez(folder / "vit.npz", **arrays)
        save_file(arrays, folder / "vit.safetensors")
        write_vmoe(folder / "vit", arrays)
        del arrays

        def convert(source, load_weights=True):
            keras.backend.clear_session()
            model, _ = models.convert(str(source), load_weights=load_weights)
            return model.weights[0].value

        candidates = {
            "read the bytes": lambda: read(folder / "vit.npz"),
            "build the model": lambda: convert(folder / "vit.npz", load_weights=False),
        }
        for name, file in (
            (".npz", "vit.npz"),
            (".safetensors", "vit.safetensors"),
            ("V-MoE", "vit"),
        ):
            candidates[f"convert {name}"] = lambda file=file: convert(folder / file)
        report.compare(f"{size:.0f} MB", candidates, "read the bytes", MB=size)


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=5)
