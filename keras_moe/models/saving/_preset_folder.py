"""Preset folders on disk: written atomically and verified when read.

`metadata.json` has the SHA-256 of each weights and tokenizer file, and a shard index
(`.weights.json`) that of each shard, both in `"metadata"`. Other libraries ignore them.
"""

import contextlib
import contextvars
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from keras_moe import _files
from keras_moe._checks import nearest, unfit
from keras_moe.models import registry
from keras_moe.models._remote import check_file_exists, get_file, named_errors

HUB_MODELS = (
    "KerasHub's ViT, CLIP and SigLIP become models of this library, see "
    "keras_moe.models.convert; its other backbones do not"
)
METADATA = "metadata.json"
CHECKSUMS = "sha256"
INDEX = "model.weights.json"
# KerasHub's names of single files, shards and head weights.
WEIGHTS_FILES = ("model.weights.h5", "model_*.weights.h5", "task.weights.h5")
TOKENIZER = "text_tokenizer.json"
# KerasHub's config and vocabulary files, next to ours.
_TOKENIZER_FILE = re.compile(r"(text_)?tokenizer\.json|assets/tokenizer/\w[\w.-]*")


def is_weights(path: Path) -> bool:
    return any(path.match(pattern) for pattern in WEIGHTS_FILES)


def add_checksums(folder: str | os.PathLike) -> None:
    """Adds checksums of weights and tokenizer files to a preset's metadata."""
    folder = Path(folder)
    path = folder / METADATA
    if path.is_file():
        weights = {
            x.name: _files.sha256_of(x) for x in folder.iterdir() if is_weights(x)
        }
        sums = dict(sorted({**weights, **_tokenizer_checksums(folder)}.items()))
        _files.write_json(path, {**json.loads(_files.read_text(path)), CHECKSUMS: sums})


def add_tokenizer_checksums(folder: str | os.PathLike) -> None:
    """Adds a tokenizer's checksums to the metadata, creating it if needed."""
    folder = Path(folder)
    path = folder / METADATA
    metadata = json.loads(_files.read_text(path)) if path.is_file() else {CHECKSUMS: {}}
    # Checksums of some files only would make those of the weights appear missing.
    if CHECKSUMS in metadata:
        sums = {**metadata[CHECKSUMS], **_tokenizer_checksums(folder)}
        _files.write_json(path, {**metadata, CHECKSUMS: dict(sorted(sums.items()))})


def _tokenizer_checksums(folder):
    paths = [*folder.glob("*.json"), *folder.glob("assets/tokenizer/*")]
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {
        name: _files.sha256_of(path)
        for name, path in names.items()
        if _TOKENIZER_FILE.fullmatch(name) and path.is_file()
    }


def shard_names(path: Path, content: Any) -> list[str]:
    try:
        listed = list(content["weight_map"].values())
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"Expected a weight_map of file names in {path}; received a file of "
            "another kind"
        ) from error
    entries = [x if isinstance(x, list) else [x] for x in listed]
    names = [str(name) for entry in entries for name in entry]
    for name in names:
        is_shard = name.endswith(".weights.h5") and not set(name) & set("/\\\0")
        if not is_shard or (path.name == INDEX and not is_weights(Path(name))):
            expected = f"shards *.weights.h5 of the same folder in {path}"
            raise unfit(expected, repr(name[:200]))
    return sorted(set(names))


def compare_checksums(path: Path) -> list[Path]:
    """Verifies weights against the checksums of preset and index."""
    files, expected = [path], {}
    if path.exists():
        _files.regular_file(path)
    if path.suffix == ".json" and path.is_file():
        content = _read_json(path)
        files += [path.with_name(name) for name in shard_names(path, content)]
        expected[path] = _listed(path, content.get("metadata"), files[1:])
    metadata = path.with_name(METADATA)
    for file in [*files[1:], metadata]:
        if file.exists():
            _files.regular_file(file, path.parent)
    own = [file for file in files if is_weights(file)]
    if own:
        expected[metadata] = _listed(metadata, _read_json(metadata), own)
    for file in files:
        listed = {
            source: sums[file.name]
            for source, sums in expected.items()
            if file.name in sums
        }
        # Keras reports missing files.
        received = _files.sha256_of(file) if listed and file.is_file() else None
        for source, sha256 in listed.items():
            _compare(file, received, sha256, source)
    return files


def _compare(file, received, expected, source):
    if received not in (None, expected):
        raise ValueError(
            f"Expected the file that was saved, {file} of SHA-256 {expected}; "
            f"received: {received}. The file is damaged, or was replaced: remove "
            f'"{CHECKSUMS}" from {source} to load it all the same'
        )


def compare_tokenizer(preset: str) -> None:
    """Verifies a tokenizer's files against the recorded checksums."""
    if os.path.isdir(preset):
        check_files(preset)
    if not check_file_exists(preset, METADATA):
        return
    source = Path(get_file(preset, METADATA))
    metadata = _read_json(source)
    if not isinstance(metadata, dict):
        raise ValueError(f"Expected whole JSON in {source}; received another file")
    sums = metadata.get(CHECKSUMS)
    for name, expected in sums.items() if isinstance(sums, dict) else ():
        # KerasHub reports missing files.
        if _TOKENIZER_FILE.fullmatch(name) and check_file_exists(preset, name):
            file = get_file(preset, name)
            _compare(file, _files.sha256_of(file), expected, source)


