"""Opens published weights: files, folders, handles and models in memory."""

import os
from pathlib import Path
from typing import Any

import keras
import keras_hub

from keras_moe._checks import check_path, unfit
from keras_moe._files import path_within
from keras_moe.models._remote import check_file_exists, get_file, local, named_errors
from keras_moe.models.conversion import (
    _dino,
    _gpt2,
    _keras_hub,
    _moepp,
    _openclip,
    _readers,
    _siglino,
    _transformers,
)
from keras_moe.models.conversion._google import google_spec
from keras_moe.models.conversion._spec import ConversionSpec
from keras_moe.models.conversion._timm import timm_spec
from keras_moe.models.preprocessing._byte_pairs import TOKENIZER_FILES
from keras_moe.models.preprocessing.tokenizer import GPT2_FILES, TextTokenizer
from keras_moe.models.saving._preset_folder import check_files

# Each returns the spec of a checkpoint whose names it knows, or None.
_SOURCES = (
    google_spec,
    timm_spec,
    _moepp.moepp_spec,
    _gpt2.gpt2_spec,
    _siglino.siglino_spec,
    _dino.dino_spec,
    _transformers.transformers_spec,
    _openclip.openclip_spec,
)
_MODEL_TYPES = (
    *_transformers.MODEL_TYPES,
    *_dino.MODEL_TYPES,
    *_moepp.MODEL_TYPES,
    *_gpt2.MODEL_TYPES,
    *_siglino.MODEL_TYPES,
)
_VMOE_BUCKET = "gs://vmoe_checkpoints/"
# Reading these formats executes code in them.
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npy")
_INDEX = ".safetensors.index.json"
_STEMS = (
    "model", "open_clip_model", "open_clip_pytorch_model", "diffusion_pytorch_model",
)  # fmt: skip
_WEIGHTS = tuple(f"{stem}{end}" for stem in _STEMS for end in (".safetensors", _INDEX))


def is_convertible(source: object) -> bool:
    return _located(source)[0] is not None


def check_convertible(source: object) -> None:
    if isinstance(source, keras.Model) and not isinstance(source, _keras_hub.CLASSES):
        names = sorted(cls.__name__ for cls in _keras_hub.CLASSES)
        raise unfit(f"a KerasHub model of {names}", type(source).__name__)
    check_path("source", source)
    if not is_convertible(source):
        raise ValueError(
            "Expected weights to convert: a V-MoE's prefix, an .npz or .safetensors, a "
            "folder or hf://, kaggle:// or gs:// of these, of timm, OpenCLIP or "
            f"transformers, or a KerasHub model or preset; received: {source!r}"
        )


def open_source(
    source: Any, overrides: dict, load_weights: bool = True, tower: str | None = None
) -> tuple[_readers.PublishedTensors, ConversionSpec]:
    """Opens a source of `convert`; returns its tensors, to be closed, and its spec."""
    kind, text = _located(source)
    if kind == "hub":
        return _keras_hub.keras_hub_spec(hub_model(source, load_weights), tower)
    config = {}
    if kind == "npz":
        file = _readers.NpzCheckpoint(local(text))
    elif kind == "vmoe":
        file = _readers.VMoECheckpoint(_local_vmoe(text.removesuffix(".index")))
    elif kind == "safetensors":
        if "://" not in text:
            config = _configs(str(Path(text).parent))
        path = local(text)
        file = _safetensors(path, str(Path(path).parent))
    else:
        config, name = _configs(text), _weights_file(text)
        if name is None:
            raise _pickle(f"{text}, which has no .safetensors")
        file = _safetensors(get_file(text, name), text)
    # A tokenizer is beside a local file.
    folder = text if kind == "folder" else str(Path(file.path).parent)
    try:
        specs = (find(file, config, overrides, tower) for find in _SOURCES)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            raise ValueError(
                "Expected the names of a ViT, V-MoE, Soft MoE, MLP-Mixer, CLIP, "
                "SigLIP, DINO, SigLino, MoE++ or GPT-2; received: "
                f"{len(file)} tensors such as {sorted(file)[:3]} in {file.path}"
            )
        if spec.architecture == "GPT-2" and kind == "folder":
            spec.tokenizer = _gpt2_tokenizer(text, spec)
        elif spec.backbone == "CLIPBackbone":
            spec.tokenizer = _pair_tokenizer(folder, spec, config)
    except BaseException as error:
        file.close()
        kinds = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
        if not isinstance(error, kinds) or "Expected" in str(error) or not config:
            raise
        # A config may have anything in place of a number, a name or a dict.
        raise ValueError(
            f"Expected values of their publisher's kinds in the config of {file.path}; "
            f"received: {config!r:.500} ({type(error).__name__}: {error})"
        ) from error
    return file, spec


def _gpt2_tokenizer(folder, spec):
    if all(check_file_exists(folder, name) for name in GPT2_FILES):
        files = [get_file(folder, name) for name in GPT2_FILES]
        return TextTokenizer.gpt2(*files, max_length=spec.arguments["max_length"])
    spec.notes += (f"no tokenizer: {' and '.join(GPT2_FILES)} are missing",)
    return None


def _pair_tokenizer(folder, spec, config):
    text, openclip = spec.arguments["text"], config.get("model_cfg", config)
    # Some of OpenCLIP's have another tokenizer.
    own = _openclip.OWN_TOKENIZER
    if openclip.get("text_cfg", {}).get("hf_tokenizer_name", own) != own:
        return None
    if not text.get("causal", True):
        # Of SigLIP, the second of which has Gemma's.
        return TextTokenizer.of_gemma(folder, text["max_length"])
    for names in TOKENIZER_FILES:
        if all(check_file_exists(folder, name) for name in names):
            paths = [get_file(folder, name) for name in names]
            try:
                return TextTokenizer.clip(os.path.dirname(paths[0]), text["max_length"])
            except ValueError:
                # Some CLIPs have a tokenizer of another kind.
                return None
    return None


