"""Plots of experts and routers. They need matplotlib.

Every `plot_...` function returns its matplotlib figure, without using pyplot or a
display. Two arguments are documented only here: `path`, the file to write, in the
format of its suffix (default `.png`; nothing is written with `path=None`), and `title`,
the text above the plot. Install matplotlib with `pip install ".[plots]"` in a clone.
"""

from keras_moe.analysis.plots.experts import (
    plot_ablation,
    plot_coverage,
    plot_expert_groups,
    plot_expert_load,
    plot_expert_usage,
    plot_load_by_type,
    plot_routing_scores,
)
from keras_moe.analysis.plots.images import (
    plot_compute_maps,
    plot_expert_images,
    plot_expert_patches,
    plot_expert_views,
    plot_type_maps,
)
from keras_moe.analysis.plots.training import (
    plot_errors_over_costs,
    plot_router_health,
    plot_training_history,
)

__all__ = [
    "plot_ablation", "plot_compute_maps", "plot_coverage", "plot_errors_over_costs",
    "plot_expert_groups", "plot_expert_images", "plot_expert_load",
    "plot_expert_patches", "plot_expert_usage", "plot_expert_views",
    "plot_load_by_type", "plot_router_health", "plot_routing_scores",
    "plot_training_history", "plot_type_maps",
]  # fmt: skip
