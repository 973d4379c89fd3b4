"""Weights in the formats of other libraries: written whole, or not at all."""

import os
import re

import keras

from keras_moe.checks import check_one_of
from keras_moe.files import staged_folder, write_failed, write_json
from keras_moe.models.conversion.clip_parts import OPENCLIP_CONFIG
from keras_moe.models.conversion.exported_towers import ExportedModel
from keras_moe.models.conversion.openclip_export import openclip_files
from keras_moe.models.conversion.published_tensors import library as required_library
from keras_moe.models.conversion.transformers_export import transformers_files

_FORMATS = {
    "transformers": (transformers_files, "model.safetensors", "config.json"),
    "open_clip": (openclip_files, "open_clip_model.safetensors", OPENCLIP_CONFIG),
}


def export_weights(model: keras.Model, library: str, folder: str | os.PathLike) -> None:
    """Writes a CLIP, a SigLIP or a tower of one as another library loads it.

    `transformers` holds `CLIPModel`, `SiglipModel` and their towers, and `open_clip`
    pairs with image towers of its own kind. Weights are float32, in one `.safetensors`
    file beside a config. Converted weights come back bit for bit, with one exception:
    where the normalisation of CLIP's images has become part of the patch embedding,
    kernels that the source has in half precision come back exactly, and others up to
    rounding, since float32 has not the digits for both.

    A patch embedding with a bias, which CLIP does not have, changes the positions by
    it, unless the bias is that of CLIP's normalisation. The tokenizer stays with the
    source.

    Args:
        model: `CLIPBackbone`, `ViTBackbone`, `TextBackbone`, or a task around one.
        library: library that loads the weights, `"transformers"` or `"open_clip"`.
        folder: a new folder, an empty one, or an older export, whose weights and
            configs are replaced when all files of the new one are written. Other files
            in it are kept.

    Raises:
        ImportError: without the package safetensors:
            `pip install 'keras-moe[convert]'`.
        ValueError: naming the argument or the weight that the library's models do not
            have, such as experts; or if the folder holds something else.
        FolderInUse: an OSError that names the process that has been exporting to
            `folder` for ten minutes.
        OSError: with the path and the bytes, if a file cannot be written. The older
            export stays as it was.

    Example:

    >>> import os, tempfile
    >>> from keras_moe import models
    >>> text = models.TextBackbone(
    ...     vocabulary_size=20, max_length=6, hidden_dim=8, num_layers=1, num_heads=2,
    ...     mlp_dim=16, projection_dim=4,
    ... )
    >>> folder = os.path.join(tempfile.mkdtemp(), "text")
    >>> models.export_weights(text, "transformers", folder)
    >>> sorted(os.listdir(folder))
    ['config.json', 'model.safetensors']
    >>> type(models.from_preset(folder)).__name__
    'TextBackbone'
    """
    check_one_of("library", library, tuple(_FORMATS))
    required_library("safetensors")
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    files_of, weights_name, config_name = _FORMATS[library]
    tensors, files = files_of(ExportedModel.of(model))
    own = {weights_name, *files}
    with staged_folder(
        folder,
        "export",
        lambda path: _is_export(path, config_name),
        lambda path: path.name in own,
    ) as staging:
        path = staging / weights_name
        try:
            save_file(tensors, str(path), metadata={"format": "pt"})
        except SafetensorError as error:
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise
            reason = OSError(int(number[1]), os.strerror(int(number[1])))
            size = sum(array.nbytes for array in tensors.values())
            raise write_failed(reason, path, size) from error
        for name, content in files.items():
            write_json(staging / name, content)


def _is_export(folder, config_name):
    names = {path.name for path in folder.iterdir()}
    # A preset of this library has this, too.
    return config_name in names and "metadata.json" not in names
