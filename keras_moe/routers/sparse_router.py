"""The base class of token and expert choice: logits, affinity and combine weights.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden, M
modalities.
"""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_moe import _checks
from keras_moe._types import Config, Initializer, Size, Tensor
from keras_moe.ops._initializers import PerExpert
from keras_moe.ops.capacity import ROUNDINGS, expert_capacity
from keras_moe.ops.plans import Routing
from keras_moe.routers import affinities
from keras_moe.routers.router import Router

COMBINES = ("softmax", "affinity")
EVALUATIONS = ("batch_invariant", "official")


class SparseRouter(Router):
    """Base class of routers that send whole tokens to experts.

    Tokens are projected to logits; in training, noise with standard deviation
    `noise_std / num_experts` is added. The affinity, a function of the noisy logits,
    fills the dispatch. The softmax of the logits fills the combine, so that no gradient
    flows through a transport solver. Subclasses implement `allocate` and
    `max_nonzeros`, and may override `logits`.

    Args:
        num_experts: number E of experts.
        num_selected_experts: K in the capacity.
        affinity: `"softmax"`, `"sinkhorn"` or `"sparsity_constrained"`, or an
            `Affinity` such as `SinkhornAffinity(iterations=50)`.
        combine: `"softmax"` of the logits, or `"affinity"` itself (section 3.4).
        normalize_gates: normalisation of the combine weights; see the subclass.
        capacity_factor: c in C = S K c / E; None for the class's default.
        capacity: C itself in tokens, instead of `capacity_factor`.
        evaluation: `"batch_invariant"` makes each example a group at inference;
            `"official"` uses training's groups and capacity, as the papers do. None is
            `"batch_invariant"`, or `"official"` if a capacity at inference is given.
        eval_capacity_factor: c at inference; None leaves it to `evaluation`.
        eval_capacity: C at inference, instead of `eval_capacity_factor`.
        capacity_rounding: `"ceil"` or `"round"`, at least to 1.
        capacity_multiple_of: round the capacity up to a multiple of this, unless each
            example is a group; 4 in the released V-MoEs. None for no rounding.
        noise_std: std of the training noise, times `num_experts`. None is 1.0 for
            softmax, as in V-MoE, and 0.0 for transport plans.
        noisy_combine: whether combine weights use noisy logits. None is False for token
            choice by a transport plan and True otherwise, as in the released code.
        kernel_initializer: initializer of the kernel (D, E), or (M, D, E).
        num_modalities: M, for a kernel per modality (needs `modality_ids`), or None.
        expert_pools: disjoint lists of each modality's experts; None to share them all.
        seed: seed of the noise.
        **kwargs: arguments of `keras.layers.Layer`; `dtype` is always float32.

    Reference: *Routers in Vision Mixture of Experts*, sections 2.1 to 2.5; *LIMoE*,
    appendix E.3, for `num_modalities` and `expert_pools`.

    Example:

    >>> from keras_moe.routers import TokenChoiceRouter
    >>> TokenChoiceRouter(num_experts=8, affinity="sinkhorn").noise_std
    0.0
    """

    # The side that chooses: "token" or "expert".
    side = "token"
    normalizations = (None,)

    def __init__(
        self,
        num_experts: int,
        num_selected_experts: int = 1,
        affinity: affinities.Affinity | str | Config = "softmax",
        combine: str = "softmax",
        normalize_gates: str | None = None,
        capacity_factor: float | None = None,
        capacity: int | None = None,
        evaluation: str | None = None,
        eval_capacity_factor: float | None = None,
        eval_capacity: int | None = None,
        capacity_rounding: str = "ceil",
        capacity_multiple_of: int | None = None,
        noise_std: float | None = None,
        noisy_combine: bool | None = None,
        kernel_initializer: Initializer = "lecun_normal",
        num_modalities: int | None = None,
        expert_pools: Sequence[Sequence[int]] | None = None,
        seed: int | None = None,
        **kwargs,
    ):
        affinity = affinities.get(affinity)
        if noise_std is None:
            noise_std = affinity.default_noise_std
        _checks.check_concrete(type(self), SparseRouter, "TokenChoiceRouter")
        super().__init__(num_experts, noise_std=noise_std, seed=seed, **kwargs)
        self.affinity = affinity
        self.combine = _checks.check_one_of("combine", combine, COMBINES)
        if noisy_combine is None:
            noisy_combine = combine == "affinity" or affinity.noisy_combine(self.side)
        self.noisy_combine = _checks.check_bool("noisy_combine", noisy_combine)
        if combine == "affinity":
            # The plan that routes also weighs the outputs.
            _checks.check_one_of("noisy_combine", noisy_combine, (True,))
        self.normalize_gates = _checks.check_one_of(
            "normalize_gates", normalize_gates, self.normalizations
        )
        # Private, because a public `num_selected_experts` marks token choice.
        self._selected = _checks.check_integer(
            "num_selected_experts", num_selected_experts
        )
        _check_capacity("", capacity_factor, capacity)
        if capacity is None and capacity_factor is None:
            capacity_factor = self.default_capacity_factor
        self.capacity_factor = capacity_factor
        self.capacity = capacity
        self._set_evaluation(evaluation, eval_capacity_factor, eval_capacity)
        self.capacity_rounding = _checks.check_one_of(
            "capacity_rounding", capacity_rounding, sorted(ROUNDINGS)
        )
        self.capacity_multiple_of = _checks.check_integer(
            "capacity_multiple_of", capacity_multiple_of, optional=True
        )
        self.kernel_initializer = _checks.check_initializer(
            "kernel_initializer", kernel_initializer
        )
        self.num_modalities = _checks.check_integer(
            "num_modalities", num_modalities, optional=True
        )
        self.expert_pools = _check_pools(expert_pools, num_modalities, num_experts)

    def _set_evaluation(self, evaluation, factor, capacity):
        _check_capacity("eval_", factor, capacity)
        if evaluation is not None:
            _checks.check_one_of("evaluation", evaluation, EVALUATIONS)
        elif factor is None and capacity is None:
            evaluation = "batch_invariant"
        else:
            evaluation = "official"
            warnings.warn(
                f"eval_capacity_factor={factor}, eval_capacity={capacity} make the "
                "result of an example depend on the other examples of its group at "
                "inference. Set evaluation='official' to have that, or "
                "evaluation='batch_invariant' to limit the capacity within each "
                "example.",
                stacklevel=5,
            )
        self.evaluation = evaluation
        self.eval_capacity_factor = factor
        self.eval_capacity = capacity

    def build(self, input_shape):
        initializer = self.kernel_initializer
        if self.num_modalities:
            # One draw per modality, with a fan-in of D rather than M x D.
            initializer = PerExpert(initializer)
        shape = self.weight_shapes(input_shape[-2:])["kernel"]
        self.kernel = self.add_kernel("kernel", shape, initializer)

    def call(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        modality_ids: Tensor | None = None,
        training: bool | None = None,
    ) -> tuple[Any, Routing]:
        known = self.known_tokens(modality_ids)
        logits, allowed = self.logits(tokens, modality_ids), None
        if self.pools is not None:
            allowed = self._allowed_experts(modality_ids, known)
            logits = ops.where(allowed, logits, -float("inf"))
        mask = both_masks(mask, known)
        return self.route(logits, allowed, mask, training, modality_ids)

    @property
    def pools(self) -> Sequence[Sequence[int]] | None:
        """The experts that each modality may use; None if they share all."""
        return self.expert_pools

    @property
    def modality_count(self) -> int | None:
        """M if the router distinguishes modalities and needs `modality_ids`."""
        if self.num_modalities is None and self.pools is not None:
            return len(self.pools)
        return self.num_modalities

    def known_tokens(self, modality_ids: Tensor | None) -> Tensor | None:
        """Mask (G, S) of tokens with known modalities; None if all count."""
        if self.modality_count is None:
            return None
        if modality_ids is None:
            expected = "modality_ids (groups, tokens) for a router with modalities"
            raise _checks.unfit(expected, modality_ids=None)
        modality_ids = ops.cast(modality_ids, "int32")
        return ops.logical_and(modality_ids >= 0, modality_ids < self.modality_count)

    def logits(self, tokens: Tensor, modality_ids: Tensor | None = None) -> Tensor:
        """Returns float32 logits (G, S, E) of tokens; override it for other logits.

        Args:
            tokens: float32, (G, S, D).
            modality_ids: integers (G, S), or None.
        """
        if self.num_modalities is None:
            return ops.matmul(tokens, self.kernel)
        logits: Any = 0.0
        for modality in range(self.num_modalities):
            own = ops.matmul(tokens, self.kernel[modality])
            is_own = ops.expand_dims(ops.equal(modality_ids, modality), -1)
            logits = logits + ops.where(is_own, own, 0.0)
        return logits

    def _allowed_experts(self, modality_ids, known):
        """Mask (G, S, E) of the experts that each token may use."""
        allowed = ops.expand_dims(ops.logical_not(known), -1)
        for modality, pool in enumerate(self.pools or ()):
            in_pool = [expert in pool for expert in range(self.num_experts)]
            is_own = ops.expand_dims(ops.equal(modality_ids, modality), -1)
            own = ops.logical_and(is_own, ops.convert_to_tensor(in_pool, "bool"))
            allowed = ops.logical_or(allowed, own)
        return allowed

    def route(
        self,
        logits: Tensor,
        allowed: Tensor | None,
        mask: Tensor | None,
        training: bool | None,
        modality_ids: Tensor | None = None,
    ) -> tuple[Any, Routing]:
        """Plan and record for logits (G, S, E) and each token's `allowed` experts."""
        clean_logits = self.scale_logits(logits)
        noisy_logits = self.add_noise(clean_logits, self.noise_deviation, training)
        has_noise = noisy_logits is not clean_logits
        if allowed is not None:
            # `logits` stay whole for the next layer's gating residual.
            clean_logits = ops.where(allowed, clean_logits, -float("inf"))
            noisy_logits = ops.where(allowed, noisy_logits, -float("inf"))
        gates = self.gates_of(noisy_logits)
        combine_gates = gates
        if has_noise and not self.noisy_combine:
            combine_gates = self.gates_of(clean_logits)
        differentiable = self.combine == "affinity"
        affinity = self.affinity(
            noisy_logits if differentiable else ops.stop_gradient(noisy_logits),
            gates if differentiable else ops.stop_gradient(gates),
            side=self.side,
            max_nonzeros=self.max_nonzeros(ops.shape(gates)[1], training),
            mask=mask,
        )
        allocating = affinity
        if allowed is not None:
            # Experts outside the pool must rank below those in it whose softmax
            # underflows to 0.
            allocating = ops.where(allowed, affinity, -float("inf"))
        plan = self.allocate(
            allocating,
            affinity if differentiable else combine_gates,
            mask=mask,
            training=training,
            modality_ids=modality_ids,
        )
        return plan, Routing(logits, noisy_logits, affinity, gates, *plan.assignments())

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Hook that changes logits before routing; `Routing.logits` is unscaled."""
        return logits

    def gates_of(self, logits: Tensor) -> Tensor:
        """The gates (G, S, E) of logits: their softmax, or a subclass's function."""
        return ops.softmax(logits, axis=-1)

    def allocate(
        self,
        affinity: Tensor,
        gates: Tensor,
        mask: Tensor | None = None,
        training: bool | None = None,
        modality_ids: Tensor | None = None,
    ) -> Any:
        """The plan for an affinity and combine weights, both (G, S, E).

        Override it to change who is sent where, whatever the logits are.
        """
        raise NotImplementedError

    def max_nonzeros(
        self, num_tokens: int | Tensor, training: bool | None
    ) -> int | Tensor | None:
        """Largest number of assignments per token or expert, for sparse plans."""
        raise NotImplementedError

    def groups_per_example(self, training: bool | None) -> bool:
        return not training and self.evaluation == "batch_invariant"

    def limits(self, training: bool | None) -> tuple[float | None, int | None]:
        """`(capacity_factor, capacity)`; (None, None) means unlimited."""
        own = (self.eval_capacity_factor, self.eval_capacity)
        if training or (own == (None, None) and self.evaluation == "official"):
            return self.capacity_factor, self.capacity
        return own

    def group_capacity(
        self, num_tokens: int | Tensor, training: bool | None
    ) -> Size | None:
        """The capacity C for groups of `num_tokens`; None if unlimited."""
        factor, capacity = self.limits(training)
        if factor is None:
            return capacity
        return self.capacity_of(
            num_tokens, factor, self._selected, self.multiple_of(training)
        )

    def multiple_of(self, training: bool | None) -> int | None:
        """The number to a multiple of which capacities are rounded up, or None."""
        # Not within single examples, whose few slots rounding up could double.
        by_example = self.groups_per_example(training)
        return None if by_example else self.capacity_multiple_of

    def capacity_of(
        self,
        num_tokens: int | Tensor,
        factor: float,
        selected: int,
        multiple_of: int | None,
    ) -> int | Tensor:
        """The capacity C = `num_tokens` K c / E of a group, rounded."""
        return expert_capacity(
            num_tokens,
            self.num_experts,
            factor,
            num_selected_experts=selected,
            rounding=self.capacity_rounding,
            multiple_of=multiple_of,
        )

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        kernel = (shape[-1], self.num_experts)
        if self.num_modalities:
            kernel = (self.num_modalities, *kernel)
        return {"kernel": kernel}

    def get_config(self):
        return {**super().get_config(), "num_selected_experts": self._selected}


