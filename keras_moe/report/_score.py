"""The score in a report's header: accuracy, or recall of pairs."""

import hashlib

import numpy as np

from keras_moe.evaluation import retrieval

# Pairs whose embeddings are kept, so that memory does not grow with the data.
_MOST_PAIRS = 10_000


class Score:
    """Accumulates a model's score while its data is read."""

    def __init__(self):
        self._hits = self._labelled = 0
        self._pairs, self._num_pairs = [], 0

    def update(self, batch) -> None:
        """Reads a batch."""
        if batch.embeddings is not None:
            if self._num_pairs < _MOST_PAIRS:
                images, texts = batch.embeddings
                keys = [
                    hashlib.sha256(image.tobytes()).hexdigest()
                    for image in batch.images
                ]
                self._pairs.append((images, texts, batch.captions, keys))
                self._num_pairs += batch.size
        elif batch.outputs is not None and batch.labels is not None:
            known = batch.labels >= 0
            self._labelled += int(known.sum())
            hits = batch.outputs[known].argmax(axis=-1) == batch.labels[known]
            self._hits += int(hits.sum())

    def facts(self) -> dict[str, str]:
        """The score by its name; empty without labels and pairs."""
        if self._labelled:
            return {"accuracy": f"{self._hits / self._labelled:.1%}"}
        if not self._pairs:
            return {}
        images, texts, captions, keys = map(np.concatenate, zip(*self._pairs))
        if not (np.isfinite(images).all() and np.isfinite(texts).all()):
            return {}
        # Equal captions belong to all their images.
        _, ids = np.unique(captions.astype(str), return_inverse=True)
        # An image with several captions is there several times.
        _, first, image_of_text = np.unique(
            keys, return_index=True, return_inverse=True
        )
        recalls = retrieval(images[first], texts, image_of_text, (1,), text_ids=ids)
        recalls = recalls.figures().values()
        name = "R@1 image to text, text to image"
        if self._num_pairs >= _MOST_PAIRS:
            name = f"{name}, first {self._num_pairs:,} pairs"
        return {name: ", ".join(f"{recall:.1%}" for recall in recalls)}
