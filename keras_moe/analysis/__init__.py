"""Statistics, views and interventions of experts, and plots of them (`plots`)."""

from keras_moe.analysis.ablation import ExpertAblation, ablate_experts
from keras_moe.analysis.interventions import (
    CoverageCurve,
    coverage_curves,
    edit_expert_logits,
    exclude_experts,
    prune_experts,
    select_experts,
    steer_expert,
)
from keras_moe.analysis.routing import (
    RoutingScores,
    RoutingStatistics,
    TypeLoads,
    compute_map,
    expert_load,
    expert_queues,
    experts_per_token,
    load_by_type,
    print_load_by_type,
    print_statistics,
    routing_scores,
    routing_statistics,
)
from keras_moe.analysis.tokens import (
    ExpertView,
    TokenTags,
    expert_views,
    tag_tokens,
    token_flows,
)
from keras_moe.analysis.usage import BlockUsage, ExpertUsage, expert_usage, merged_usage

__all__ = [
    "BlockUsage", "CoverageCurve", "ExpertAblation", "ExpertUsage", "ExpertView",
    "RoutingScores", "RoutingStatistics", "TokenTags", "TypeLoads", "ablate_experts",
    "compute_map", "coverage_curves", "edit_expert_logits", "exclude_experts",
    "expert_load", "expert_queues", "expert_usage", "expert_views", "experts_per_token",
    "load_by_type", "merged_usage", "print_load_by_type", "print_statistics",
    "prune_experts", "routing_scores", "routing_statistics", "select_experts",
    "steer_expert", "tag_tokens", "token_flows",
]  # fmt: skip
__dir__ = __all__.copy
