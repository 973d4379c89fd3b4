"""Argument checks: errors name the expected and the received value."""

import difflib
import importlib
import inspect
import itertools
import numbers
from collections.abc import Collection, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import keras
import numpy as np

from keras_moe._errors import install, unfit

if TYPE_CHECKING:
    from keras_moe._types import Config, Size, Tensor

T = TypeVar("T")

# The largest seed that NumPy and `keras.utils.set_random_seed` accept.
LARGEST_SEED = 2**32 - 1
# The number of names that an error lists where none is near.
_FEW = 12


def _expect(fits: object, what: str, name: str, value: object) -> None:
    if not fits:
        raise unfit(what, **{name: value})


def check_integer(
    name: str,
    value: Any,
    minimum: int = 1,
    maximum: int | None = None,
    optional: bool = False,
) -> Any:
    """Returns `value` as an int within the bounds; None passes if `optional`."""
    if optional and value is None:
        return None
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    number = int(value) if is_integer else None
    if number is None or number < minimum or (maximum is not None and number > maximum):
        bounds = f"{name} >= {minimum}"
        if maximum is not None:
            bounds = f"{minimum} <= {name} <= {maximum}"
        raise unfit(f"{name} to be an integer, {bounds}", **{name: value})
    return number


def check_seed(name: str, seed: object) -> int | None:
    """Returns `seed`; it must be None or an integer valid for all random generators."""
    return check_integer(name, seed, 0, LARGEST_SEED, optional=True)


def check_selected(num_selected_experts: object, num_experts: int) -> int:
    """Returns `num_selected_experts` as an int in [1, `num_experts`]."""
    return check_integer("num_selected_experts", num_selected_experts, 1, num_experts)


def check_indices(name: str, values: object, count: int) -> set[int]:
    """Returns the set of `values`, which must be integers below `count`."""
    if not isinstance(values, Iterable):
        raise unfit(f"{name} to be a sequence of integers", **{name: values})
    return {check_integer(name, value, 0, count - 1) for value in values}


def _positive_integers(value: Any, count: int) -> Any:
    """A sequence of so many positive integers as a tuple, or None."""
    try:
        values = tuple(check_integer("size", size) for size in value)
    except (TypeError, ValueError):
        return None
    return values if len(values) == count else None


def check_pair(name: str, value: object) -> tuple[int, int]:
    """Returns `value`, a positive integer or a pair of them, as a pair."""
    values = _positive_integers((value, value), 2) or _positive_integers(value, 2)
    if values is None:
        expected = f"{name} to be a positive integer or a pair of them"
        raise unfit(expected, **{name: value})
    return values


def check_image_shape(image_shape: object) -> tuple[int, int, int]:
    """Returns `image_shape` as a tuple (height, width, channels)."""
    sizes = _positive_integers(image_shape, 3)
    if sizes is None:
        expected = "image_shape (height, width, channels) of positive integers"
        raise unfit(expected, image_shape=image_shape)
    return sizes


def head_size(num_heads: object, hidden_dim: int) -> int:
    """Returns the size of each attention head; `num_heads` must divide `hidden_dim`."""
    count = check_integer("num_heads", num_heads)
    if hidden_dim % count:
        expected = "num_heads to divide hidden_dim"
        raise unfit(expected, num_heads=num_heads, hidden_dim=hidden_dim)
    return hidden_dim // count


def check_positive(name: str, value: Any, optional: bool = False) -> Any:
    """Returns `value` as a finite float > 0; None passes if `optional`."""
    if optional and value is None:
        return None
    fits = _is_finite(value) and value > 0
    _expect(fits, f"{name} to be a finite number, {name} > 0", name, value)
    return float(value)


def check_number(name: str, value: Any) -> float:
    """Returns `value` as a float; it must be finite."""
    _expect(_is_finite(value), f"{name} to be a finite number", name, value)
    return float(value)


def check_not_negative(name: str, value: Any) -> float:
    """Returns `value`; it must be finite and at least 0."""
    fits = _is_finite(value) and value >= 0
    _expect(fits, f"{name} to be a finite number, {name} >= 0", name, value)
    return value


def check_dropout(name: str, rate: float) -> float:
    """Returns `rate`; it must be in [0, 1)."""
    _expect(_is_finite(rate) and 0 <= rate < 1, f"{name} in [0, 1)", name, rate)
    return rate


def check_share(name: str, value: float) -> float:
    """Returns `value`; it must be in [0, 1]."""
    _expect(_is_finite(value) and 0 <= value <= 1, f"{name} in [0, 1]", name, value)
    return value


def _is_finite(value: Any) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    return -float("inf") < value < float("inf")  # pyright: ignore[reportOperatorIssue]


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise unfit(f"{name} to be True or False", **{name: value})
    return value


def check_string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise unfit(f"{name} to be a string", **{name: value})
    return value


def check_one_of(name: str, value: T, allowed: Collection) -> T:
    if value not in allowed:
        raise unfit(f"{name} to be one of {tuple(allowed)}", **{name: value})
    return value


def check_class_labels(
    labels: object, num_classes: int, ignored: int | None = None
) -> None:
    """Validates the range of class labels given as a NumPy array."""
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iufb":
        return
    # NaN fails the comparison.
    fits = (labels >= 0) & (labels < num_classes)
    if labels.dtype.kind == "f":
        fits &= labels == np.floor(labels)
    if ignored is not None:
        fits |= labels == ignored
    if not fits.all():
        raise ValueError(
            f"Expected integer labels from 0 to num_classes - 1 = {num_classes - 1}"
            + ("" if ignored is None else f", or {ignored}")
            + f"; received: {labels[~fits].ravel()[0]}"
        )


