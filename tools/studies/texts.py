"""The texts of the study of language models, and the classes of their tokens."""

import functools

import keras
import numpy as np

from keras_moe import data, models
from keras_moe.losses import next_tokens

FUNCTION_WORDS = (
    "a an and any are as at be been but by can could do does for from had has "
    "have how if in into is it its may more most must no not of on one only or "
    "other should so some such than that the their them then there these they "
    "this those to two was were what when where which while will with without "
    "would you your "
)
CLASSES = ("special", "punctuation", "number", "function word", "word", "piece of word")


class Texts:
    """The documents of each split as token ids, and packed into rows."""

    def __init__(self, source: str, vocabulary_size: int, length: int):
        self.source, self.size, self.length = source, vocabulary_size, length

    @functools.cached_property
    def tokenizer(self) -> models.TextTokenizer:
        """The tokenizer, trained on the training documents."""
        texts = data.load_texts(self.source, "train")
        return models.TextTokenizer.trained(texts, self.size, self.length)

    @functools.cached_property
    def documents(self) -> dict[str, list[list[int]]]:
        """The token ids of each document by split."""
        return {
            split: self.tokenizer.documents(data.load_texts(self.source, split))
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
