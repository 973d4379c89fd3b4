"""Recipes of earlier versions, whose settings were not in sections."""

from collections.abc import Mapping
from typing import Any

from keras_moe.checks import check_argument_names, check_bool
from keras_moe.models import registry

# Where each flat setting is now.
PLACES = {
    "preset": "model.preset",
    "dtype": "model.dtype",
    "model_arguments": "model",
    "data": "data.source",
    "train_split": "data.train_split",
    "test_split": "data.test_split",
    "batch_size": "data.batch_size",
    "augment": "data.augment",
    "exclude": "data.exclude",
    "unreadable": "data.unreadable",
    "multi_label": "objective.name",
    "hierarchy": "objective.hierarchy",
    "max_labels": "objective.max_labels",
    "learning_rate": "schedule.learning_rate",
    "epochs": "schedule.epochs",
    "steps": "schedule.steps",
    "warmup_steps": "schedule.warmup_steps",
    "decay": "schedule.decay",
    "timescale": "schedule.timescale",
    "cooldown_steps": "schedule.cooldown_steps",
    "final_learning_rate": "schedule.final_learning_rate",
    "schedule_steps": "schedule.schedule_steps",
    "monitor": "schedule.monitor",
    "monitor_mode": "schedule.monitor_mode",
    "patience": "schedule.patience",
    "best": "schedule.best",
    "optimizer": "optimizer.name",
    "optimizer_options": "optimizer.options",
    "weight_decay": "optimizer.weight_decay",
    "weight_decay_times": "optimizer.weight_decay_times",
    "groups": "optimizer.groups",
    "gradient_clipping": "optimizer.gradient_clipping",
    "gradient_accumulation_steps": "optimizer.gradient_accumulation_steps",
    "ema_momentum": "optimizer.ema_momentum",
    "name": "name",
    "seed": "seed",
    "description": "description",
    "source": "reference",
    "notes": "notes",
}


def is_flat(settings: Mapping[str, Any]) -> bool:
    """Whether settings are those of a recipe of an earlier version.

    Args:
        settings: a dict from name to value.
    """
    return isinstance(settings.get("preset"), str)


def in_sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a flat recipe by section, as `Recipe` takes them.

    Args:
        settings: settings of an earlier version.

    Raises:
        ValueError: if a setting is unknown or of another kind, or belongs to several
            labels and `multi_label` is not set.

    Example:

    >>> from keras_moe.training.flat_recipes import in_sections
    >>> in_sections({"preset": "vmoe_b16", "epochs": 7, "data": "digits"})
    {'model': {'preset': 'vmoe_b16'}, 'schedule': {'epochs': 7}, \
'data': {'source': 'digits'}}
    """
    check_argument_names(settings, list(PLACES), "a recipe of an earlier version")
    settings = dict(settings)
    multi_label = check_bool("multi_label", settings.pop("multi_label", False))
    overrides = settings.get("model_arguments", {})
    if not isinstance(overrides, Mapping):
        raise ValueError(
            "Expected model_arguments to be a dict; "
            f"received: model_arguments={overrides!r}"
        )
    for name in ("hierarchy", "max_labels"):
        if settings.get(name) is None:
            settings.pop(name, None)
        elif not multi_label:
            raise ValueError(
                f"Expected multi_label=True with {name}; "
                f"received: {name}={settings[name]!r}"
            )
    sections: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, setting = PLACES[name].partition(".")
        if setting:
            sections.setdefault(section, {})[setting] = value
        elif name == "model_arguments":
            sections.setdefault(section, {}).update(value)
        else:
            sections[section] = value
    if registry.has_weights(settings.get("preset")):
        # Presets of that name had none then.
        sections["model"].setdefault("load_weights", False)
    if multi_label:
        sections.setdefault("objective", {})["name"] = "multi_label"
    return sections
