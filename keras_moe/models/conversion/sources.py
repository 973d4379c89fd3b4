"""Sources of published weights: files, folders, handles, models in memory."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import keras
import keras_hub

from keras_moe.checks import check_path
from keras_moe.compat import check_file_exists, get_file
from keras_moe.models.conversion import keras_hub_names
from keras_moe.models.conversion.clip_names import clip_plan
from keras_moe.models.conversion.configs import (
    CONFIG,
    PREPROCESSOR,
    check_types,
    read_object,
)
from keras_moe.models.conversion.google_names import google_plan
from keras_moe.models.conversion.google_pair_names import google_pair_plan
from keras_moe.models.conversion.npz_checkpoint import NpzCheckpoint
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.published_tensors import PublishedTensors
from keras_moe.models.conversion.safetensors_checkpoint import (
    SafetensorsCheckpoint,
    read_index,
)
from keras_moe.models.conversion.timm_names import timm_plan
from keras_moe.models.conversion.vmoe_checkpoint import (
    VMoECheckpoint,
    shard_path,
)
from keras_moe.models.conversion.vmoe_checkpoint import (
    read_index as read_vmoe_index,
)

# Public buckets are served here, too.
GOOGLE_STORAGE = "https://storage.googleapis.com"
_VMOE_BUCKET = "gs://vmoe_checkpoints/"
# Files whose reading runs code of their makers.
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npy")
_INDEX = ".safetensors.index.json"
_CLIP_TYPES = tuple(
    f"{model}{tower}"
    for model in ("clip", "siglip", "siglip2")
    for tower in ("", "_vision_model", "_text_model")
)


def is_convertible(source: Any) -> bool:
    """Whether `source` is a published checkpoint that `convert` reads.

    Args:
        source: source of `from_preset`.

    Raises:
        ValueError: if it is one that is refused, such as a pickle.
    """
    return _kind(source) is not None


def check_convertible(source: Any) -> None:
    """Refuses what `convert` cannot read.

    Args:
        source: source of `convert`.

    Raises:
        ValueError: if it is no checkpoint of others, or one that is refused.
    """
    check_path("source", source)
    if _kind(source) is None:
        raise ValueError(
            "Expected weights to convert: a V-MoE checkpoint's prefix, an .npz, a "
            ".safetensors file, a folder with one of these, or of timm, OpenCLIP or "
            "transformers, a KerasHub model or preset, or hf://, kaggle://, gs:// of "
            f"them; received: {source!r}"
        )


def _kind(source):
    """`"npz"`, `"vmoe"`, `"safetensors"`, `"folder"`, `"hub"` or None."""
    if isinstance(source, keras_hub_names.CLASSES):
        return "hub"
    if not isinstance(source, (str, os.PathLike)):
        return None
    text = os.fspath(source)
    # A folder may have any name, such as that of a run's checkpoint.
    if os.path.isdir(text) and not os.path.isfile(f"{text}.index"):
        kind = "hub" if _is_hub_preset(text) else _folder_kind(text)
        only = _only_checkpoint(text) if kind is None else None
        return kind if only is None else _kind(only)
    if text.endswith(_PICKLES):
        raise _pickle(text)
    if text.endswith(".npz"):
        return "npz"
    if text.endswith((".safetensors", _INDEX)):
        return "safetensors"
    is_vmoe = text.startswith(_VMOE_BUCKET) or text.endswith(".index")
    if is_vmoe or os.path.isfile(f"{text}.index"):
        return "vmoe"
    if _is_hub_preset(text):
        return "hub"
    if text.startswith(("hf://", "kaggle://")):
        return _folder_kind(text)
    return None


def _is_hub_preset(name):
    return any(
        name in cls.presets
        for cls in (
            keras_hub.models.ViTBackbone,
            keras_hub.models.CLIPBackbone,
            keras_hub.models.SigLIPBackbone,
        )
    )


def _pickle(source):
    return ValueError(
        "Expected weights as .safetensors or .npz, since reading a pickle runs the "
        f"code in it; received: {source}. Where the publisher has no other file, "
        "convert it with safetensors.torch.save_file where you trust it."
    )


def _folder_kind(folder):
    try:
        config = _json(folder, "config.json")
    except ValueError:
        # Without weights of others it is a preset: its loader names what is wrong.
        if _weights_file(folder) is None:
            return None
        raise
    if "registered_name" in config:
        package, _, name = str(config["registered_name"]).rpartition(">")
        names = [cls.__name__ for cls in keras_hub_names.CLASSES]
        return "hub" if package == "keras_hub" and name in names else None
    is_clip = isinstance(config.get("vision_config"), dict)
    is_clip = is_clip or config.get("model_type") in _CLIP_TYPES
    if is_clip or isinstance(config.get("architecture"), str):
        return "folder"
    if _has(folder, "open_clip_config.json"):
        return "folder"
    # The names in a file may be enough without a config.
    is_local = "://" not in folder and not config
    if is_local and _weights_file(folder) is not None:
        return "folder"
    if is_local and any(Path(folder).glob("*.bin")):
        raise _pickle(folder)
    return None


def _has(folder, name):
    try:
        return check_file_exists(folder, name)
    except (OSError, ValueError):
        return False


def _json(folder, name, types=None):
    """The content of a JSON file, `{}` where there is none; a damaged one raises."""
    if not _has(folder, name):
        return {}
    content = read_object(get_file(folder, name))
    return check_types(content, types or {}, f"{folder}/{name}")


def _only_checkpoint(folder):
    """The `.npz` or the V-MoE checkpoint of a local folder, if it has one such file."""
    paths = [x for x in Path(folder).iterdir() if x.suffix in (".npz", ".index")]
    return str(paths[0]) if len(paths) == 1 else None


def _weights_file(folder):
    for stem in (
        "model",
        "open_clip_model",
        "open_clip_pytorch_model",
        "diffusion_pytorch_model",
    ):
        for name in (f"{stem}.safetensors", f"{stem}{_INDEX}"):
            if _has(folder, name):
                return name
    if "://" in folder:
        return None
    only = [path.name for path in Path(folder).glob("*.safetensors")]
    return only[0] if len(only) == 1 else None


def open_source(
    source: Any,
    overrides: dict,
    load_weights: bool = True,
    tower: str | None = None,
) -> tuple[PublishedTensors, ConversionPlan]:
    """Opens a source and plans its conversion.

    Args:
        source: source of `convert`.
        overrides: arguments of the user.
        load_weights: whether values are read beside names and shapes.
        tower: `"image"` or `"text"` for one tower of a model of pairs; None for the
            source's own.

    Returns:
        The tensors, to be closed, and the plan.

    Raises:
        ValueError: if the source is none that can be converted.
    """
    check_convertible(source)
    kind = _kind(source)
    if kind == "hub":
        return keras_hub_names.keras_hub_plan(hub_model(source, load_weights), tower)
    text = os.fspath(source)
    if kind in ("npz", "vmoe") and os.path.isdir(text):
        # A V-MoE checkpoint may lie beside a folder of its name.
        text = text if os.path.isfile(f"{text}.index") else _only_checkpoint(text)
    config = {}
    if kind == "npz":
        file, name = NpzCheckpoint(local(text)), Path(text).stem
    elif kind == "vmoe":
        prefix = text.removesuffix(".index")
        file, name = VMoECheckpoint(_local_vmoe(prefix)), Path(prefix).name
    elif kind == "safetensors":
        beside = "://" not in text
        config = _configs(str(Path(text).parent)) if beside else {}
        file, name = SafetensorsCheckpoint(local(text)), Path(text).stem
    else:
        file, config = open_folder(text)
        name = text
    try:
        for find in (
            lambda: google_pair_plan(file, name, overrides, tower),
            lambda: google_plan(file, name, overrides),
            lambda: timm_plan(file, config, overrides),
            lambda: clip_plan(file, config, overrides, tower),
        ):
            plan = find()
            if plan is not None:
                return file, plan
        raise ValueError(
            "Expected the names of a ViT, V-MoE, Soft MoE, MLP-Mixer, CLIP or SigLIP; "
            f"received: {len(file)} tensors such as {sorted(file)[:3]} in {file.path}"
        )
    except BaseException:
        file.close()
        raise


def _configs(folder):
    """timm's, transformers' or OpenCLIP's config, with the preprocessor's."""
    config = {
        **_json(folder, "config.json", CONFIG),
        **_json(folder, "open_clip_config.json", CONFIG),
    }
    preprocessor = _json(folder, "preprocessor_config.json", PREPROCESSOR)
    return {**config, "preprocessor": preprocessor} if preprocessor else config


def open_folder(folder: str) -> tuple[SafetensorsCheckpoint, dict]:
    """Opens a folder of PyTorch's world; never a pickle in it."""
    config, name = _configs(folder), _weights_file(folder)
    if name is None:
        raise _pickle(f"{folder}, which has no .safetensors")
    path, paths = get_file(folder, name), None
    if name.endswith(_INDEX):
        files = set(read_index(path).values())
        paths = {file: get_file(folder, file) for file in files}
    return SafetensorsCheckpoint(path, paths), config


