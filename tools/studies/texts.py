"""The texts of the study of language models, and the classes of their tokens."""

import functools
import sysconfig
from pathlib import Path

import keras
import numpy as np

from keras_moe import data, models
from keras_moe.data._files import held_out_split
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


@functools.cache
def python_sources() -> dict[str, list[str]]:
    """The modules of CPython's standard library and of its tests, by split (PSF-2.0).

    Each text once. Splits are drawn by package, and by file or folder of the tests:
    modules of a package repeat each other.
    """
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages"}
    splits, seen = {}, set()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if not others.isdisjoint(name.parts):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # Tests of other encodings.
        if text.strip() and text not in seen:
            seen.add(text)
            place = name.parts[: 2 if name.parts[0] == "test" else 1]
            split = held_out_split("/".join(place).encode())
            splits.setdefault(split, []).append(text)
    return splits


class Texts:
    """The documents of each split as token ids, and packed into rows."""

    def __init__(self, source: str, vocabulary_size: int, length: int):
        self.source, self.size, self.length = source, vocabulary_size, length

    @functools.cached_property
    def tokenizer(self) -> models.TextTokenizer:
        """The tokenizer, trained on the training documents."""
        return models.TextTokenizer.trained(
            self._texts("train"), self.size, self.length
        )

    @functools.cached_property
    def documents(self) -> dict[str, list[list[int]]]:
        """The token ids of each document by split."""
        return {
            split: self.tokenizer.documents(self._texts(split))
            for split in ("train", "validation", "test")
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
        return digest(list(self._texts("train")))

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

    def _texts(self, split):
        if self.source == PYTHON_SOURCES:
            return python_sources()[split]
        return data.load_texts(self.source, split)
