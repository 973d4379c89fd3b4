"""Recipes as JSON files: those that ship with the library, and those of others."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from keras_moe.checks import check_argument_names, nearest
from keras_moe.models.builtin import shipped_files
from keras_moe.training.recipes import Recipe


def list_recipes() -> dict[str, str]:
    """The recipes that ship with the library: their names, with a line about each.

    Returns:
        A dict from name to description.

    Example:

    >>> from keras_moe.training import list_recipes
    >>> "mumoe_digits" in list_recipes()
    True
    """
    return {
        name: _read(path)["description"]
        for name, path in shipped_files("recipes").items()
    }


def load_recipe(name_or_path: str | os.PathLike, **overrides: Any) -> Recipe:
    """Reads a recipe.

    Args:
        name_or_path: a name of `list_recipes`, or a JSON file of `Recipe.save`.
        **overrides: other settings, see `Recipe.replace`.

    Returns:
        The recipe.

    Raises:
        ValueError: if there is no such recipe, or a setting is unknown or out of range.

    Example:

    >>> from keras_moe.training import load_recipe
    >>> recipe = load_recipe(
    ...     "mumoe_digits", epochs=9, model_arguments={"num_layers": 2}
    ... )
    >>> recipe.epochs, recipe.model_arguments["num_layers"]
    (9, 2)
    """
    shipped = shipped_files("recipes")
    path = shipped.get(str(name_or_path), Path(name_or_path))
    if not path.is_file():
        raise ValueError(
            "Expected the name of a recipe or a JSON file; received: "
            f"{str(name_or_path)!r} ({nearest(str(name_or_path), list(shipped))})"
        )
    settings = _read(path)
    known = [field.name for field in dataclasses.fields(Recipe)]
    check_argument_names(settings, known, f"a recipe in {path}")
    try:
        recipe = Recipe(**{"name": path.stem, **settings})
    except TypeError as error:
        # Those that have no default.
        raise ValueError(
            f"Expected all settings of a recipe in {path}; received: {error}"
        ) from error
    return recipe.replace(**overrides)


def _read(path):
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"Expected JSON in {path}; received: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(
            f"Expected a dict of settings in {path}; received: {settings!r}"
        )
    return settings
