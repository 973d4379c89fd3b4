"""The texts of the study of language models, and the classes of their tokens."""

import functools
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np

from keras_moe import data, models
from keras_moe.data._texts import of_split
from keras_moe.losses import next_tokens
from tools.studies.study import digest

FUNCTION_WORDS = (
    "a an and any are as at be been but by can could do does for from had has "
    "have how if in into is it its may more most must no not of on one only or "
    "other should so some such than that the their them then there these they "
    "this those to two was were what when where which while will with without "
    "would you your "
)
CLASSES = ("special", "punctuation", "number", "function word", "word", "piece of word")
PYTHON_SOURCES = "python_sources"
SPLITS = ("train", "validation", "test")


def python_sources() -> list[tuple[str, str]]:
    """Packages and modules of CPython's standard library and of its tests (PSF-2.0).

    Each text once. A split has whole packages, and whole files or folders of the tests:
    modules of a package repeat each other.
    """
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages"}
    found = {}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if not others.isdisjoint(name.parts):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # Tests of other encodings.
        if text.strip():
            place = name.parts[: 2 if name.parts[0] == "test" else 1]
            found.setdefault(text, "/".join(place))
    return [(place, text) for text, place in found.items()]


class Texts:
    """The documents of each split as token ids, and packed into rows."""

    def __init__(self, source: str, vocabulary_size: int, length: int):
        self.source, self.size, self.length = source, vocabulary_size, length

    @functools.cached_property
    def texts(self) -> dict[str, Sequence[str]]:
        """The documents of each split."""
        if self.source == PYTHON_SOURCES:
            sources = python_sources()
            return {split: list(of_split(sources, split)) for split in SPLITS}
        return {split: data.load_texts(self.source, split) for split in SPLITS}

    @functools.cached_property
    def tokenizer(self) -> models.TextTokenizer:
        """The tokenizer, trained on the training documents."""
        return models.TextTokenizer.trained(self.texts["train"], self.size, self.length)

    @functools.cached_property
    def documents(self) -> dict[str, list[list[int]]]:
        """The token ids of each document by split."""
        return {
            split: self.tokenizer.documents(texts)
            for split, texts in self.texts.items()
        }

    @functools.cached_property
    def rows(self) -> dict[str, dict[str, np.ndarray]]:
        """Rows by split, with the targets that count."""
        packed = {}
        for split, documents in self.documents.items():
            rows = models.pack(documents, self.length)
            targets = next_tokens(rows["token_ids"], rows["padding_mask"])
            packed[split] = {**rows, "targets": keras.ops.convert_to_numpy(targets)}
        return packed

    @functools.cached_property
    def digest(self) -> str:
        """What other texts to train on would not have."""
        return digest(list(self.texts["train"]))

    def classes(self) -> np.ndarray:
        """The class of each token id, as an index into `CLASSES`."""
        return np.array([self._class(id) for id in range(self.size)])

    def _class(self, id):
        tokenizer = self.tokenizer
        if id >= tokenizer.vocabulary_size or id in (
            tokenizer.start_id,
            tokenizer.end_id,
        ):
            return CLASSES.index("special")
        token = tokenizer.tokenizer.id_to_token(id)
        text = token.removesuffix("</w>")
        if not any(x.isalnum() for x in text):
            return CLASSES.index("punctuation")
        if text.isdigit():
            return CLASSES.index("number")
        if token == text:
            return CLASSES.index("piece of word")
        return CLASSES.index(
            "function word" if text in FUNCTION_WORDS.split() else "word"
        )
