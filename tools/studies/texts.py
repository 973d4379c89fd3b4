"""The texts of the study of language models, and the classes of their tokens."""

import functools
import sysconfig
from pathlib import Path

import keras
import numpy as np

from keras_moe import data, models
from keras_moe.data._files import held_out_split
from keras_moe.losses import next_tokens

FUNCTION_WORDS = (
    "a an and any are as at be been but by can could do does for from had has "
    "have how if in into is it its may more most must no not of on one only or "
    "other should so some such than that the their them then there these they "
    "this those to two was were what when where which while will with without "
    "would you your "
)
CLASSES = ("special", "punctuation", "number", "function word", "word", "piece of word")


SOURCES = "python_sources"


@functools.cache
def python_sources() -> dict[str, list[str]]:
    """The modules of CPython's standard library and of its tests, by split (PSF-2.0).

    Each text once, in the order of their paths; the contents draw the split.
    """
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages"}
    files = [x for x in root.rglob("*.py") if others.isdisjoint(x.parts)]
    splits: dict[str, dict[str, None]] = {}
    for file in sorted(files):
        content = file.read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue  # Tests of other encodings.
        if text.strip():
            splits.setdefault(held_out_split(content), {})[text] = None
    return {split: list(texts) for split, texts in splits.items()}


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

    def _texts(self, split):
        if self.source == SOURCES:
            return python_sources()[split]
        return data.load_texts(self.source, split)

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
