"""Small published checkpoints, and models of other libraries with random weights."""

import contextlib
import importlib.machinery
import importlib.util
import itertools
import json
import sys
import types
from pathlib import Path
from unittest import mock

import keras
import keras_hub
import msgpack
import numpy as np
import pytest
from safetensors.numpy import save_file

from keras_moe import models
from tests import golden
from tests.compare import assert_close
from tests.golden import part

CHECKPOINTS = golden.FOLDER / "07_checkpoints"
HALF = [0.5] * 3
# The normalisation of CLIP's images.
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])


def predict(model, images):
    return model.predict(images, verbose=0)


def random_images(shape, batch=2):
    return np.random.default_rng(1).uniform(-1, 1, (batch, *shape)).astype("float32")


def values(model, name):
    (weight,) = [weight for weight in model.weights if weight.path == name]
    return keras.ops.convert_to_numpy(weight.value)


def refused(source, *words, **overrides):
    """Checks that a source is refused by an error with such words."""
    with pytest.raises(ValueError, match="received") as caught:
        models.from_preset(source, **overrides)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def classic(**changes):
    """The arrays of a golden ViT of Google, some changed or left out (None)."""
    arrays = dict(np.load(CHECKPOINTS / "vit_classic.npz"))
    arrays.update({name.replace("__", "/"): x for name, x in changes.items()})
    return {name: array for name, array in arrays.items() if array is not None}


def write_folder(folder, arrays, config=None, name="model.safetensors", **configs):
    """Writes a folder with `.safetensors` weights and a `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
    save_file(arrays, str(folder / name))
    for file, content in {"config": config, **configs}.items():
        if content is not None:
            (folder / f"{file}.json").write_text(json.dumps(content))
    return str(folder)


def timm_folder(folder, case, mean=HALF, std=HALF, change=None, **config):
    """A golden model of timm, whose tensors and config may be changed."""
    arrays, info = golden.load(f"12_timm/{case}")
    kwargs = info["kwargs"]
    tensors = part(arrays, "state_dict/")
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


_MAGIC = "__msgpack_array_chunk_a87ca2__"
_NDARRAY, _SLICE_ND, _INDEX_INFO = 1, 6, 8


def _slice_nd(bounds):
    return msgpack.packb(tuple(msgpack.packb((a, b, None)) for a, b in bounds))


def _chunks(array):
    """The array cut along its first axis: bounds and values."""
    if not array.ndim:
        return [((), array)]
    edges = np.linspace(0, len(array), min(3, len(array)) + 1).astype(int)
    rest = tuple((0, n) for n in array.shape[1:])
    return [
        (((int(a), int(b)), *rest), array[a:b]) for a, b in itertools.pairwise(edges)
    ]


def write_vmoe(prefix, arrays, shards=2, edit_shard=None):
    """Writes a V-MoE checkpoint; `edit_shard(number, shard)` may change shards."""
    tree, content = {}, [{_MAGIC: True} for _ in range(shards)]
    turn = itertools.cycle(range(shards))
    for number, name in enumerate(sorted(arrays, key=lambda name: name.split("/"))):
        array = np.asarray(arrays[name])
        slices, where = [], []
        for bounds, chunk in _chunks(array):
            where.append(next(turn))
            slices.append(_slice_nd(bounds))
            pieces = [
                msgpack.packb((x.shape, str(array.dtype), x.tobytes()))
                for x in np.array_split(np.ravel(chunk), 2)
            ]
            pair = [
                [msgpack.ExtType(_NDARRAY, piece) for piece in pieces],
                msgpack.ExtType(_SLICE_ND, slices[-1]),
            ]
            content[where[-1]].setdefault(str(number), []).append(pair)
        shaped = msgpack.packb((array.shape, str(array.dtype), False, {}))
        node = tree
        *path, leaf = name.split("/")
        for key in path:
            node = node.setdefault(key, {})
        entry = msgpack.packb((shaped, tuple(slices), tuple(where)))
        node[leaf] = msgpack.ExtType(_INDEX_INFO, entry)
    index = {"shard_count": shards, "index": tree, "version": "20220622"}
    Path(f"{prefix}.index").write_bytes(msgpack.packb(index))
    for number, shard in enumerate(content):
        if edit_shard:
            edit_shard(number, shard)
        path = Path(f"{prefix}.data-{number:05d}-of-{shards:05d}")
        path.write_bytes(msgpack.packb(shard))
    return str(prefix)


def hub_randomized(model):
    generator = np.random.default_rng(0)
    for weight in model.weights:
        if keras.backend.is_float_dtype(weight.dtype):
            value = generator.normal(scale=0.3, size=weight.shape)
            weight.assign(value + ("gamma" in weight.path))
    return model


def hub_vit(**kwargs):
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16}
    return keras_hub.models.ViTBackbone((8, 12, 3), 4, **{**sizes, **kwargs})


def hub_classifier(**kwargs):
    return keras_hub.models.ViTImageClassifier(hub_vit(), 3, **kwargs)


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


IDS = np.array([[18, 3, 19, 0, 0, 0], [18, 4, 5, 6, 7, 19], [18, 8, 9, 19, 2, 2]])
# After the ends of text.
PADDING = np.array([[1, 1, 1, 0, 0, 0], [1] * 6, [1, 1, 1, 1, 0, 0]])
_TEXT = {
    "vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 6,
}  # fmt: skip
_IMAGE = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
}  # fmt: skip


PAIR_IMAGES = random_images((8, 8, 3), 3)


def pixels(mean=0.5, std=0.5):
    """The same images as PyTorch's models take them."""
    import torch

    normalized = ((PAIR_IMAGES + 1) / 2 - mean) / std
    return torch.tensor(normalized.transpose(0, 3, 1, 2), dtype=torch.float32)


