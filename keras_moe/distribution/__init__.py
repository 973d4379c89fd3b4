"""Models on many devices: meshes and layout maps for `keras.distribution`."""

from keras_moe.distribution.auto import auto, gathered
from keras_moe.distribution.chips import CHIPS, Chip
from keras_moe.distribution.compiled import CompiledCosts, compiled_costs
from keras_moe.distribution.costs import Costs, costs
from keras_moe.distribution.layouts import Layouts, layouts

__all__ = [
    "CHIPS", "Chip", "CompiledCosts", "Costs", "Layouts", "auto", "compiled_costs",
    "costs", "gathered", "layouts",
]  # fmt: skip
__dir__ = __all__.copy
