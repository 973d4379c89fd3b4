"""Recipes as files: TOML ones that ship with the library, and those of others."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from keras_moe.checks import nearest
from keras_moe.files import shipped_files
from keras_moe.training.recipes import Recipe

# TOML has no null.
_NONE = "none"


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
        for name, path in shipped_files("recipes", ".toml").items()
    }


def load_recipe(name_or_path: str | os.PathLike, **overrides: Any) -> Recipe:
    """Reads a recipe.

    A TOML file has the settings of each section under its heading, as `[schedule]`, and
    `"none"` for None, which TOML lacks. A JSON file has sections as objects.

    Args:
        name_or_path: a name of `list_recipes`, a TOML file, or a JSON file of
            `Recipe.save`.
        **overrides: other settings by dotted names or sections, see `Recipe.replace`.

    Returns:
        The recipe.

    Raises:
        ValueError: if there is no such recipe, or a setting is unknown or out of range.

    Example:

    >>> from keras_moe.training import load_recipe
    >>> recipe = load_recipe(
    ...     "mumoe_digits", **{"schedule.epochs": 9, "model.num_layers": 2}
    ... )
    >>> recipe.schedule.epochs, recipe.model.overrides["num_layers"]
    (9, 2)
    """
    shipped = shipped_files("recipes", ".toml")
    path = shipped.get(str(name_or_path), Path(name_or_path))
    if not path.is_file():
        raise ValueError(
            "Expected the name of a recipe or a TOML or JSON file; received: "
            f"{str(name_or_path)!r} ({nearest(str(name_or_path), list(shipped))})"
        )
    settings = _read(path)
    try:
        recipe = Recipe.from_dict({"name": path.stem, **settings})
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{error}, in {path}") from error
    return recipe.replace(**overrides)


def _read(path):
    kind = "TOML" if path.suffix == ".toml" else "JSON"
    try:
        text = path.read_text(encoding="utf-8")
        settings = (
            _with_none(tomllib.loads(text)) if kind == "TOML" else json.loads(text)
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Expected {kind} in {path}; received: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(
            f"Expected a dict of settings in {path}; received: {settings!r}"
        )
    return settings


def _with_none(value):
    if isinstance(value, dict):
        return {key: _with_none(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_none(item) for item in value]
    return None if value == _NONE else value