def compare_preset(folder: str | os.PathLike) -> None:
    for name in ("model.weights.h5", INDEX, "task.weights.h5"):
        path = Path(folder) / name
        # A backbone's preset has no file for the head.
        if path.is_file():
            compare_checksums(path)
    compare_tokenizer(os.fspath(folder))


def _read_json(path) -> Any:
    try:
        return json.loads(_files.read_text(path))
    except (OSError, RecursionError, ValueError):
        return None


def _listed(source, metadata, files):
    """Returns the checksums of files; {} if the preset has none."""
    if not isinstance(metadata, dict) or CHECKSUMS not in metadata:
        # A single file, or one written by plain Keras or KerasHub.
        return {}
    sums = metadata[CHECKSUMS]
    for file in files:
        if not isinstance(sums, dict) or not isinstance(sums.get(file.name), str):
            raise ValueError(
                f'Expected the SHA-256 of {file.name} in "{CHECKSUMS}" of {source}, or '
                f'no "{CHECKSUMS}"; received: {str(sums)[:200]!r}'
            )
    return sums


# The files of a preset; all others belong to the user.
PRESET_FILES = (
    "config.json",
    "metadata.json",
    "task.json",
    "preprocessor.json",
    "image_converter.json",
    INDEX,
)

_KIND = "preset"

_writing = contextvars.ContextVar("writing", default=False)


def is_preset(folder: str | os.PathLike) -> bool:
    """Whether a folder is a Keras preset rather than other libraries' weights."""
    content = _read_json(Path(folder) / "config.json")
    return isinstance(content, dict) and "registered_name" in content


@contextlib.contextmanager
def staged(preset_dir: str | os.PathLike) -> Iterator[str]:
    """Yields a folder to write to, which then atomically replaces the preset."""
    if _writing.get():
        yield str(preset_dir)
        return
    with _files.staged_folder(
        preset_dir, _KIND, is_preset, _is_own, add_checksums
    ) as staging:
        token = _writing.set(True)
        try:
            yield str(staging)
        finally:
            _writing.reset(token)


def readable(preset_dir: str | os.PathLike) -> Path:
    """The folder to read: the old one while a preset is being replaced."""
    target = Path(preset_dir).expanduser()
    if target.is_dir() or not target.name:
        return target
    previous = _files.previous_folder(target.resolve())
    return previous if previous.is_dir() else target


def _is_own(path):
    return path.name in PRESET_FILES or is_weights(path)


def check_folder(folder: str | os.PathLike) -> None:
    """Checks that a local preset folder is complete and its JSON files are whole."""
    folder, contents = Path(folder), check_files(folder)
    for name, content in contents.items():
        if not isinstance(content, dict):
            raise ValueError(
                f"Expected a whole JSON object in {folder / name}; received a file "
                "that is truncated or of another kind"
            )
    names = sorted(os.listdir(folder))
    wanted = ["config.json", "model.weights.h5"]
    if "task.weights.h5" in names:
        wanted.append("task.json")
    # A task may have no weights in addition to its backbone's.
    task = contents.get("task.json")
    cls = keras.saving.get_registered_object(str((task or {}).get("registered_name")))
    if task is not None and getattr(cls, "has_head", True):
        wanted.append("task.weights.h5")
    if any(x.startswith("model") and is_weights(Path(x)) for x in names):
        wanted.remove("model.weights.h5")
    if missing := [name for name in wanted if name not in names]:
        raise unfit(f"{missing[0]} in the preset folder {folder}", names)


def check_files(folder: str | os.PathLike) -> dict[str, Any]:
    """Refuses pipes and links out of a preset's folder; returns its JSON by name."""
    folder, contents = Path(folder), {}
    for path in [*folder.iterdir(), *folder.glob("assets/**/*")]:
        is_read = path.suffix in (".json", ".h5") or "assets" in path.parts
        if path.is_dir() and is_read:
            _files.path_within(path, folder)
        elif path.exists() and not path.is_dir():
            _files.regular_file(path, folder if is_read else None)
            if path.parent == folder and path.name in PRESET_FILES:
                contents[path.name] = _read_json(path)
    return contents


def check_preset(preset: str | os.PathLike) -> str:
    """Returns the handle, or the folder to read from."""
    if not isinstance(preset, (str, os.PathLike)) or "\0" in str(preset):
        raise unfit("the name of a preset", f"{preset!r}. {HUB_MODELS}")
    if "://" in str(preset):
        return str(preset)
    folder = readable(preset)
    if not folder.is_dir():
        raise ValueError(
            "Expected a built-in preset, a folder or a handle such as hf://user/name; "
            f"received: preset={str(preset)!r} "
            f"({nearest(str(preset), list(registry.presets()))}; docs/zoo.md and "
            "keras_moe.models.list_presets() have all)"
        )
    check_folder(folder)
    return str(folder)


@contextlib.contextmanager
def explained(preset: str, name: str | None = None, advice: str = "") -> Iterator[None]:
    """Context that adds the preset's name to errors."""
    received = f"preset={str(name or preset)!r}"
    try:
        # KerasHub downloads some files itself.
        is_remote = "://" in str(preset)
        with named_errors(preset) if is_remote else contextlib.nullcontext():
            yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        if str(preset) in str(error) or received in str(error):
            raise
        raise ValueError(
            "Expected a preset whose files fit together and fit the arguments"
            f"{advice and f' ({advice})'}; received: {received}, which failed with "
            f"{type(error).__name__}: {error}"
        ) from error