def hub_model(source: Any, load_weights: bool = True) -> keras.Model:
    """KerasHub's own model of a source; a classifier's preset gives the classifier."""
    if isinstance(source, keras_hub_names.CLASSES):
        return source
    source = os.fspath(source)
    cls = keras_hub.models.Backbone
    task = _json(source, "task.json")
    if str(task.get("registered_name", "")).endswith(">ViTImageClassifier"):
        cls = keras_hub.models.ViTImageClassifier
    return cls.from_preset(source, load_weights=load_weights)


def _local_vmoe(prefix):
    """The prefix on disk; of a remote one all files are downloaded."""
    if "://" not in prefix:
        return prefix
    index = local(f"{prefix}.index")
    count = read_vmoe_index(index)[2]
    for number in range(count):
        local(shard_path(prefix, number, count))
    return index.removesuffix(".index")


def local(address: str) -> str:
    """The path on disk of a file at `gs://` or `https://`, downloaded once."""
    if "://" not in address:
        return address
    scheme, _, place = address.partition("://")
    if scheme not in ("gs", "http", "https") or ".." in place.split("/"):
        raise ValueError(f"Expected gs:// or https://; received: {address!r}")
    url = f"{GOOGLE_STORAGE}/{place}" if scheme == "gs" else address
    # Where Keras keeps what it downloads.
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    target = home / "keras_moe" / scheme / place
    if target.is_file():
        return str(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # An interrupted download leaves no file that looks whole.
    folder = tempfile.mkdtemp(prefix=".partial.", dir=target.parent)
    try:
        path = keras.utils.get_file(
            fname=target.name, origin=url, cache_dir=folder, cache_subdir="."
        )
        os.replace(path, target)
    except Exception as error:
        raise ValueError(
            f"Expected a file that can be downloaded from {url}; received: {error}"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return str(target)
