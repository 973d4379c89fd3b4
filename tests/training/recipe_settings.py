"""Recipes of tests, whose settings are short names: those of the flat recipes."""

from keras_moe.training import Recipe
from keras_moe.training.flat_recipes import PLACES


def short_recipe(**settings):
    """A recipe of `preset`, `batch_size` and the like, in any order."""
    sections = {"name": "mine", "data": {}, "model": {}, "schedule": {}}
    for name, value in settings.items():
        section, _, setting = PLACES.get(name, name).partition(".")
        if setting:
            sections.setdefault(section, {})[setting] = value
        elif name == "model_arguments":
            sections[section] |= value
        else:
            sections[section] = value
    return Recipe(**sections)


def changed(recipe, **settings):
    """A recipe with other settings by their short names."""
    return recipe.replace(**{PLACES.get(x, x): value for x, value in settings.items()})
