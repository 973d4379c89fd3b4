"""Rows of token ids for language models. Axes: B batch, N tokens."""

from collections.abc import Iterable, Sequence

import numpy as np

from keras_moe._checks import check_integer

# Ids are int32.
_LARGEST = 2**31 - 1


def pack(
    documents: Iterable[Sequence[int]], length: int, padding_id: int = 0
) -> dict[str, np.ndarray]:
    """Packs documents one after another into rows, without padding between them.

    A document that does not fit goes on in the next row. The last row is padded.

    Args:
        documents: token ids of each document.
        length: N, tokens per row.
        padding_id: id of padding.

    Returns: `"token_ids"` (B, N), and `"padding_mask"` (B, N), the numbers 1, 2, ... of
    the documents in a row, and 0 for padding.

    Example:

    >>> from keras_moe.models import pack
    >>> rows = pack([[5, 6, 7], [8, 9]], length=4)
    >>> rows["token_ids"].tolist(), rows["padding_mask"].tolist()
    ([[5, 6, 7, 8], [9, 0, 0, 0]], [[1, 1, 1, 2], [1, 0, 0, 0]])
    """
    length = check_integer("length", length)
    padding_id = check_integer("padding_id", padding_id, 0, _LARGEST)
    rows = [_ids(document) for document in documents]
    if not any(map(len, rows)):
        raise ValueError("Expected documents with token ids; received: none")
    ids = np.concatenate(rows)
    number = np.repeat(np.arange(len(rows)), [len(x) for x in rows])
    padding = -len(ids) % length
    ids = np.pad(ids, (0, padding), constant_values=padding_id).reshape(-1, length)
    number = np.pad(number, (0, padding), constant_values=-1).reshape(-1, length)
    # Documents are numbered from 1 in each row.
    is_new = np.diff(number, axis=1, prepend=number[:, :1]) != 0
    mask = np.where(number < 0, 0, 1 + np.cumsum(is_new, axis=1))
    return {"token_ids": ids, "padding_mask": mask.astype("int32")}


def _ids(document):
    """A document's ids as int32, which would wrap larger numbers and cut fractions."""
    ids = np.asarray(document)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"Expected a list of integers for each document; received: {document!r:.80}"
        )
    if ids.size and not 0 <= ids.min() <= ids.max() <= _LARGEST:
        raise ValueError(
            f"Expected token ids from 0 to {_LARGEST}; received: {ids.min()} to "
            f"{ids.max()}"
        )
    return ids.astype("int32")


def padded_rows(
    rows: Sequence[Sequence[int]], length: int, padding_id: int = 0
) -> dict[str, np.ndarray]:
    """Pads each row of ids on the right."""
    token_ids = np.full((len(rows), length), padding_id, "int32")
    mask = np.zeros((len(rows), length), "int32")
    for row, ids in enumerate(rows):
        token_ids[row, : len(ids)] = _ids(ids)
        mask[row, : len(ids)] = 1
    return {"token_ids": token_ids, "padding_mask": mask}


def is_id_array(value: object) -> bool:
    """Whether `value` is an array of integers (B, N)."""
    return (
        isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype.kind in "iu"
    )
