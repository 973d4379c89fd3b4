"""Small CLIP and SigLIP models of other libraries, with random weights."""

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from unittest import mock

import numpy as np
import pytest

from tests.models.conversion.writers import write_folder

IDS = np.array([[18, 3, 19, 0, 0, 0], [18, 4, 5, 6, 7, 19], [18, 8, 9, 19, 2, 2]])
# Behind the ends of text.
PADDING = np.array([[1, 1, 1, 0, 0, 0], [1] * 6, [1, 1, 1, 1, 0, 0]])
TEXT = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 6,
}
IMAGE = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def randomized(model, seed=0):
    """A PyTorch model with random weights that matter."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.4)
    return model.eval()


def transformers_clip(cls="CLIPModel", end_of_text_id=19, activation="quick_gelu"):
    """One of transformers' CLIP models."""
    import transformers

    text = {**TEXT, "eos_token_id": end_of_text_id, "hidden_act": activation}
    image = {**IMAGE, "hidden_act": activation}
    if "Text" in cls:
        config = transformers.CLIPTextConfig(**text, projection_dim=4)
    elif "Vision" in cls:
        config = transformers.CLIPVisionConfig(**image, projection_dim=4)
    else:
        config = transformers.CLIPConfig(
            text_config=text, vision_config=image, projection_dim=4
        )
    return randomized(getattr(transformers, cls)(config))


def transformers_siglip(cls="SiglipModel"):
    """One of transformers' SigLIP models."""
    import transformers

    text = {**TEXT, "projection_size": 8}
    if "Text" in cls:
        config = transformers.SiglipTextConfig(**text)
    elif "Vision" in cls:
        config = transformers.SiglipVisionConfig(**IMAGE)
    else:
        config = transformers.SiglipConfig(text_config=text, vision_config=IMAGE)
    return randomized(getattr(transformers, cls)(config))


@contextlib.contextmanager
def _without_torchvision():
    """Names that OpenCLIP imports for its images' files, which no test here reads."""

    class Module(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return mock.MagicMock()

    modules = {}
    for name in ("", ".transforms", ".transforms.functional", ".ops", ".ops.misc"):
        name = f"torchvision{name}"
        modules[name] = module = Module(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    with mock.patch.dict(sys.modules, modules):
        yield


def import_open_clip():
    """OpenCLIP, also where its torchvision is not there."""
    if importlib.util.find_spec("open_clip") is None:
        pytest.skip("open_clip is not installed")
    import transformers.utils.import_utils as installed

    # Transformers keeps the answer, which is to be the true one.
    if installed.is_torchvision_available() or "open_clip" in sys.modules:
        import open_clip
    else:
        with _without_torchvision():
            import open_clip
    return open_clip


def open_clip_config(text=None, image=None, **model):
    """A config as OpenCLIP's files have it, beside the preparation of images."""
    return {
        "embed_dim": 4,
        "vision_cfg": {
            "image_size": 8, "patch_size": 4, "width": 8, "head_width": 4, "layers": 1,
            **(image or {}),
        },
        "text_cfg": {
            "context_length": 6, "vocab_size": 20, "width": 8, "heads": 2, "layers": 2,
            **(text or {}),
        },
        **model,
    }  # fmt: skip


def open_clip_model(config):
    """OpenCLIP's model of a config."""
    open_clip = import_open_clip()
    config = dict(config)
    custom = config.pop("custom_text", False)
    kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    return randomized(kind(**config))


def save_open_clip(model, config, folder):
    """Saves OpenCLIP's model as its releases are; returns the folder's path."""
    state = {name: x.detach().numpy() for name, x in model.state_dict().items()}
    return write_folder(
        folder,
        state,
        name="open_clip_model.safetensors",
        open_clip_config={"model_cfg": config, "preprocess_cfg": {}},
    )
