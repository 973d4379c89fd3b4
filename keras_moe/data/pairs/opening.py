"""The sources of pairs by name."""

from typing import Any, NamedTuple

from keras_moe.data.pairs import arrays, emoji, folder
from keras_moe.data.pairs.source import PairSource


class SourceOptions(NamedTuple):
    """The options that decide what a source has, apart from its order.

    Fields:
        image_shape: (height, width, channels) of the images.
        every_caption: whether each caption of an image makes a pair.
        templates: templates of captions, or the path of a file of such, or None.
        style: drawings of the emoji.
        language: language of the emoji's names.
        size: side at which emoji are drawn; None for that of `image_shape`.
        data_dir: folder of TensorFlow Datasets.
    """

    image_shape: tuple[int, int, int] = (32, 32, 3)
    every_caption: bool = False
    templates: Any = None
    style: str = "openmoji"
    language: str = "en"
    size: int | None = None
    data_dir: str | None = None


def open_pairs(source: Any, split: str, options: SourceOptions) -> PairSource:
    """The pairs of a split of a source of `load_pairs`."""
    if isinstance(source, tuple) and len(source) == 2:
        return arrays.read_pairs(*source)
    kind, _, name = source.partition(":") if isinstance(source, str) else ("", "", "")
    if source == "emoji":
        return emoji.read_pairs(split, options)
    if kind == "folder" and folder.has_captions(name, split):
        return folder.read_pairs(name, split)
    raise ValueError(
        "Expected 'emoji', 'folder:PATH' with captions.csv or captions.jsonl in a "
        "split, or a tuple of images and captions; "
        f"received: source={source!r:.100}, split={split!r}"
    )
