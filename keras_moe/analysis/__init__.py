"""What the experts do: statistics, views, and pictures (`analysis.plots`)."""

from keras_moe.analysis.compute_allocation import (
    KindLoads,
    RoutingScores,
    compute_map,
    ffn_experts_per_token,
    load_by_kind,
    print_load_by_kind,
    routing_scores,
)
from keras_moe.analysis.expert_views import ExpertView, expert_views
from keras_moe.analysis.routing_statistics import (
    RoutingStatistics,
    print_statistics,
    routing_statistics,
)

__all__ = [
    "ExpertView",
    "KindLoads",
    "RoutingScores",
    "RoutingStatistics",
    "compute_map",
    "expert_views",
    "ffn_experts_per_token",
    "load_by_kind",
    "print_load_by_kind",
    "print_statistics",
    "routing_scores",
    "routing_statistics",
]
