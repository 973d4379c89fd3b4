"""Statistics, views and interventions of experts, and plots of them (`plots`)."""

from keras_moe.analysis.ablation import ExpertAblation, ablate_experts, print_ablation
from keras_moe.analysis.attention import attention_rollout
from keras_moe.analysis.compute import (
    RoutingScores,
    TypeLoads,
    compute_map,
    experts_per_token,
    load_by_type,
    print_load_by_type,
    routing_scores,
)
from keras_moe.analysis.interventions import (
    edit_expert_logits,
    exclude_experts,
    expert_centres,
    steer_expert,
)
from keras_moe.analysis.pruning import (
    CoverageCurve,
    coverage_curves,
    expert_scores,
    mask_experts,
    print_coverage,
    prune_experts,
    select_experts,
)
from keras_moe.analysis.routing import (
    RoutingStatistics,
    dropped_at_capacities,
    expert_queues,
    print_statistics,
    routing_statistics,
)
from keras_moe.analysis.specialisation import (
    class_polysemanticity,
    expert_load,
    mean_polysemanticity,
)
from keras_moe.analysis.tokens import (
    ExpertView,
    FlowStatistics,
    TokenTags,
    expert_views,
    flow_statistics,
    main_experts,
    tag_tokens,
    token_flows,
)
from keras_moe.analysis.usage import (
    BlockUsage,
    ExpertUsage,
    expert_usage,
    merged_usage,
    routing_usage,
)

__all__ = [
    "BlockUsage",
    "CoverageCurve",
    "ExpertAblation",
    "ExpertUsage",
    "ExpertView",
    "FlowStatistics",
    "RoutingScores",
    "RoutingStatistics",
    "TokenTags",
    "TypeLoads",
    "ablate_experts",
    "attention_rollout",
    "class_polysemanticity",
    "compute_map",
    "coverage_curves",
    "dropped_at_capacities",
    "edit_expert_logits",
    "exclude_experts",
    "expert_centres",
    "expert_load",
    "expert_queues",
    "expert_scores",
    "expert_usage",
    "expert_views",
    "experts_per_token",
    "flow_statistics",
    "load_by_type",
    "main_experts",
    "mask_experts",
    "mean_polysemanticity",
    "merged_usage",
    "print_ablation",
    "print_coverage",
    "print_load_by_type",
    "print_statistics",
    "prune_experts",
    "routing_scores",
    "routing_statistics",
    "routing_usage",
    "select_experts",
    "steer_expert",
    "tag_tokens",
    "token_flows",
]