def check_pair(backbone, images, texts, logits, ids=IDS):
    """Compares a pair's embeddings and logits with those of another library."""
    pairs = {"images": PAIR_IMAGES, "token_ids": ids, "padding_mask": PADDING}
    outputs = backbone(pairs)
    both = outputs["image_embeddings"], outputs["text_embeddings"]
    received = (*both, backbone.logit_scale.logits(*both))
    expected = [np.asarray(x) for x in (images, texts, logits)]
    expected[:2] = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in expected[:2]]
    for actual, wanted in zip(received, expected):
        actual = keras.ops.convert_to_numpy(actual)
        assert_close(actual, wanted, 1e-5, 1e-5)


def check_transformers_pair(backbone, reference, images):
    """Compares a pair with a model of transformers."""
    import torch

    inputs = {"input_ids": torch.tensor(IDS), "pixel_values": images}
    if type(reference).__name__ == "CLIPModel":
        inputs["attention_mask"] = torch.tensor(PADDING)
    with torch.no_grad():
        x = reference(**inputs)
    check_pair(backbone, x.image_embeds, x.text_embeds, x.logits_per_image)


def torch_randomized(model, seed=0):
    """A PyTorch model with random weights that matter."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.4)
    return model.eval()


def state_of(model):
    """The tensors of a PyTorch model as arrays."""
    return {name: x.detach().numpy() for name, x in model.state_dict().items()}


def _transformers(name, cls, text, image, **sizes):
    """One of transformers' models of images, of texts or of both."""
    import transformers

    made = getattr(transformers, cls)
    for tower, own in (("Text", text), ("Vision", image)):
        if tower in cls:
            config = getattr(transformers, f"{name}{tower}Config")(**own, **sizes)
            return torch_randomized(made(config))
    both = {"text_config": text, "vision_config": image}
    return torch_randomized(
        made(getattr(transformers, f"{name}Config")(**both, **sizes))
    )


def transformers_clip(cls="CLIPModel", end_of_text_id=19, act="quick_gelu", **sizes):
    """One of transformers' CLIP models; `sizes` are the text tower's."""
    text = {**_TEXT, "eos_token_id": end_of_text_id, "hidden_act": act, **sizes}
    image = {**_IMAGE, "hidden_act": act}
    return _transformers("CLIP", cls, text, image, projection_dim=4)


def transformers_siglip(cls="SiglipModel", **sizes):
    """One of transformers' SigLIP models; `sizes` are the text tower's."""
    text = {**_TEXT, "projection_size": 8, **sizes}
    return _transformers("Siglip", cls, text, _IMAGE)