def check_mask(name: str, mask: Any, *shapes: Sequence) -> "Tensor | None":
    """Returns `mask` as an array or tensor; it must have one of the shapes."""
    if mask is None:
        return None
    mask = mask if hasattr(mask, "dtype") else np.asarray(mask)
    _check_like(name, mask, shapes, ("bool", "int", "uint"), "boolean")
    return mask


def check_ids(name: str, ids: Any, shape: Sequence) -> None:
    """Validates that `ids` are integers of this shape."""
    if ids is not None:
        ids = ids if hasattr(ids, "dtype") else np.asarray(ids)
        _check_like(name, ids, [shape], ("int", "uint"), "integer")


def _check_like(name, value, shapes, kinds, expected):
    """Validates an array's dtype kind and shape."""
    dtype = keras.backend.standardize_dtype(value.dtype)
    fits = any(fits_shape(value.shape, shape) for shape in shapes)
    if not fits or not dtype.startswith(kinds):
        raise ValueError(
            f"Expected {name} to be {expected}, of shape "
            f"{' or '.join(str(tuple(shape)) for shape in shapes)}; received: "
            f"{name}.shape={tuple(value.shape)}, {name}.dtype={dtype}"
        )


def fits_shape(received: Sequence, expected: Sequence) -> bool:
    """Whether shapes are equal; unknown sizes match any other."""
    return len(received) == len(expected) and all(
        a == b or None in (a, b) for a, b in zip(received, expected)
    )


def check_path(name: str, path: T) -> T:
    """Returns `path`; rejects NUL, for which Python's error does not name the path."""
    _expect("\0" not in str(path), "a path without NUL", name, str(path))
    return path


def check_dtype(name: str, dtype: T) -> T:
    """Returns `dtype`; it must be a Keras dtype policy, its name or config, or None."""
    try:
        keras.dtype_policies.get(dtype)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        expected = f"{name} to be a dtype policy of Keras, such as 'mixed_bfloat16'"
        raise unfit(expected, **{name: dtype}) from error
    return dtype


def check_initializer(name: str, value: object) -> "keras.initializers.Initializer":
    """Returns an initializer given as object, name or config."""
    try:
        initializer: Any = keras.initializers.get(value)
    except (AttributeError, KeyError, TypeError, ValueError):
        initializer = None
    expected = f"{name} to be an initializer of Keras, or the name of one"
    _expect(initializer is not None, expected, name, value)
    return initializer


def check_affinity(
    affinity: "Tensor", gates: "Tensor", capacity: "Size | None", mask: "Tensor | None"
) -> None:
    """Validates the shapes of an allocation's arguments and a static capacity."""
    if len(affinity.shape) != 3 or tuple(gates.shape) != tuple(affinity.shape):
        raise ValueError(
            "Expected affinity and gates of one shape (groups, tokens, experts); "
            f"received: affinity.shape={tuple(affinity.shape)}, "
            f"gates.shape={tuple(gates.shape)}"
        )
    if isinstance(capacity, numbers.Real):
        check_integer("capacity", capacity)
    # TensorFlow may know one of the shapes less well while it traces.
    if mask is not None and not fits_shape(mask.shape, affinity.shape[:2]):
        expected = f"a mask of shape (groups, tokens)={tuple(affinity.shape[:2])}"
        raise unfit(expected, f"mask.shape={tuple(mask.shape)}")


def import_extra(module: str, message: str, extra: str | None = None) -> ModuleType:
    """Imports a module of an optional package, or says how to install its extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = f": {install(extra)}" if extra else ""
        raise ImportError(f"{message}{hint}") from error


def outer_stack_level() -> int:
    """The `stacklevel` of a warning for the first caller outside of this and Keras."""
    level, frame = 0, inspect.currentframe()
    inner = ("keras_moe", "keras", "keras_hub")
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in inner:
        level, frame = level + 1, frame.f_back
    return level


def argument_names(cls: type) -> list[str]:
    """Returns the names of a constructor's arguments, without inherited ones."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.name != "self"
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def argument_values(instance: object, base: type) -> "Config":
    """Returns attributes named like constructor arguments of classes below `base`."""
    values = {}
    for cls in itertools.takewhile(lambda cls: cls is not base, type(instance).__mro__):
        # An inherited constructor would add Keras's `dtype` without its policy.
        for name in argument_names(cls) if "__init__" in vars(cls) else ():
            if hasattr(instance, name):
                values[name] = getattr(instance, name)
    return values


def check_concrete(cls: type, base: type, example: str) -> None:
    """Raises ValueError for a base class, whose instances could not be loaded."""
    if cls is base:
        expected = f"a class that extends {base.__name__}, such as {example}"
        raise unfit(expected, f"{base.__name__} itself")


def check_argument_names(
    kwargs: dict, names: list[str], owner: str, also: Iterable[str] = ()
) -> None:
    """Raises ValueError, with suggestions, if a key of `kwargs` is not in `names`."""
    for name, value in kwargs.items():
        if name not in names:
            raise ValueError(
                f"Expected arguments of {owner}; received: {name}={value!r} "
                f"({nearest(name, sorted({*names, *also}))})"
            )


def nearest(name: str, names) -> str:
    """Returns a clause with the nearest names, or with all if they are few."""
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    if not close and len(names) > _FEW:
        close = difflib.get_close_matches(name, names, n=5, cutoff=0.0)
    return f"nearest: {', '.join(close)}" if close else f"known: {', '.join(names)}"
