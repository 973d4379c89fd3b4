"""Saves to a disk that is full, or with files that may not grow.

Arguments: `limit` or `full`, and a folder. Prints a line of JSON for each way of
saving, and one at the end, which a process does not reach when HDF5 ends it for closing
a file that could not be written.
"""

import errno
import json
import os
import resource
import sys
from pathlib import Path

# Keras imports it to look for its kinds of shapes: two seconds for nothing.
sys.modules["tensorflow"] = None

import keras  # noqa: E402
import numpy as np  # noqa: E402

from keras_moe import models  # noqa: E402

CONFIG = {
    "image_shape": (8, 8, 1),
    "patch_size": 4,
    "hidden_dim": 32,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_dim": 64,
    "moe_layers": [1],
    "num_experts": 2,
}


def fill(folder):
    """Takes all that is left of a disk."""
    size = 1 << 16
    with open(folder / "filling", "ab", buffering=0) as file:
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def main():
    kind, folder = sys.argv[1], Path(sys.argv[2])
    backbone = models.ViTBackbone.from_config(CONFIG)
    model = models.ViTImageClassifier(backbone, 3)
    adapted = models.ViTBackbone.from_config(CONFIG)
    adapted.enable_lora(4)
    ways = {
        "preset": lambda: model.save_to_preset(folder / "preset"),
        "shards": lambda: model.save_to_preset(folder / "shards", max_shard_size=3e-5),
        "weights": lambda: model.save_weights(folder / "soup.weights.h5"),
        "lora": lambda: adapted.save_lora_weights(folder / "pairs.lora.h5"),
    }
    for save in ways.values():
        save()
    before = [keras.ops.convert_to_numpy(x) for x in model.weights]
    model.set_weights([x + 1 for x in before])
    files = sorted(path for path in folder.rglob("*"))
    largest = max(path.stat().st_size for path in (folder / "preset").iterdir())
    if kind == "full":
        fill(folder)
        limits = [resource.RLIM_INFINITY]
    else:
        # Nothing; a part of the small files; arrays in the middle; all but the end.
        limits = [0, 1000, largest // 3, largest // 2, largest - 1]
    for limit in limits:
        for name, save in ways.items():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                save()
                report = {}
            except OSError as error:
                report = {
                    "errno": errno.errorcode[error.errno],
                    "path": error.filename,
                    "error": str(error),
                }
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            print(json.dumps({"way": name, "limit": limit, **report}), flush=True)
            if not report:
                # Small enough after all: as before.
                model.set_weights(before)
                save()
                model.set_weights([x + 1 for x in before])
    (folder / "filling").unlink(missing_ok=True)
    assert sorted(path for path in folder.rglob("*")) == files
    for name in ("preset", "shards"):
        loaded = models.from_preset(folder / name)
        for value, expected in zip(loaded.weights, before, strict=True):
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(value), expected)
    model.load_weights(folder / "soup.weights.h5")
    adapted.load_lora_weights(folder / "pairs.lora.h5")
    # Saved as if nothing had been.
    for save in ways.values():
        save()
    print(json.dumps({"way": "alive", "files": os.listdir(folder)}), flush=True)


if __name__ == "__main__":
    main()