def transformers_siglip2():
    """Transformers' SigLIP 2 for images of any shape, of 16 patches in training."""
    import transformers

    image = {k: x for k, x in _IMAGE.items() if k != "image_size"}
    texts = {**_TEXT, "projection_size": _IMAGE["hidden_size"]}
    config = transformers.Siglip2Config(
        text_config=texts, vision_config={**image, "num_patches": 16, "patch_size": 4}
    )
    return torch_randomized(transformers.Siglip2Model(config))


def transformers_dinov2(registers=False, **options):
    """One of transformers' DINOv2 models."""
    import transformers

    name = "Dinov2WithRegisters" if registers else "Dinov2"
    sizes = {k: x for k, x in _IMAGE.items() if k != "intermediate_size"}
    config = getattr(transformers, f"{name}Config")
    config = config(**{**sizes, "mlp_ratio": 2, **options})
    return torch_randomized(getattr(transformers, f"{name}Model")(config))


def transformers_dinov3(**options):
    """One of transformers' DINOv3 models."""
    import transformers

    sizes = {**_IMAGE, "hidden_size": 16, "num_register_tokens": 3}
    config = transformers.DINOv3ViTConfig(**sizes, **options)
    return torch_randomized(transformers.DINOv3ViTModel(config))


def read_back(cls, folder):
    """A model of transformers from a folder that has its tensors and no others."""
    model, report = cls.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


@contextlib.contextmanager
def _without_torchvision():
    """Stand-ins for what OpenCLIP imports to read images, which no test does."""

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
    """OpenCLIP, with or without torchvision."""
    if importlib.util.find_spec("open_clip") is None:
        pytest.skip("open_clip is not installed")
    import transformers.utils.import_utils as installed

    # Transformers keeps the answer: ask before the stand-ins are there.
    if installed.is_torchvision_available() or "open_clip" in sys.modules:
        import open_clip
    else:
        with _without_torchvision():
            import open_clip
    return open_clip


def open_clip_config(text=None, image=None, **model):
    """The `model_cfg` of OpenCLIP's files."""
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
    return torch_randomized(kind(**config))


def save_open_clip(model, config, folder, **preprocess):
    """Saves OpenCLIP's model as its releases are; returns the folder's path."""
    return write_folder(
        folder,
        state_of(model),
        name="open_clip_model.safetensors",
        open_clip_config={"model_cfg": config, "preprocess_cfg": preprocess},
    )


def open_clip_folder(folder, text=None, image=None, **model):
    """Zeros under OpenCLIP's names, which need no library, and a config."""
    shapes = {
        "visual.conv1.weight": (8, 3, 4, 4), "visual.class_embedding": (8,),
        "visual.positional_embedding": (5, 8), "visual.proj": (8, 4), "logit_scale": (),
        "token_embedding.weight": (20, 8), "positional_embedding": (6, 8),
        "text_projection": (8, 4),
    }  # fmt: skip
    blocks = ["visual.transformer.resblocks.0.", "transformer.resblocks.0."]
    for name in ("visual.ln_pre", "visual.ln_post", "ln_final"):
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (8,)
    for block in blocks:
        for name in ("ln_1", "ln_2", "attn.out_proj", "mlp.c_proj"):
            shapes[f"{block}{name}.weight"] = shapes[f"{block}{name}.bias"] = (8,)
        shapes[f"{block}attn.out_proj.weight"] = (8, 8)
        shapes[f"{block}mlp.c_proj.weight"] = (8, 16)
        shapes[f"{block}mlp.c_fc.weight"] = (16, 8)
        shapes[f"{block}mlp.c_fc.bias"] = (16,)
        shapes[f"{block}attn.in_proj_weight"] = (24, 8)
        shapes[f"{block}attn.in_proj_bias"] = (24,)
    config = open_clip_config({"layers": 1, **(text or {})}, image, **model)
    return write_folder(
        folder,
        {name: np.zeros(shape, "float32") for name, shape in shapes.items()},
        name="open_clip_model.safetensors",
        open_clip_config={"model_cfg": config},
    )
