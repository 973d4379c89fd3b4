"""What a layer costs: parameters, active parameters and FLOPs."""

import math
from collections.abc import Mapping
from typing import NamedTuple


class _Cost(NamedTuple):
    parameters: int
    active_parameters: int
    flops: int
    routed_flops: int


class Cost(_Cost):
    """What a layer costs for one image. Costs can be added.

    Args:
        parameters: number of trained parameters.
        active_parameters: number of parameters that a token uses, on average; by
            default all.
        flops: FLOPs of the forward pass's matmuls, 2 for each multiply-add.
        routed_flops: those of experts, for the tokens routed to them.

    Example:

    >>> from keras_moe.ops import Cost
    >>> Cost(parameters=10, active_parameters=5) + Cost(1, flops=8)
    Cost(parameters=11, active_parameters=6, flops=8, routed_flops=0)
    """

    __slots__ = ()

    def __new__(
        cls,
        parameters: int = 0,
        active_parameters: int | None = None,
        flops: int = 0,
        routed_flops: int = 0,
    ):
        if active_parameters is None:
            active_parameters = parameters
        return super().__new__(cls, parameters, active_parameters, flops, routed_flops)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(mine + theirs for mine, theirs in zip(self, other)))

    @classmethod
    def all_active(cls, weight_shapes: Mapping, flops: int = 0) -> "Cost":
        """The cost of a layer whose weights, named by path, all tokens use."""
        parameters = sum(map(math.prod, weight_shapes.values()))
        return cls(parameters, parameters, flops)

    @classmethod
    def of_dense(cls, inputs: int, units: int, use_bias: bool = True) -> "Cost":
        """The cost of a dense layer for one vector."""
        shapes = {"kernel": (inputs, units), "bias": (units if use_bias else 0,)}
        return cls.all_active(shapes, 2 * inputs * units)


def under(name: str, weight_shapes: Mapping) -> dict[str, tuple]:
    """The weights of a layer by their paths in the layer around it."""
    return {f"{name}/{path}": shape for path, shape in weight_shapes.items()}
