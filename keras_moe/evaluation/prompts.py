"""Names of classes and templates of prompts: ours, published ones, or from a file."""

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

from keras_moe.templates import PLACE, Template, fill, read_lines
from keras_moe.templates import read_templates as check_templates

TEMPLATES = {
    "name": (PLACE,),
    "ours": (
        "a photo of a {}.",
        "a picture of the {}.",
        "a drawing of a {}.",
        "a small image of a {}.",
        "a {} on a plain background.",
        "{}",
    ),
}
# Sets that an installed open_clip brings along.
PUBLISHED = {
    "imagenet": "OPENAI_IMAGENET_TEMPLATES",
    "simple": "SIMPLE_IMAGENET_TEMPLATES",
}
PUBLISHED_NAMES = {"imagenet": "IMAGENET_CLASSNAMES"}


def read_templates(templates: str | os.PathLike | Sequence[Template]) -> tuple:
    """Templates from a set's name, a file, or themselves; checked.

    Args:
        templates: `"ours"`, a handful for photos and drawings; `"name"`, the bare name;
            `"imagenet"`, CLIP's 80, or `"simple"`, 7 of them, from an installed
            open_clip; one text with a `{}`; a file, JSON with a list of texts or one
            text a line; or a sequence of texts, each with one `{}`, and of functions
            from a name to a text.

    Returns:
        A tuple of texts and functions.

    Raises:
        ValueError: if there are none, or one has no place for the name, or several.
        OSError: if a file cannot be read.
        ImportError: if open_clip is needed and not installed.

    Example:

    >>> from keras_moe.evaluation import read_templates
    >>> read_templates("a sketch of a {}")
    ('a sketch of a {}',)
    """
    if isinstance(templates, str) and templates in TEMPLATES:
        return TEMPLATES[templates]
    if isinstance(templates, str) and templates in PUBLISHED:
        return _published(PUBLISHED[templates])
    return check_templates(templates, (*TEMPLATES, *PUBLISHED))


def read_class_names(class_names: str | os.PathLike | Sequence[str]) -> tuple[str, ...]:
    """Names of classes, in the order of the labels, from a file or themselves.

    Args:
        class_names: a file, JSON with a list of names or one name a line; a sequence of
            names; or `"imagenet"`, OpenAI's names of the 1,000 classes from an
            installed open_clip, two of which are there twice as published.

    Raises:
        ValueError: if there are none, one is empty or no string, or one is there twice.
        OSError: if a file cannot be read.
        ImportError: if open_clip is needed and not installed.

    Example:

    >>> from keras_moe.evaluation import read_class_names
    >>> read_class_names(["zero", "one"])
    ('zero', 'one')
    """
    if isinstance(class_names, str) and class_names in PUBLISHED_NAMES:
        return _published(PUBLISHED_NAMES[class_names])
    if isinstance(class_names, (str, os.PathLike)):
        class_names = read_lines(class_names, "class names", PUBLISHED_NAMES)
    is_ordered = isinstance(class_names, Iterable)
    if not is_ordered or isinstance(class_names, (bytes, Mapping, Set)):
        raise ValueError(
            "Expected a file of names of classes, or a sequence of names; received: "
            f"{class_names!r:.100}"
        )
    names = tuple(class_names)
    bad = [name for name in names if not isinstance(name, str) or not name.strip()]
    if bad or not names:
        raise ValueError(
            "Expected names of classes, not empty; received: "
            f"{bad[0] if bad else list(names)!r}"
        )
    places = {}
    for place, name in enumerate(names):
        if places.setdefault(name, place) != place:
            raise ValueError(
                f"Expected each name of a class once; received: {name!r} for classes "
                f"{places[name]} and {place}"
            )
    return names


def prompts(class_names: Sequence[str], templates: Sequence[Template]) -> list[str]:
    """The texts of all classes: those of the first, by each template, come first.

    Args:
        class_names: C names.
        templates: T templates, or anything that `read_templates` takes.

    Returns:
        C * T texts.

    Raises:
        ValueError: if `class_names` is one string, or a template has no place for the
            name.

    Example:

    >>> from keras_moe.evaluation import prompts
    >>> prompts(["cat", "dog"], ["a {}", lambda name: f"two {name}s"])
    ['a cat', 'two cats', 'a dog', 'two dogs']
    """
    if isinstance(class_names, str):
        raise ValueError(
            "Expected a sequence of names of classes; received: "
            f"class_names={class_names!r}"
        )
    templates = read_templates(templates)
    return [fill(template, name) for name in class_names for template in templates]


def _published(name: str) -> tuple:
    """A constant of open_clip, without what its package imports."""
    package = importlib.util.find_spec("open_clip")
    if package is None:
        raise ImportError(
            f"{name} are those of open_clip, which is not installed: "
            "pip install open_clip_torch"
        )
    path = Path(package.submodule_search_locations[0]) / "zero_shot_metadata.py"
    spec = importlib.util.spec_from_file_location("_open_clip_metadata", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return tuple(getattr(module, name))
