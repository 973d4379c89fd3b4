"""Writes checkpoints in the formats of others, as small as tests need them."""

import itertools
import json

import msgpack
import numpy as np
from safetensors.numpy import save_file

MAGIC = "__msgpack_array_chunk_a87ca2__"
NDARRAY, SLICE_ND, INDEX_INFO = 1, 6, 8


def _slice_nd(bounds):
    return msgpack.packb(tuple(msgpack.packb((a, b, None)) for a, b in bounds))


def _chunks(array, pieces):
    """The array cut along its first axis: bounds and values."""
    if not array.ndim:
        return [((), array)]
    edges = np.linspace(0, len(array), min(pieces, len(array)) + 1).astype(int)
    rest = tuple((0, n) for n in array.shape[1:])
    return [
        (((int(a), int(b)), *rest), array[a:b]) for a, b in itertools.pairwise(edges)
    ]


def write_vmoe(
    prefix,
    arrays,
    shards=2,
    pieces=3,
    edit_index=None,
    edit_shard=None,
    entry_code=INDEX_INFO,
    array_code=NDARRAY,
):
    """Writes a V-MoE checkpoint of `{name: array}`.

    `edit_index(index)` and `edit_shard(number, shard)` may change what is written;
    the codes are those of msgpack's extensions.
    """
    tree = {}
    for name in arrays:
        *path, leaf = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = name

    def leaves(node):
        for key in sorted(node):
            value = node[key]
            yield from leaves(value) if isinstance(value, dict) else [(node, key)]

    content = [{MAGIC: True} for _ in range(shards)]
    turn = itertools.cycle(range(shards))
    for number, (node, key) in enumerate(list(leaves(tree))):
        array = np.asarray(arrays[node[key]])
        slices, where = [], []
        for bounds, values in _chunks(array, pieces):
            shard = next(turn)
            slices.append(_slice_nd(bounds))
            where.append(shard)
            flat = np.ascontiguousarray(values).reshape(-1)
            half = len(flat) // 2
            subchunks = [
                msgpack.ExtType(
                    array_code,
                    msgpack.packb((x.shape, str(array.dtype), x.tobytes())),
                )
                for x in (flat[:half], flat[half:])
            ]
            content[shard].setdefault(str(number), []).append(
                [subchunks, msgpack.ExtType(SLICE_ND, slices[-1])]
            )
        shaped = msgpack.packb((array.shape, str(array.dtype), False, {}))
        node[key] = msgpack.ExtType(
            entry_code, msgpack.packb((shaped, tuple(slices), tuple(where)))
        )
    index = {"shard_count": shards, "index": tree, "version": "20220622"}
    if edit_index:
        edit_index(index)
    with open(f"{prefix}.index", "wb") as file:
        file.write(msgpack.packb(index))
    for number, shard in enumerate(content):
        if edit_shard:
            edit_shard(number, shard)
        with open(f"{prefix}.data-{number:05d}-of-{shards:05d}", "wb") as file:
            file.write(msgpack.packb(shard))
    return str(prefix)


def write_folder(folder, arrays, config=None, name="model.safetensors", **configs):
    """Writes a folder with `.safetensors` weights and a `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
    save_file(arrays, str(folder / name))
    for file, content in {"config": config, **configs}.items():
        if content is not None:
            (folder / f"{file}.json").write_text(json.dumps(content))
    return str(folder)
