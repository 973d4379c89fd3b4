"""Pictures of experts and routers, which need matplotlib."""

from keras_moe.analysis.plots.compute_allocation import (
    plot_compute_maps,
    plot_load_by_kind,
    plot_routing_scores,
)
from keras_moe.analysis.plots.coverage import plot_coverage
from keras_moe.analysis.plots.expert_images import (
    plot_expert_images,
    plot_expert_patches,
)
from keras_moe.analysis.plots.expert_usage import plot_expert_groups, plot_expert_usage
from keras_moe.analysis.plots.expert_views import plot_expert_views
from keras_moe.analysis.plots.interventions import plot_subpopulations
from keras_moe.analysis.plots.kind_maps import plot_kind_maps
from keras_moe.analysis.plots.router_health import plot_router_health
from keras_moe.analysis.plots.specialisation import (
    plot_ablation,
    plot_expert_load,
    plot_polysemanticity,
)
from keras_moe.analysis.plots.training_history import plot_training_history

__all__ = [
    "plot_ablation",
    "plot_compute_maps",
    "plot_coverage",
    "plot_expert_groups",
    "plot_expert_images",
    "plot_expert_load",
    "plot_expert_patches",
    "plot_expert_usage",
    "plot_expert_views",
    "plot_kind_maps",
    "plot_load_by_kind",
    "plot_polysemanticity",
    "plot_router_health",
    "plot_routing_scores",
    "plot_subpopulations",
    "plot_training_history",
]
