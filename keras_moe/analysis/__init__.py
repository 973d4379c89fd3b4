"""What the experts do: statistics, views, and pictures (`analysis.plots`)."""

from keras_moe.analysis.expert_views import ExpertView, expert_views
from keras_moe.analysis.routing_statistics import (
    RoutingStatistics,
    print_statistics,
    routing_statistics,
)

__all__ = [
    "ExpertView",
    "RoutingStatistics",
    "expert_views",
    "print_statistics",
    "routing_statistics",
]
