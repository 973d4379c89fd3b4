"""Optimizers by name, all with groups of weights."""

from typing import Any

import keras

from keras_moe.checks import check_one_of
from keras_moe.training.adafactor import ViTGAdafactor
from keras_moe.training.parameter_groups import ParameterGroups


def _grouped(base: type) -> type:
    # On PyTorch Keras has classes of its own that update all weights together, and
    # gives an instance of one of these for a class of `keras.optimizers`.
    implementation = type(base.__new__(base))
    name = f"Grouped{base.__name__}"
    doc = f"`keras.optimizers.{base.__name__}` with `ParameterGroups`."
    body = {"__doc__": doc, "__module__": __name__}
    grouped = type(name, (ParameterGroups, implementation), body)
    return keras.saving.register_keras_serializable("keras_moe")(grouped)


# Not among these: Keras's Muon, which is two optimizers for two kinds of weights, and
# Nadam, which has a product of momenta that every group would move on.
OPTIMIZERS = {
    base.__name__.lower(): _grouped(base)
    for base in (
        keras.optimizers.Adadelta,
        keras.optimizers.Adafactor,
        keras.optimizers.Adagrad,
        keras.optimizers.Adam,
        keras.optimizers.Adamax,
        keras.optimizers.AdamW,
        keras.optimizers.Ftrl,
        keras.optimizers.Lamb,
        keras.optimizers.Lion,
        keras.optimizers.RMSprop,
        keras.optimizers.SGD,
    )
} | {"vitg_adafactor": ViTGAdafactor}


def optimizer_class(name: str) -> type:
    """Returns the class of an optimizer, with the arguments of `ParameterGroups`.

    Args:
        name: `"vitg_adafactor"` for `ViTGAdafactor`, or of an optimizer of Keras, such
            as `"adamw"`, whose weight decay is decoupled, as is all of Keras's.

    Returns:
        A class, which Keras can save and load.

    Raises:
        ValueError: if there is no such optimizer.

    Example:

    >>> from keras_moe.training import optimizer_class
    >>> optimizer = optimizer_class("adamw")(
    ...     1e-3, weight_decay=0.1, groups=[{"match": "rest", "weight_decay": 0.0}]
    ... )
    >>> isinstance(optimizer, keras.optimizers.AdamW)
    True
    """
    return OPTIMIZERS[check_one_of("optimizer", str(name).lower(), OPTIMIZERS)]


def make_optimizer(name: str, options: dict, **arguments: Any) -> Any:
    """An optimizer by name."""
    try:
        if twice := options.keys() & arguments.keys():
            raise ValueError(f"the recipe itself says {', '.join(sorted(twice))}")
        return optimizer_class(name)(**arguments, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "Expected the name of an optimizer and its further arguments; received: "
            f"name={name!r}, options={options!r} ({error})"
        ) from error
