"""Cosine similarities that are exact, so that a tie is a tie on every machine.

Unit vectors are rounded to multiples of 2^-26, by 2^-27 at most. All sums of their
products are then multiples of 2^-52 below 2, which float64 holds: a similarity is
the same in any order of summation, and with it in any chunk and on any processor.

Axes: N examples, P embedding, R rows, S columns of a chunk.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_moe.checks import check_integer
from keras_moe.evaluation.feature_checks import NAMED, check_matrix

_STEPS = 2.0**26
CHUNK_SIZE = 2048


def check_embeddings(name: str, embeddings: Any, dim: int | None = None) -> np.ndarray:
    """Embeddings as an array (N, P), if they are finite, none of them is 0,
    and P fits.
    """
    embeddings = check_matrix(name, embeddings)
    if dim is not None and embeddings.shape[1] != dim:
        raise ValueError(
            f"Expected {name} of dim {dim}, that of the others; "
            f"received: shape={embeddings.shape}"
        )
    for start in range(0, len(embeddings), CHUNK_SIZE):
        lengths = norms(embeddings[start : start + CHUNK_SIZE].astype("float64"))
        bad = start + np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
        if bad.size:
            raise ValueError(
                f"Expected finite {name}, none of them 0; received: others, first at "
                f"indices {bad[:NAMED].tolist()}"
            )
    return embeddings


def check_ks(
    ks: Any, highest: int | None = None, what: str = "", counts: str = ""
) -> tuple[int, ...]:
    """Values of k as a tuple, if there are some, none of them below 1 or too high."""
    if not isinstance(ks, (Sequence, np.ndarray)) or isinstance(ks, (str, bytes)):
        raise ValueError(f"Expected ks, a sequence of integers; received: ks={ks!r}")
    ks = tuple(check_integer("ks", k) for k in ks)
    if not ks or (highest is not None and max(ks) > highest):
        limit = "" if highest is None else f" to {highest}, the number of {what}"
        received = f"ks={ks}" + (f", {counts}" if counts else "")
        raise ValueError(f"Expected values of k from 1{limit}; received: {received}")
    return ks


def unit_vectors(embeddings: np.ndarray) -> np.ndarray:
    """Embeddings of length 1, rounded so that their products are exact; float64."""
    embeddings = np.ascontiguousarray(embeddings, "float64")
    units = embeddings / norms(embeddings)[:, None]
    units *= _STEPS
    np.rint(units, out=units)
    units /= _STEPS
    return units


def count_before(
    similarities: np.ndarray, own: np.ndarray, own_column: np.ndarray, start: int = 0
) -> np.ndarray:
    """For each row, the number of columns that are ranked before its own.

    These have a higher similarity, or the same one and a lower number.
    """
    stop = start + similarities.shape[1]
    # Where equal ones count, "at least" is "more than the next lower number".
    limit = np.where(own_column >= stop, np.nextafter(own, -np.inf), own)
    is_higher = similarities > limit[:, None]
    count = is_higher.view("uint8").sum(axis=1, dtype="int64")
    rows = np.flatnonzero((start <= own_column) & (own_column < stop))
    if rows.size:
        is_equal = similarities[rows] == own[rows, None]
        is_equal &= np.arange(start, stop) < own_column[rows, None]
        count[rows] += is_equal.sum(axis=1)
    return count


def norms(embeddings: np.ndarray) -> np.ndarray:
    """The lengths (N,) of embeddings (N, P)."""
    # A NaN or an infinity is one of the norm; huge values do not overflow float64.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt(np.square(embeddings).sum(axis=1))