def both_masks(mask: Tensor | None, known: Tensor | None) -> Tensor | None:
    """Combines two masks (G, S), either of which may be None."""
    if mask is None or known is None:
        return known if mask is None else mask
    return ops.logical_and(mask, known)


def is_sequence(value: object) -> bool:
    return not isinstance(value, (str, dict)) and hasattr(value, "__iter__")


def _check_capacity(prefix, factor, capacity):
    _checks.check_positive(f"{prefix}capacity_factor", factor, optional=True)
    _checks.check_integer(f"{prefix}capacity", capacity, optional=True)
    if factor is not None and capacity is not None:
        received = {f"{prefix}capacity": capacity, f"{prefix}capacity_factor": factor}
        raise _checks.unfit(f"{' or '.join(received)}, not both", **received)


def _check_pools(expert_pools, num_modalities, num_experts):
    """Returns the experts of each modality as sorted lists."""
    if expert_pools is None:
        return None
    pools = [
        sorted(_checks.check_indices("expert_pools", pool, num_experts))
        for pool in expert_pools
    ]
    if not all(pools) or len(pools) != (num_modalities or max(len(pools), 1)):
        expected = f"experts for each modality, num_modalities={num_modalities}"
        raise _checks.unfit(expected, expert_pools=expert_pools)
    if len({*itertools.chain(*pools)}) < sum(map(len, pools)):
        expected = "expert_pools that have nothing in common"
        raise _checks.unfit(expected, expert_pools=pools)
    return pools
