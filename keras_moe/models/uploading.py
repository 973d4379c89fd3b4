"""Presets on their way to Hugging Face and Kaggle, through KerasHub."""

import os
from pathlib import Path

import keras_hub

from keras_moe.models.checksums import compare_preset
from keras_moe.models.model_card import CARD
from keras_moe.models.preset_folder import check_folder

_HUGGING_FACE, _KAGGLE = "hf://", "kaggle://"


def upload(uri: str, preset_dir: str | os.PathLike) -> None:
    """Uploads a preset folder with its card to Hugging Face or Kaggle.

    The folder is checked first: its files are whole and its weights are those that
    were saved. KerasHub then uploads it; `from_preset` takes the same `uri`.

    Args:
        uri: `"hf://USER/MODEL"` or `"kaggle://USER/MODEL/FRAMEWORK/VARIATION"`.
        preset_dir: folder that `save_to_preset` has written.

    Raises:
        ValueError: if `uri` is neither, or the folder is no whole preset.
        ImportError: if the service's library is not installed.

    Example:

    >>> from keras_moe import models
    >>> models.upload("ftp://somewhere", "my_digits")
    Traceback (most recent call last):
    ...
    ValueError: Expected a URI that starts with hf:// or kaggle://; received: ...
    """
    if not isinstance(uri, str) or not uri.startswith((_HUGGING_FACE, _KAGGLE)):
        raise ValueError(
            f"Expected a URI that starts with {_HUGGING_FACE} or {_KAGGLE}; received: "
            f"{uri!r}"
        )
    kind, _, place = uri.partition("://")
    names = place.split("/")
    if len(names) != (2 if f"{kind}://" == _HUGGING_FACE else 4) or "" in names:
        raise ValueError(
            f"Expected a URI like {_HUGGING_FACE}USER/MODEL or "
            f"{_KAGGLE}USER/MODEL/FRAMEWORK/VARIATION; received: {uri!r}"
        )
    folder = Path(preset_dir).expanduser()
    if not folder.is_dir():
        raise ValueError(f"Expected a preset folder; received: {str(preset_dir)!r}")
    check_folder(folder)
    compare_preset(folder)
    if uri.startswith(_HUGGING_FACE) and (folder / CARD).is_file():
        _upload_card(uri.removeprefix(_HUGGING_FACE), folder / CARD)
    keras_hub.upload_preset(uri, str(folder))


def _upload_card(repository, page):
    """Uploads the page first: KerasHub writes, and removes, one where there is none."""
    import huggingface_hub

    created = huggingface_hub.create_repo(repo_id=repository, exist_ok=True)
    huggingface_hub.upload_file(
        path_or_fileobj=page, path_in_repo=CARD, repo_id=created.repo_id
    )
