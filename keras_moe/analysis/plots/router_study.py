"""The picture of a study of routers."""

import os

from keras_moe.analysis.plots.figure import new_figure

# Label, marker and colour of each router; the markers are near those of Figure 1 of
# *Routers in Vision Mixture of Experts*.
_ROUTERS = {
    "softmax_token_choice": ("Softmax Token Choice", "x", "tab:red"),
    "sinkhorn_token_choice": ("Sinkhorn Token Choice", "P", "tab:orange"),
    "sparsity_constrained_token_choice": (
        "Sparsity-constrained Token Choice",
        "v",
        "tab:brown",
    ),
    "softmax_expert_choice": ("Softmax Expert Choice", "s", "tab:blue"),
    "sinkhorn_expert_choice": ("Sinkhorn Expert Choice", "o", "tab:cyan"),
    "sparsity_constrained_expert_choice": (
        "Sparsity-constrained Expert Choice",
        "^",
        "tab:green",
    ),
    "soft": ("Soft", "*", "tab:purple"),
}


def plot_router_study(
    rows: list[dict],
    path: str | os.PathLike,
    title: str = "Accuracy and cost of the routers",
    accuracy: str = "test_accuracy",
) -> None:
    """Draws the accuracy of routers against their cost, and saves the picture.

    As in Figure 1 of *Routers in Vision Mixture of Experts*: the marker's shape is
    the router, and its size k or c. Bars are one standard deviation over the seeds.

    Args:
        rows: a dict for each configuration, with "router" (a name of
            `keras_moe.routers.get`), "selected" (k or c), "relative_step_time", and
            the accuracy, a dict of "mean" and "std" in [0, 1]; other keys are left
            alone.
        path: where to save the picture; its suffix says the format.
        title: above the picture.
        accuracy: the key of the accuracy.

    Raises:
        ValueError: if there are no rows, or a row has an unknown router.
        ImportError: if matplotlib is not installed.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> row = {
    ...     "router": "soft",
    ...     "selected": 1,
    ...     "relative_step_time": 0.9,
    ...     "test_accuracy": {"mean": 0.97, "std": 0.01},
    ... }
    >>> path = os.path.join(tempfile.mkdtemp(), "routers.png")
    >>> plots.plot_router_study([row], path)
    >>> os.path.exists(path)
    True
    """
    if not rows:
        raise ValueError("Expected at least one row; received: rows=[]")
    unknown = sorted({str(row["router"]) for row in rows} - set(_ROUTERS))
    if unknown:
        raise ValueError(
            f"Expected routers of {sorted(_ROUTERS)}; received: {', '.join(unknown)}"
        )
    figure = new_figure(figsize=(9.5, 5.0), dpi=110)
    axis = figure.subplots()
    sizes = {}
    for row in rows:
        _, marker, colour = _ROUTERS[row["router"]]
        sizes[row["selected"]] = 6.0 * row["selected"] ** 0.75
        axis.errorbar(
            row["relative_step_time"],
            100 * row[accuracy]["mean"],
            # One seed has no spread.
            yerr=100 * row[accuracy]["std"] or None,
            elinewidth=1.0,
            capsize=3.0,
            alpha=0.85,
            **_marker(marker, colour, sizes[row["selected"]]),
        )
    axis.set_xlabel("time of a training step, relative")
    axis.set_ylabel("test accuracy (%)")
    axis.set_title(title, fontsize=11)
    axis.margins(0.1)
    axis.grid(alpha=0.25)

    # Beside the picture, where it hides no point.
    used = {row["router"] for row in rows}
    entries = [
        axis.plot([], [], label=label, linestyle="", **_marker(marker, colour, 7.0))[0]
        for name, (label, marker, colour) in _ROUTERS.items()
        if name in used
    ]
    entries += [
        axis.plot(
            [],
            [],
            label=f"k or c = {selected:g}",
            linestyle="",
            **_marker("o", "lightgray", size),
        )[0]
        for selected, size in sorted(sizes.items())
    ]
    axis.legend(
        handles=entries, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path)


def _marker(marker, colour, size):
    """Arguments that draw a marker; a cross has no area, and shows by its edge."""
    # Marks of one size look unequal: a star is mostly points, a cross two lines.
    size = size * {"*": 1.5, "x": 1.1}.get(marker, 1.0)
    edge = (
        {"markeredgewidth": 2.2}
        if marker == "x"
        else {"markeredgewidth": 0.7, "markeredgecolor": "black"}
    )
    return {"marker": marker, "color": colour, "markersize": size, **edge}
