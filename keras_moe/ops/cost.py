"""The cost of a layer on paper: parameters, active parameters and FLOPs."""

import math
from collections.abc import Mapping
from typing import NamedTuple


class Cost(NamedTuple):
    """The cost of a layer for one image; the costs of several layers add up.

    Attributes:
        parameters: all trained parameters.
        active_parameters: the parameters that one token meets, on average.
        flops: forward floating-point operations of the matmuls, 2 per multiply-add.

    Example:

    >>> from keras_moe.ops import Cost
    >>> Cost(parameters=10, active_parameters=5) + Cost(1, 1, 8)
    Cost(parameters=11, active_parameters=6, flops=8)
    """

    parameters: int = 0
    active_parameters: int = 0
    flops: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(mine + theirs for mine, theirs in zip(self, other)))

    @classmethod
    def all_active(cls, weight_shapes: Mapping, flops: int = 0) -> "Cost":
        """The cost of a layer whose weights meet every token.

        Args:
            weight_shapes: the shape of each trained weight, by path.
            flops: floating-point operations.

        Returns:
            A `Cost`.
        """
        parameters = sum(map(math.prod, weight_shapes.values()))
        return cls(parameters, parameters, flops)

    @classmethod
    def of_dense(cls, inputs: int, units: int, use_bias: bool = True) -> "Cost":
        """The cost of a dense layer for one vector.

        Args:
            inputs: size of the vector.
            units: size of the result.
            use_bias: whether the layer has a bias.

        Returns:
            A `Cost`.
        """
        shapes = {"kernel": (inputs, units), "bias": (units if use_bias else 0,)}
        return cls.all_active(shapes, 2 * inputs * units)


def under(name: str, weight_shapes: Mapping) -> dict[str, tuple]:
    """The weights of a layer by their paths in the layer around it."""
    return {f"{name}/{path}": shape for path, shape in weight_shapes.items()}
