"""Statistics, views and interventions of experts, and pictures of them (`plots`)."""

from keras_moe.analysis.compute_allocation import (
    KindLoads,
    RoutingScores,
    compute_map,
    experts_per_token,
    ffn_experts_per_token,
    load_by_kind,
    print_load_by_kind,
    routing_scores,
)
from keras_moe.analysis.excluded_experts import exclude_experts
from keras_moe.analysis.expert_ablation import (
    ExpertAblation,
    ablate_experts,
    print_ablation,
)
from keras_moe.analysis.expert_editing import edit_expert_logits, mean_coefficients
from keras_moe.analysis.expert_pruning import mask_experts, prune_experts
from keras_moe.analysis.expert_queues import dropped_at_capacities, expert_queues
from keras_moe.analysis.expert_selection import (
    CoverageCurve,
    coverage_curves,
    expert_scores,
    print_coverage,
    select_experts,
)
from keras_moe.analysis.expert_usage import (
    BlockUsage,
    ExpertUsage,
    merged_usage,
    routing_usage,
)
from keras_moe.analysis.expert_views import ExpertView, expert_views
from keras_moe.analysis.fairness import (
    FairnessMetrics,
    fairness_metrics,
    print_fairness,
)
from keras_moe.analysis.report import Report, report
from keras_moe.analysis.routing_statistics import (
    RoutingStatistics,
    print_statistics,
    routing_statistics,
)
from keras_moe.analysis.specialisation import (
    accuracy_changes,
    class_polysemanticity,
    expert_load,
    mean_polysemanticity,
)
from keras_moe.analysis.steering import expert_centres, steer_expert
from keras_moe.analysis.token_flows import (
    FlowStatistics,
    flow_statistics,
    main_experts,
    token_flows,
)
from keras_moe.analysis.usage_pass import expert_usage
from keras_moe.analysis.word_tags import TokenTags, tag_tokens

__all__ = [
    "BlockUsage",
    "CoverageCurve",
    "ExpertAblation",
    "ExpertUsage",
    "ExpertView",
    "FairnessMetrics",
    "FlowStatistics",
    "KindLoads",
    "Report",
    "RoutingScores",
    "RoutingStatistics",
    "TokenTags",
    "ablate_experts",
    "accuracy_changes",
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
    "fairness_metrics",
    "ffn_experts_per_token",
    "flow_statistics",
    "load_by_kind",
    "main_experts",
    "mask_experts",
    "mean_coefficients",
    "mean_polysemanticity",
    "merged_usage",
    "print_ablation",
    "print_coverage",
    "print_fairness",
    "print_load_by_kind",
    "print_statistics",
    "prune_experts",
    "report",
    "routing_scores",
    "routing_statistics",
    "routing_usage",
    "select_experts",
    "steer_expert",
    "tag_tokens",
    "token_flows",
]
