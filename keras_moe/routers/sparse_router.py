"""The base class of token and expert choice: logits, affinity and combine weights.

Axes: G groups, S group_size, E experts, D hidden, M modalities.
"""

from typing import Any

import keras
from keras import ops

from keras_moe.checks import (
    check_bool,
    check_initializer,
    check_integer,
    check_one_of,
    check_positive,
)
from keras_moe.ops.capacity import ROUNDINGS, expert_capacity
from keras_moe.ops.initializers import FastInitializer
from keras_moe.ops.plans import Routing
from keras_moe.routers import affinities
from keras_moe.routers.modalities import (
    allowed_experts,
    both,
    check_pools,
    known_tokens,
)
from keras_moe.routers.router import Router

COMBINES = ("softmax", "affinity")


class SparseRouter(Router):
    """Base class of routers that send whole tokens to experts.

    A kernel turns tokens into logits. While training, noise of standard deviation
    `noise_std / num_experts` is added to them. The affinity, a function of the noisy
    logits, fills the dispatch; the softmax of the logits fills the combine, so that no
    gradient passes through a transport solver.

    The paper has noise in equation 1, softmax token choice, and none in equations 7 to
    9, transport plans. Its released code takes noise for Sinkhorn as an option: experts
    then combine with the softmax of the noisy logits and tokens with that of the clean
    ones. It has no noise for the sparsity-constrained plan, which follows Sinkhorn
    here.

    Subclasses implement `allocate`.

    Args:
        num_experts: E.
        affinity: name of the affinity, `"softmax"`, `"sinkhorn"` or
            `"sparsity_constrained"`, or an affinity with arguments of its own such as
            `SinkhornAffinity(iterations=50)`.
        combine: combine weights, `"softmax"`, or `"affinity"` for the transport plan
            itself, through which gradients then flow (the ablation of section 3.4).
        normalize_gates: normalisation of the combine weights, see the subclass.
        capacity_factor: c, the slots over the assignments.
        capacity: C itself, a number of tokens, instead of `capacity_factor`.
        capacity_rounding: rounding of the capacity, `"ceil"` or `"round"`.
        capacity_multiple_of: divisor of the capacity, which is rounded up to a multiple
            of it, or None.
        noise_std: standard deviation of the training noise, times `num_experts`; 1.0 in
            V-MoE, which is noise of 1 / E. None is the affinity's default: 1.0
            for softmax, 0.0 for transport plans.
        noisy_combine: whether the combine weights are the softmax of the noisy logits
            (True) or of the clean ones (False). None is as in the released code:
            clean where tokens choose by a transport plan, else noisy. The plan itself
            as combine weights (`combine="affinity"`) is the noisy one.
        kernel_initializer: initializer of the kernel (D, E), or (M, D, E).
        num_modalities: M; each modality then has a kernel of its own over the shared
            experts, and calls take `modality_ids`. None has one kernel for all.
        expert_pools: experts of each modality, those that its tokens may go to; no
            expert is in two pools. None lets all tokens go to all experts.
        seed: seed of the noise.
        **kwargs: arguments of `keras.layers.Layer`; `dtype` is always float32.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        *Routers in Vision Mixture of Experts*, sections 2.1 to 2.5; *LIMoE*, appendix
        E.3, for `num_modalities` and `expert_pools`.

    Example:

    >>> from keras_moe.routers import SparseRouter, TokenChoiceRouter
    >>> issubclass(TokenChoiceRouter, SparseRouter)
    True
    """

    # The side that chooses: "token" or "expert".
    side = None
    normalizations = (None,)

    def __init__(
        self,
        num_experts: int,
        affinity: Any = "softmax",
        combine: str = "softmax",
        normalize_gates: str | None = None,
        capacity_factor: float | None = None,
        capacity: int | None = None,
        capacity_rounding: str = "ceil",
        capacity_multiple_of: int | None = None,
        noise_std: float | None = None,
        noisy_combine: bool | None = None,
        kernel_initializer: Any = "lecun_normal",
        num_modalities: int | None = None,
        expert_pools: Any = None,
        seed: int | None = None,
        **kwargs,
    ):
        affinity = affinities.get(affinity)
        if noise_std is None:
            noise_std = affinity.default_noise_std
        super().__init__(num_experts, noise_std=noise_std, seed=seed, **kwargs)
        self.affinity = affinity
        self.combine = check_one_of("combine", combine, COMBINES)
        if noisy_combine is None:
            noisy_combine = combine == "affinity" or affinity.noisy_combine(self.side)
        self.noisy_combine = check_bool("noisy_combine", noisy_combine)
        if combine == "affinity" and not noisy_combine:
            raise ValueError(
                "Expected noisy_combine=None for combine='affinity', since outputs are "
                "weighed with the plan that routes; "
                f"received: noisy_combine={noisy_combine}"
            )
        if combine == "affinity":
            self.affinity.check_differentiable()
        self.normalize_gates = check_one_of(
            "normalize_gates", normalize_gates, self.normalizations
        )
        if capacity is not None:
            capacity = check_integer("capacity", capacity)
            if capacity_factor is not None:
                raise ValueError(
                    "Expected capacity or capacity_factor, not both; received: "
                    f"capacity={capacity}, capacity_factor={capacity_factor}"
                )
        elif capacity_factor is not None:
            check_positive("capacity_factor", capacity_factor)
        check_one_of("capacity_rounding", capacity_rounding, sorted(ROUNDINGS))
        if capacity_multiple_of is not None:
            check_integer("capacity_multiple_of", capacity_multiple_of)
        if num_modalities is not None:
            check_integer("num_modalities", num_modalities)
        self.capacity_factor = capacity_factor
        self.capacity = capacity
        self.capacity_rounding = capacity_rounding
        self.capacity_multiple_of = capacity_multiple_of
        self.kernel_initializer = check_initializer(
            "kernel_initializer", kernel_initializer
        )
        self.num_modalities = num_modalities
        self.expert_pools = check_pools(expert_pools, num_modalities, num_experts)

    @classmethod
    def from_moe_config(cls, config, site, **arguments):
        # A name's arguments are its own as much as the options are.
        options = {**arguments, **cls.checked_options(config)}
        fields = {
            "seed": site.seed,
            "capacity_multiple_of": config.capacity_multiple_of,
            **cls.capacity_fields(config, options),
            **cls.evaluation_fields(config, options),
        }
        for name in ("noise_std", "num_modalities", "expert_pools"):
            if getattr(config, name) is not None:
                fields[name] = getattr(config, name)
        fields = {**fields, **cls.own_fields(config, site), **options}
        capacities = (fields["eval_capacity_factor"], fields["eval_capacity"])
        if config.evaluation == "official" and capacities == (None, None):
            # The papers evaluate with the capacity of training.
            fields["eval_capacity_factor"] = fields["capacity_factor"]
            fields["eval_capacity"] = fields.get("capacity")
        return cls(config.expert_types.total, **fields)

    @classmethod
    def own_fields(cls, config: Any, site: Any) -> dict:
        """The fields of a `MoEConfig` that this class has beside its base's.

        Args:
            config: `keras_moe.layers.MoEConfig` of the encoder.
            site: `RouterSite` of the block.
        """
        cls.check_not_dropless(config)
        return {}

    @classmethod
    def capacity_fields(cls, config: Any, options: dict) -> dict:
        """The arguments that limit the experts' capacity.

        A capacity among `options` is the router's own, in which K has no part where
        experts choose; the config's factors count the K choices of each token.

        Args:
            config: `keras_moe.layers.MoEConfig` of the encoder.
            options: checked `router_options`.
        """
        dropless = options.get("dropless", config.dropless)
        factor = config.capacity_factor
        if factor == "auto":
            factor = cls.default_capacity_factor
        is_own = any(
            options.get(name) is not None for name in ("capacity", "capacity_factor")
        )
        if factor is None and not dropless and not is_own:
            raise ValueError(
                "Expected capacity_factor, or a capacity or number of slots in "
                f"router_options, for router={config.router!r}; "
                "received: capacity_factor=None"
            )
        fields = {"eval_capacity_factor": config.eval_capacity_factor}
        is_own_at_inference = options.get("eval_capacity_factor") is not None
        if cls.side == "token" or not (is_own or is_own_at_inference):
            fields["num_selected_experts"] = config.num_selected_experts
        else:
            selected = config.num_selected_experts
            if not is_own and factor is not None:
                factor *= selected
            if config.eval_capacity_factor is not None:
                fields["eval_capacity_factor"] = config.eval_capacity_factor * selected
        if options.get("capacity") is not None or dropless:
            factor = None
        if config.capacity_rounding != "auto":
            fields["capacity_rounding"] = config.capacity_rounding
        return {"capacity_factor": factor, **fields}

    @classmethod
    def evaluation_fields(cls, config: Any, options: dict) -> dict:
        """The arguments that say how tokens compete at inference.

        Args:
            config: `keras_moe.layers.MoEConfig` of the encoder.
            options: checked `router_options`.
        """
        fields = {"eval_capacity": config.eval_capacity}
        if config.evaluation is None:
            return fields
        batch_invariant = config.evaluation == "batch_invariant"
        if options.get("batch_invariant") not in (None, batch_invariant):
            raise ValueError(
                "Expected evaluation, or batch_invariant in router_options, not both; "
                f"received: evaluation={config.evaluation!r}, "
                f"batch_invariant={options['batch_invariant']}"
            )
        return {**fields, "batch_invariant": batch_invariant}

    def build(self, input_shape):
        super().build(input_shape)
        initializer = self.kernel_initializer
        if self.num_modalities:
            # Each kernel is drawn by itself: the fan-in is D, not M x D.
            initializer = _each(initializer)
        shape = self.weight_shapes(input_shape[-2:])["kernel"]
        self.kernel = self.add_kernel("kernel", shape, initializer)

    def add_kernel(self, name: str, shape: tuple, initializer: Any) -> Any:
        """Adds a weight that stays float32 under every dtype policy.

        Args:
            name: name of the weight.
            shape: shape of the weight.
            initializer: initializer of the weight.
        """
        return self.add_weight(
            name=name,
            shape=shape,
            initializer=FastInitializer(initializer),
            dtype="float32",
            autocast=False,
        )

    def call(
        self,
        tokens: Any,
        mask: Any = None,
        modality_ids: Any = None,
        training: bool | None = None,
    ) -> tuple[Any, Routing]:
        known = self.known_tokens(modality_ids)
        logits, allowed = self._logits(tokens, modality_ids), None
        if self.expert_pools is not None:
            pools = self.expert_pools
            allowed = allowed_experts(modality_ids, known, pools, self.num_experts)
            logits = ops.where(allowed, logits, -float("inf"))
        mask = both(mask, known)
        return self.route(logits, allowed, mask, training, modality_ids)

    @property
    def modality_count(self) -> int | None:
        """M if the router tells modalities apart; calls then take `modality_ids`."""
        if self.num_modalities is None and self.expert_pools is not None:
            return len(self.expert_pools)
        return self.num_modalities

    def by_modality(self) -> str:
        """The arguments that tell modalities apart, for messages."""
        return f"num_modalities={self.num_modalities}, expert_pools={self.expert_pools}"

    def known_tokens(self, modality_ids: Any) -> Any:
        """The tokens (G, S) of known modalities, or None if there are no others.

        Args:
            modality_ids: integers (G, S), or None.

        Raises:
            ValueError: if the router tells modalities apart, and there are no ids.
        """
        if self.modality_count is None:
            return None
        return known_tokens(modality_ids, self.modality_count, self.by_modality())

    def route(
        self,
        logits: Any,
        allowed: Any,
        mask: Any,
        training: bool | None,
        modality_ids: Any = None,
    ) -> tuple[Any, Routing]:
        """The plan and the record of logits.

        Args:
            logits: float32 (G, S, E).
            allowed: boolean (G, S, E), the experts that a token may go to, or None.
            mask: boolean (G, S), False for tokens that are not routed, or None.
            training: whether there is noise, and a limited capacity.
            modality_ids: integers (G, S), for routers that tell modalities apart.
        """
        clean_logits = self.scale_logits(logits)
        noisy_logits = self.add_noise(
            clean_logits, self.noise_std / self.num_experts, training
        )
        has_noise = noisy_logits is not clean_logits
        if allowed is not None:
            # `logits` stay whole for the gating residual of the next layer.
            clean_logits = ops.where(allowed, clean_logits, -float("inf"))
            noisy_logits = ops.where(allowed, noisy_logits, -float("inf"))
        gates = ops.softmax(noisy_logits, axis=-1)
        combine_gates = gates
        if has_noise and not self.noisy_combine:
            combine_gates = ops.softmax(clean_logits, axis=-1)
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
            # A softmax may vanish within the pool; entries outside must be below it.
            allocating = ops.where(allowed, affinity, -float("inf"))
        plan = self.allocate(
            allocating,
            affinity if differentiable else combine_gates,
            mask=mask,
            training=training,
            modality_ids=modality_ids,
        )
        return plan, Routing(logits, noisy_logits, affinity, gates, *plan.assignments())

    def scale_logits(self, logits: Any) -> Any:
        """The logits as they route; `Routing.logits` keeps them as they come."""
        return logits

    def _logits(self, tokens, modality_ids):
        if self.num_modalities is None:
            return ops.matmul(tokens, self.kernel)
        logits = 0.0
        for modality in range(self.num_modalities):
            own = ops.matmul(tokens, self.kernel[modality])
            is_own = ops.expand_dims(ops.equal(modality_ids, modality), -1)
            logits = logits + ops.where(is_own, own, 0.0)
        return logits

    def allocate(
        self,
        affinity: Any,
        gates: Any,
        mask: Any = None,
        training: bool | None = None,
        modality_ids: Any = None,
    ) -> Any:
        """The plan from affinity and combine weights, both float32 (G, S, E)."""
        raise NotImplementedError

    def max_nonzeros(self, num_tokens: Any, training: bool | None) -> Any:
        """The largest number of pairs of the choosing side, for sparse affinities.

        Args:
            num_tokens: tokens of the group.
            training: whether the capacity is that of training.
        """
        raise NotImplementedError

    def capacity_of(
        self, num_tokens: Any, factor: float, selected: int, multiple_of: int | None
    ) -> Any:
        """The capacity C of a group.

        Args:
            num_tokens: tokens of the group.
            factor: c.
            selected: K.
            multiple_of: divisor of C, which is rounded up to a multiple of it, or None.
        """
        return expert_capacity(
            num_tokens,
            self.num_experts,
            factor,
            num_selected_experts=selected,
            rounding=self.capacity_rounding,
            multiple_of=multiple_of,
        )

    def weight_shapes(self, shape: tuple[int, int]) -> dict[str, tuple]:
        """The shapes of the trained weights by name.

        Args:
            shape: (num_tokens, dim).
        """
        kernel = (shape[-1], self.num_experts)
        if self.num_modalities:
            kernel = (self.num_modalities, *kernel)
        return {"kernel": kernel}

    def get_config(self):
        config = super().get_config()
        config.update(
            affinity=affinities.serialize(self.affinity),
            combine=self.combine,
            normalize_gates=self.normalize_gates,
            capacity_factor=self.capacity_factor,
            capacity=self.capacity,
            capacity_rounding=self.capacity_rounding,
            capacity_multiple_of=self.capacity_multiple_of,
            noisy_combine=self.noisy_combine,
            kernel_initializer=keras.initializers.serialize(self.kernel_initializer),
            num_modalities=self.num_modalities,
            expert_pools=self.expert_pools,
        )
        return config


def _each(initializer):
    def draw(shape, dtype=None):
        return ops.stack([initializer(shape[1:], dtype) for _ in range(shape[0])])

    return draw
