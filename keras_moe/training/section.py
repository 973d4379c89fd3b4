"""A section of a recipe: settings that a file has under one heading."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from keras_moe.checks import check_argument_names


class Section:
    """Base class of a recipe's sections: frozen dataclasses whose values are JSON.

    A subclass checks its settings in `__post_init__`, and calls this class's there.
    """

    title: ClassVar[str] = "settings"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for kind, article in ((str, "a string"), (dict, "a dict")):
                if field.type is kind and not isinstance(value, kind):
                    raise ValueError(
                        f"Expected {field.name} to be {article}; "
                        f"received: {field.name}={value!r}"
                    )
            # A copy that nobody else has, as it comes out of a file.
            object.__setattr__(self, field.name, json_copy(field.name, value))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "Section":
        """A section from the settings of a file.

        Args:
            settings: a dict from name to value.

        Raises:
            ValueError: if a setting is unknown, missing or out of range.
        """
        fields = dataclasses.fields(cls)
        owner = f"the section {cls.title!r} of a recipe"
        check_argument_names(settings, [field.name for field in fields], owner)
        missing = [
            field.name
            for field in fields
            if field.name not in settings
            and field.default is field.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(
                f"Expected {', '.join(map(repr, missing))} in {owner}; "
                f"received: {dict(settings)}"
            )
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """All settings, JSON-serialisable, as `from_settings` takes them."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> "Section":
        """A section with other settings.

        Args:
            **changes: any setting.

        Raises:
            ValueError: if a setting is unknown or out of range.
        """
        return type(self).from_settings({**self.to_dict(), **changes})


def json_copy(name: str, value: Any) -> Any:
    """A copy of a value as JSON gives it back."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Expected {name} to be JSON; received: {name}={value!r}"
        ) from error
