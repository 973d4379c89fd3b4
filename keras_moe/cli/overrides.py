"""The overrides of `--set`, which must not be what a program sets itself."""

from collections.abc import Iterable, Mapping
from typing import Any

FIRST = "the first argument"


def model_overrides(
    pairs: Iterable[tuple[str, Any]], own: Mapping[str, str]
) -> dict[str, Any]:
    """The overrides of a model's arguments."""
    overrides = dict(pairs)
    for name, value in overrides.items():
        if name in own:
            raise ValueError(
                "Expected arguments of the model in --set; received: "
                f"{name}={value!r}, which {own[name]} sets"
            )
    return overrides
