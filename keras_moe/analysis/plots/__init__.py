"""Pictures of experts and routers, which need matplotlib."""

from keras_moe.analysis.plots.compute_allocation import (
    plot_compute_maps,
    plot_load_by_kind,
    plot_routing_scores,
)
from keras_moe.analysis.plots.constant_experts import plot_constant_experts
from keras_moe.analysis.plots.coverage import plot_coverage
from keras_moe.analysis.plots.expert_images import (
    plot_expert_images,
    plot_expert_patches,
)
from keras_moe.analysis.plots.expert_usage import plot_expert_groups, plot_expert_usage
from keras_moe.analysis.plots.expert_views import plot_expert_views
from keras_moe.analysis.plots.interventions import plot_subpopulations
from keras_moe.analysis.plots.kind_maps import plot_kind_maps
from keras_moe.analysis.plots.mumoe_heads import (
    plot_head_capacity,
    plot_matched_heads,
)
from keras_moe.analysis.plots.pair_curves import (
    plot_pair_training,
    plot_pruned_pairs,
)
from keras_moe.analysis.plots.pair_study import (
    plot_entropy_thresholds,
    plot_group_sizes,
    plot_pair_comparison,
)
from keras_moe.analysis.plots.router_health import plot_router_health
from keras_moe.analysis.plots.router_study import (
    plot_router_curves,
    plot_router_study,
)
from keras_moe.analysis.plots.specialisation import (
    plot_ablation,
    plot_expert_load,
    plot_polysemanticity,
)
from keras_moe.analysis.plots.tau_study import plot_tau_study
from keras_moe.analysis.plots.training_history import plot_training_history
from keras_moe.analysis.plots.truncated_svd import plot_truncated_svd

__all__ = [
    "plot_ablation",
    "plot_compute_maps",
    "plot_constant_experts",
    "plot_coverage",
    "plot_entropy_thresholds",
    "plot_expert_groups",
    "plot_expert_images",
    "plot_expert_load",
    "plot_expert_patches",
    "plot_expert_usage",
    "plot_expert_views",
    "plot_group_sizes",
    "plot_head_capacity",
    "plot_kind_maps",
    "plot_load_by_kind",
    "plot_matched_heads",
    "plot_pair_comparison",
    "plot_pair_training",
    "plot_polysemanticity",
    "plot_pruned_pairs",
    "plot_router_curves",
    "plot_router_health",
    "plot_router_study",
    "plot_routing_scores",
    "plot_subpopulations",
    "plot_tau_study",
    "plot_training_history",
    "plot_truncated_svd",
]
