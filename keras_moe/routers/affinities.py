"""Affinities: the matrices by which tokens are allocated to experts.

Axes: G groups, S group_size, E experts.
"""

import keras

from keras_moe import _checks
from keras_moe._types import Config, Tensor
from keras_moe.ops.sparse_transport import SOLVERS, sparse_transport
from keras_moe.ops.transport import sinkhorn


class Affinity:
    """Base class of affinities, which map router logits to the allocated matrix.

    Subclasses implement `__call__` and keep arguments as attributes of their names.

    Example:

    >>> from keras_moe.routers import Affinity, TokenChoiceRouter
    >>> class Squared(Affinity):
    ...     def __call__(self, logits, gates, side, max_nonzeros, mask=None):
    ...         return gates**2
    >>> TokenChoiceRouter(num_experts=4, affinity=Squared()).noise_std
    0.0
    """

    def __new__(cls, *args, **kwargs):
        _checks.check_concrete(cls, Affinity, "SoftmaxAffinity")
        return super().__new__(cls)

    # Default std of the training noise, times E. Equations 7 to 9 of *Routers in Vision
    # Mixture of Experts* have no noise.
    default_noise_std = 0.0

    def __call__(
        self,
        logits: Tensor,
        gates: Tensor,
        side: str,
        max_nonzeros: int | Tensor | None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the affinity, float32 (G, S, E)."""
        raise NotImplementedError

    def noisy_combine(self, side: str) -> bool:
        """Whether combine weights are the softmax of the noisy logits."""
        return side == "expert"

    def get_config(self) -> dict:
        return _checks.argument_values(self, Affinity)

    @classmethod
    def from_config(cls, config: dict) -> "Affinity":
        return cls(**config)


@keras.saving.register_keras_serializable("keras_moe")
class SoftmaxAffinity(Affinity):
    """The gates themselves: equation 6 of *Routers in Vision Mixture of Experts*.

    Example:

    >>> from keras_moe.routers import SoftmaxAffinity, TokenChoiceRouter
    >>> router = TokenChoiceRouter(num_experts=4, affinity=SoftmaxAffinity())
    """

    # As in V-MoE: noise of 1 / E.
    default_noise_std = 1.0

    def __call__(self, logits, gates, side, max_nonzeros, mask=None):
        return gates

    def noisy_combine(self, side):
        return True


@keras.saving.register_keras_serializable("keras_moe")
class SinkhornAffinity(Affinity):
    """The entropy-regularised transport plan: equation 8 of the same paper.

    Args:
        iterations: number of iterations.

    Example:

    >>> from keras_moe.routers import ExpertChoiceRouter, SinkhornAffinity
    >>> affinity = SinkhornAffinity(iterations=100)
    >>> router = ExpertChoiceRouter(num_experts=4, affinity=affinity)
    """

    def __init__(self, iterations: int = 20):
        self.iterations = _checks.check_integer("iterations", iterations)

    def __call__(self, logits, gates, side, max_nonzeros, mask=None):
        return sinkhorn(logits, self.iterations, mask).plan


@keras.saving.register_keras_serializable("keras_moe")
class SparsityConstrainedAffinity(Affinity):
    """The sparsity-constrained transport plan: equation 9 of the same paper.

    Args:
        sparse: whether the capacity or K limits the nonzeros of an expert or token.
        solver: see `keras_moe.ops.sparse_transport`.
        iterations: steps of the solver; None for its default.
        learning_rate: learning rate of `solver="adam"`.

    Example:

    >>> from keras_moe.routers import ExpertChoiceRouter, SparsityConstrainedAffinity
    >>> affinity = SparsityConstrainedAffinity(solver="adam", iterations=50)
    >>> router = ExpertChoiceRouter(num_experts=4, affinity=affinity)
    """

    def __init__(
        self,
        sparse: bool = True,
        solver: str = SOLVERS[0],
        iterations: int | None = None,
        learning_rate: float = 0.01,
    ):
        self.sparse = _checks.check_bool("sparse", sparse)
        self.solver = _checks.check_one_of("solver", solver, SOLVERS)
        self.iterations = _checks.check_integer("iterations", iterations, optional=True)
        self.learning_rate = _checks.check_positive("learning_rate", learning_rate)

    def __call__(self, logits, gates, side, max_nonzeros, mask=None):
        return sparse_transport(
            gates,
            side=side,
            max_nonzeros=max_nonzeros if self.sparse else None,
            solver=self.solver,
            iterations=self.iterations,
            learning_rate=self.learning_rate,
            mask=mask,
        ).plan


BY_NAME = {
    "softmax": SoftmaxAffinity,
    "sinkhorn": SinkhornAffinity,
    "sparsity_constrained": SparsityConstrainedAffinity,
}


def get(identifier: Affinity | str | Config) -> Affinity:
    """Makes an `Affinity` from a name, a serialised config or an `Affinity`."""
    if isinstance(identifier, str) and identifier in BY_NAME:
        return BY_NAME[identifier]()
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if not isinstance(identifier, Affinity):
        expected = f"affinity to be one of {sorted(BY_NAME)} or an Affinity"
        raise _checks.unfit(expected, affinity=identifier)
    return identifier