# Kinds of sources


def _located(source):
    """`"npz"`, `"vmoe"`, `"safetensors"`, `"folder"`, `"hub"` or None, and where."""
    if isinstance(source, _keras_hub.CLASSES):
        return "hub", source
    if not isinstance(source, (str, os.PathLike)):
        return None, source
    text = os.fspath(source)
    # A folder can have any name, such as that of a run's checkpoint.
    if os.path.isdir(text) and not os.path.isfile(f"{text}.index"):
        kind = "hub" if _is_hub_preset(text) else _folder_kind(text)
        only = _only_checkpoint(text) if kind is None else None
        return (kind, text) if only is None else _located(only)
    if text.endswith(_PICKLES):
        raise _pickle(text)
    is_vmoe = text.startswith(_VMOE_BUCKET) or text.endswith(".index")
    kind = None
    if text.endswith(".npz"):
        kind = "npz"
    elif text.endswith((".safetensors", _INDEX)):
        kind = "safetensors"
    elif is_vmoe or os.path.isfile(f"{text}.index"):
        kind = "vmoe"
    elif _is_hub_preset(text):
        kind = "hub"
    elif text.startswith(("hf://", "kaggle://")):
        kind = _folder_kind(text)
    return kind, text


def _is_hub_preset(name):
    return any(name in cls.presets for cls in _keras_hub.WITH_PRESETS)


def _pickle(source):
    return ValueError(
        "Expected weights as .safetensors or .npz, since reading a pickle runs the "
        f"code in it; received: {source}. If the publisher has no other file and you "
        "trust it, convert it with safetensors.torch.save_file."
    )


def _folder_kind(folder):
    try:
        config = _json(folder, "config.json")
    except ValueError:
        # A preset without published weights: its loader reports what is wrong.
        if _weights_file(folder) is None:
            return None
        raise
    if "registered_name" in config:
        package, _, name = str(config["registered_name"]).rpartition(">")
        names = [cls.__name__ for cls in _keras_hub.CLASSES]
        return "hub" if package == "keras_hub" and name in names else None
    is_known = (
        {"vision_config", "architecture"} & config.keys()
        or config.get("model_type") in _MODEL_TYPES
        # SigLino's config has no type.
        or "n_storage_tokens" in config
        or check_file_exists(folder, _openclip.CONFIG_NAME)
    )
    if is_known:
        return "folder"
    # For a local file without a config, the names may be enough.
    if "://" in folder or config:
        return None
    if _weights_file(folder) is not None:
        return "folder"
    if any(Path(folder).glob("*.bin")):
        raise _pickle(folder)
    return None


# Files in folders and on hubs


def _json(folder, name):
    """Reads a JSON file, {} if missing; raises ValueError if damaged."""
    if not check_file_exists(folder, name):
        return {}
    return _readers.read_object(get_file(folder, name))


def _only_checkpoint(folder):
    """Returns the `.npz` or V-MoE checkpoint of a folder, if it is the only one."""
    paths = [x for x in Path(folder).iterdir() if x.suffix in (".npz", ".index")]
    for path in Path(folder).glob(f"{paths[0].stem}.*") if len(paths) == 1 else ():
        path_within(path, folder)
    return str(paths[0]) if len(paths) == 1 else None


def _weights_file(folder):
    for name in _WEIGHTS:
        if check_file_exists(folder, name):
            return name
    if "://" in folder:
        return None
    only = [path.name for path in Path(folder).glob("*.safetensors")]
    return only[0] if len(only) == 1 else None


def _configs(folder):
    """Returns timm's, transformers' or OpenCLIP's config with the preprocessor's."""
    config = {**_json(folder, "config.json"), **_json(folder, _openclip.CONFIG_NAME)}
    preprocessor = _json(folder, "preprocessor_config.json")
    return {**config, "preprocessor": preprocessor} if preprocessor else config


def _safetensors(path, folder):
    """Opens a file, or the files of the folder that an index lists."""
    names = _readers.read_index(path) if path.endswith(_INDEX) else []
    return _readers.SafetensorsCheckpoint(
        path, [get_file(folder, name) for name in names]
    )


def hub_model(source: Any, load_weights: bool = True) -> keras.Model:
    """Returns KerasHub's model of a source: a classifier if the preset has one."""
    if isinstance(source, _keras_hub.CLASSES):
        return source
    source = os.fspath(source)
    if os.path.isdir(source):
        check_files(source)
    cls = keras_hub.models.Backbone
    task = _json(source, "task.json")
    if str(task.get("registered_name", "")).endswith(">ViTImageClassifier"):
        cls = keras_hub.models.ViTImageClassifier
    kind = str(_json(source, "config.json").get("registered_name", ""))
    if check_file_exists(source, "tokenizer.json"):
        for each in _keras_hub.LANGUAGE_TASKS:
            if kind.endswith(f">{each.backbone_cls.__name__}"):
                cls = each
    with named_errors(source):
        return cls.from_preset(source, load_weights=load_weights)


# Downloads


def _local_vmoe(prefix):
    """Returns the local prefix, downloading all files of a remote one."""
    if "://" not in prefix:
        return prefix
    index = local(f"{prefix}.index")
    _, count = _readers.read_vmoe_index(index)
    for number in range(count):
        local(_readers.shard_path(prefix, number, count))
    return index.removesuffix(".index")
