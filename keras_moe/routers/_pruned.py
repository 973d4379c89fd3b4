"""Routers of layers with pruned experts.

Axes: G groups, S group_size, E experts, C capacity, K selected experts, D hidden.
"""

from collections.abc import Sequence

import keras
from keras import ops

from keras_moe._checks import check_bool, check_indices, check_one_of, unfit
from keras_moe._freezing import FROZEN
from keras_moe.ops.capacity import expert_capacity
from keras_moe.ops.expert_types import ExpertTypes
from keras_moe.routers.affinities import SparsityConstrainedAffinity
from keras_moe.routers.pathway_aware import PathwayAwareRouter
from keras_moe.routers.router import Router
from keras_moe.routers.token_choice import TokenChoiceRouter

METHODS = ("router_drop", "router_pred", "router_pred_skip")


class _Pruned(TokenChoiceRouter):
    """Token choice among the experts that pruning has kept; records keep all E."""

    def __init__(
        self,
        num_experts: int,
        kept_experts: Sequence[int],
        method: str = "router_drop",
        removed: bool = False,
        **kwargs,
    ):
        self.kept_experts = checked_kept(kept_experts, num_experts)
        self.method = check_one_of("method", method, METHODS)
        self.removed = check_bool("removed", removed)
        if method == "router_drop":
            kwargs["excluded_experts"] = tuple(
                expert
                for expert in range(num_experts)
                if expert not in self.kept_experts
            )
        super().__init__(num_experts, **kwargs)
        if self.kept_experts[0] >= self.expert_types.ffn:
            expected = "an FFN expert among kept_experts"
            raise unfit(expected, kept_experts=kept_experts)

    @property
    def expert_columns(self):
        columns = super().expert_columns
        if not self.removed:
            return columns
        return tuple(expert for expert in columns if expert in self.kept_experts)

    @property
    def _available(self):
        return [expert in self.kept_experts for expert in range(self.num_experts)]

    @property
    def available_experts(self):
        # The last method chooses among all, and drops what is not kept.
        is_chosen = self.method == "router_pred_skip"
        return super().available_experts if is_chosen else self._available

    def allocate(self, affinity, gates, mask=None, training=None, modality_ids=None):
        if self.method == "router_pred":
            affinity = ops.where(
                ops.convert_to_tensor(self._available, "bool"), affinity, -float("inf")
            )
        return super().allocate(affinity, gates, mask, training, modality_ids)

    def choose(self, affinity, gates, mask, capacity, priority, **arguments):
        arguments["available"] = self._available
        return super().choose(affinity, gates, mask, capacity, priority, **arguments)

    def route(self, logits, allowed, mask, training, modality_ids=None):
        plan, routing = super().route(logits, allowed, mask, training, modality_ids)
        return plan.of_experts(self.expert_columns) if self.removed else plan, routing

    def get_config(self):
        config = super().get_config()
        if self.method == "router_drop":
            del config["excluded_experts"]
        return {**config, "kept_experts": list(self.kept_experts)}


@keras.saving.register_keras_serializable("keras_moe")
class PrunedTokenChoiceRouter(_Pruned):
    """Pruned token choice, whose capacity C = S K c / E counts only kept experts."""

    def capacity_of(self, num_tokens, factor, selected, multiple_of):
        routes_as_before = self.method == "router_pred_skip"
        return expert_capacity(
            num_tokens,
            self.num_experts if routes_as_before else len(self.kept_experts),
            factor,
            num_selected_experts=selected,
            rounding=self.capacity_rounding,
            multiple_of=multiple_of,
        )


@keras.saving.register_keras_serializable("keras_moe")
class PrunedPathwayAwareRouter(_Pruned, PathwayAwareRouter):
    """MoE++'s router after pruning; its logits stay whole for the next residual."""

    @property
    def balanced_types(self):
        types = super().balanced_types
        if self.method == "router_pred_skip":
            return types
        return ExpertTypes(
            **{
                name: sum(self._available[columns])
                for name, columns in types.slices().items()
            }
        )


def checked_kept(kept_experts: Sequence[int], num_experts: int) -> tuple[int, ...]:
    """Sorts expert indices after checking that they are distinct and in range."""
    kept = check_indices("kept_experts", kept_experts, num_experts)
    if not 0 < len(kept) == len(kept_experts):
        expected = "at least one of kept_experts, each once"
        raise unfit(expected, kept_experts=kept_experts)
    return tuple(sorted(kept))


def pruned_router(
    router: Router, kept_experts: Sequence[int], method: str, removed: bool
) -> TokenChoiceRouter:
    """Returns a copy of a router that chooses only among the kept experts."""
    # A subclass may use the experts' columns differently.
    if type(router) not in _PRUNED:
        expected = f"one of {[cls.__name__ for cls in _PRUNED]} to prune experts"
        raise unfit(expected, f"{type(router).__name__}")
    if router.excluded_experts:
        expected = "excluded_experts=() to prune experts"
        raise unfit(expected, excluded_experts=router.excluded_experts)
    if router.ensemble_size > 1:
        raise unfit(
            "ensemble_size=1 to prune experts", ensemble_size=router.ensemble_size
        )
    is_transport = isinstance(router.affinity, SparsityConstrainedAffinity)
    if method == "router_drop" and is_transport:
        # Its plan assigns S / E of the tokens to each expert, excluded ones included.
        names = "'router_pred' or 'router_pred_skip'"
        raise unfit(f"{names} for sparsity-constrained routers", method=method)
    kept = checked_kept(kept_experts, router.num_experts)
    config = router.get_config()
    config.pop(FROZEN, None)
    if not (removed and columns_go(router, method)):
        config.update(kept_experts=kept, method=method, removed=removed)
        return _PRUNED[type(router)](**config)
    config["num_experts"] = len(kept)
    config["noise_std"] = router.noise_std * len(kept) / router.num_experts
    if router.expert_pools is not None:
        config["expert_pools"] = [
            [kept.index(expert) for expert in pool if expert in kept]
            for pool in router.expert_pools
        ]
    return TokenChoiceRouter(**config)


def columns_go(router: Router, method: str) -> bool:
    """Whether removed experts lose their column of the router's kernel, too."""
    # MoE++'s residuals read all columns.
    return method == "router_drop" and not isinstance(router, PathwayAwareRouter)


_PRUNED = {
    TokenChoiceRouter: PrunedTokenChoiceRouter,
    PathwayAwareRouter: PrunedPathwayAwareRouter,
}
