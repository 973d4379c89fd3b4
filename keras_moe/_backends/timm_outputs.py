"""Runs a model of timm on images, in a process without TensorFlow.

    python timm_outputs.py FOLDER

timm and TensorFlow in one process register LLVM's options twice, which ends it, so
`keras-moe convert` starts this program by its path to compare a conversion.

FOLDER holds `images.npy` (B, channels, height, width), normalised, and `request.json`,
the arguments of `timm_outputs`. The outputs go to `outputs.npy`. Nothing is unpickled.
"""

import json
import sys
from pathlib import Path

import numpy as np


def main(argv: list[str]) -> int:
    folder = Path(argv[0])
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    images = np.load(folder / "images.npy", allow_pickle=False)
    try:
        outputs = timm_outputs(images, **request)
    except Exception as error:  # Each is a reason why nothing is compared.
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    np.save(folder / "outputs.npy", outputs, allow_pickle=False)
    return 0


def timm_outputs(
    images: np.ndarray, architecture: str, arguments: dict, files: list[str]
) -> np.ndarray:
    """The outputs of timm's model with the weights in the files."""
    import timm
    import torch
    from safetensors.torch import load_file

    # Another text may be an address, whose weights timm's loader would unpickle.
    if not timm.is_model(architecture):
        raise ValueError(
            f"Expected an architecture of timm; received: {architecture!r}"
        )
    state = {}
    for file in files:
        tensors = load_file(file)
        state.update({name: tensor.float() for name, tensor in tensors.items()})
    model = timm.create_model(architecture, pretrained=False, **arguments)
    model.load_state_dict(state)
    with torch.no_grad():
        return model.eval()(torch.from_numpy(images)).numpy()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
