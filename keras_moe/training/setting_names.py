"""Dotted names of a recipe's settings: where overrides go, and what was meant."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from keras_moe.checks import nearest
from keras_moe.training.data_config import DataConfig
from keras_moe.training.model_config import ModelConfig
from keras_moe.training.objectives import OBJECTIVES, Objective
from keras_moe.training.optimizer_config import OptimizerConfig
from keras_moe.training.schedule_config import ScheduleConfig
from keras_moe.training.section import Section, json_copy

SECTIONS = {
    "data": DataConfig,
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "objective": Objective,
}


def changes_by_section(
    current: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Overrides with those of a section together."""
    changes: dict[str, Any] = {}
    for name, value in overrides.items():
        top, *rest = name.split(".")
        if top not in current or (rest and top not in SECTIONS):
            raise ValueError(
                "Expected settings of a recipe; "
                f"received: {name}={value!r} ({nearest_setting(name, current)})"
            )
        if top not in SECTIONS:
            changes[top] = value
        elif not rest:
            changes.setdefault(top, {}).update(settings_of(top, value))
        else:
            section = changes.setdefault(top, {})
            before = section.get(rest[0], current[top].get(rest[0]))
            section[rest[0]] = _changed(before, name, rest[1:], value)
    return changes


def settings_of(section: str, value: Any) -> dict[str, Any]:
    """The settings of a section that is an object or a dict."""
    if isinstance(value, Section):
        return value.to_dict()
    if not isinstance(value, Mapping):
        example = next(iter(dotted_names(section).values()))
        raise ValueError(
            f"Expected {section} to be a dict of settings, such as {example}; "
            f"received: {section}={value!r}"
        )
    return dict(value)


def nearest_setting(name: str, top_level: Mapping[str, Any]) -> str:
    """A clause that names the settings that a name may have meant."""
    if "." in name:
        dotted = [x for section in SECTIONS for x in dotted_names(section).values()]
        return nearest(name, dotted)
    places = {name: name for name in top_level if name not in SECTIONS}
    for section in SECTIONS:
        places = {**dotted_names(section), **places}
    similar = difflib.get_close_matches(name, places, n=3, cutoff=0.5)
    close = list(dict.fromkeys(places[leaf] for leaf in similar))
    if name in places:
        close = [places[name]]
    if close:
        return f"nearest: {', '.join(close)}"
    return nearest(name, list(top_level))


def dotted_names(section: str) -> dict[str, str]:
    """The dotted name of each setting in a section, by the setting's own name."""
    cls = SECTIONS[section]
    classes = OBJECTIVES.values() if cls is Objective else [cls]
    names = (field.name for each in classes for field in dataclasses.fields(each))
    return {name: f"{section}.{name}" for name in names}


def _changed(value, name, path, new):
    """A setting in which what lies at a path is another."""
    if not path:
        return new
    if value is not None and not isinstance(value, dict):
        raise ValueError(
            f"Expected a dict of settings at {name.rpartition('.')[0]}; "
            f"received: {value!r}"
        )
    inside = json_copy(name, value or {})
    return {**inside, path[0]: _changed(inside.get(path[0]), name, path[1:], new)}
