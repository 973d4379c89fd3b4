"""Checks of texts before a model's `fit`, `evaluate` and `predict`.

Axes: B batch, N tokens.
"""

from typing import Any

import numpy as np

from keras_moe.checks import check_integer
from keras_moe.models.input_checks import array_values


def check_texts(
    inputs: Any,
    vocabulary_size: int,
    max_length: int,
    names: tuple[str, ...] = ("token_ids", "padding_mask"),
    end_of_text_id: int | None = None,
    may_be_empty: bool = False,
) -> None:
    """Checks the token ids and the padding of texts, as far as they are known."""
    if not isinstance(inputs, dict):
        return
    check_input_names(inputs, names)
    arrays = {name: array_values(inputs[name]) for name in names}
    arrays = {name: value for name, value in arrays.items() if value is not None}
    for name, value in arrays.items():
        _check_array(name, value, max_length)
    if len({value.shape for value in arrays.values()}) > 1:
        shapes = {name: value.shape for name, value in arrays.items()}
        raise ValueError(f"Expected inputs of one shape; received: {shapes}")
    token_ids, mask = arrays.get("token_ids"), arrays.get("padding_mask")
    if token_ids is not None:
        _check_ids(token_ids, check_integer("vocabulary_size", vocabulary_size))
    if mask is None or may_be_empty:
        return
    mask = mask.astype(bool)
    _check_each(mask.any(axis=1), "a token that is no padding")
    if token_ids is not None and end_of_text_id is not None:
        ends = (mask & (token_ids == end_of_text_id)).any(axis=1)
        _check_each(ends, f"the token end_of_text_id={end_of_text_id}")


def check_input_names(inputs: dict, names: tuple[str, ...]) -> None:
    """Raises ValueError unless a dict has the inputs of a model and no others.

    Keras would take the values in the order of their names, whatever these are.
    """
    if missing := [name for name in names if name not in inputs]:
        raise ValueError(
            f"Expected a dict of {', '.join(names)}; received: none of {missing}, but "
            f"{sorted(inputs)}"
        )
    if unknown := sorted(set(inputs) - set(names)):
        raise ValueError(
            f"Expected a dict of {', '.join(names)} alone; received: {unknown}, too"
        )


def _check_array(name, value, max_length):
    if value.ndim != 2 or value.dtype.kind not in "biu":
        raise ValueError(
            f"Expected {name} to be integers of shape (batch, num_tokens); received: "
            f"shape={value.shape}, dtype={value.dtype}"
        )
    if value.shape[1] == 0:
        raise ValueError(
            f"Expected texts of at least one token; received: {name}.shape="
            f"{value.shape}"
        )
    if value.shape[1] > max_length:
        raise ValueError(
            f"Expected texts of at most max_length={max_length} tokens; received: "
            f"{name}.shape={value.shape}"
        )


def _check_ids(token_ids, vocabulary_size):
    fits = (token_ids >= 0) & (token_ids < vocabulary_size)
    if not fits.all():
        raise ValueError(
            "Expected token ids from 0 to vocabulary_size - 1 = "
            f"{vocabulary_size - 1}; received: {token_ids[~fits][0]}"
        )


def _check_each(fits, what):
    """Raises ValueError unless each text has something."""
    if not fits.all():
        raise ValueError(
            f"Expected {what} in each text; received: text {np.argmin(fits)} without"
        )
