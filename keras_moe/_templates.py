"""Prompt templates: strings with one `{}` for the class name, or functions of it."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from keras_moe._files import read_text

Template = str | Callable[[str], str]

PLACE = "{}"
# Unlikely in any template.
_PROBE = "\N{BLACK STAR}\N{WHITE STAR}"


def read_templates(
    templates: str | os.PathLike | Iterable[Template], sets: Sequence[str] = ()
) -> tuple[Template, ...]:
    """Returns checked templates from a string with `{}`, a sequence of strings and
    functions, or a file (a JSON list, or one template per line). `sets` are further
    valid names, for error messages.
    """
    if isinstance(templates, str) and PLACE in templates:
        templates = (templates,)
    elif isinstance(templates, (str, os.PathLike)):
        templates = read_lines(
            templates, f"templates with a place {PLACE} for the name", sets
        )
    checked = tuple(templates)
    bad = [
        template
        for template in checked
        if not isinstance(template, (str, Callable))
        or _PROBE not in fill(template, _PROBE)
    ]
    if bad or not checked:
        expected = f"templates with a place {PLACE} for the name"
        raise ValueError(f"Expected {expected}; received: {templates!r}")
    return checked


def fill(template: Template, name: str) -> str:
    """Returns the text of a template for a name."""
    if callable(template):
        return template(name)
    # Not `format`, because names and templates may contain other braces.
    return template.replace(PLACE, name)


def read_lines(
    path: str | os.PathLike, what: str, sets: Sequence[str] = ()
) -> list[str]:
    """Returns the texts of a file: its lines, or a JSON list."""
    path = Path(path).expanduser()
    if not path.is_file():
        known = f", or one of {sorted(sets)}" if sets else ""
        expected = f"{what}, or their file{known}"
        raise ValueError(f"Expected {expected}; received: {os.fspath(path)!r}")
    try:
        # Editors may write a byte order mark.
        text = read_text(path, encoding="utf-8-sig")
        if path.suffix == ".json":
            lines = json.loads(text)
            if not isinstance(lines, list):
                raise ValueError(f"{lines!r:.80}")
            return lines
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"Expected {what} in UTF-8, a JSON list or one a line, in {path}; "
            f"received: {error}"
        ) from error
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line]
