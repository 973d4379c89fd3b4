"""The pictures of a study of routers."""

import os

import numpy as np

from keras_moe.analysis.plots.figure import new_figure, save_figure, write_figure

# The label, marker and colour of each router; the markers are like those of Figure 1 of
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

    The marker's shape is the router, and its size k or c, as in Figure 1 of *Routers in
    Vision Mixture of Experts*. Bars are one standard deviation over the seeds. Pale
    marks combine with the transport plan (`combine="affinity"`).

    Args:
        rows: dicts of the configurations, each with "router" (a name of
            `keras_moe.routers.get`), "selected" (k or c), "relative_step_time", and
            the accuracy, a dict of "mean" and "std" in [0, 1]. "combine" is "softmax"
            where it is missing; other keys are left alone.
        path: path of the picture; its suffix is the format.
        title: title above the picture.
        accuracy: key of the accuracy.

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
    _check_rows(rows)
    figure = new_figure(figsize=(9.5, 5.0), dpi=110)
    axis = figure.subplots()
    sizes = {}
    for row in rows:
        _, marker, colour = _ROUTERS[row["router"]]
        sizes[row["selected"]] = 6.0 * row["selected"] ** 0.75
        axis.errorbar(
            row["relative_step_time"],
            100 * row[accuracy]["mean"],
            # A single seed has no spread.
            yerr=100 * row[accuracy]["std"] or None,
            elinewidth=1.0,
            capsize=3.0,
            alpha=0.35 if _combines_by_plan(row) else 0.85,
            **_marker(marker, colour, sizes[row["selected"]]),
        )
    axis.set_xlabel("time of a training step, relative")
    axis.set_ylabel("test accuracy (%)")
    axis.set_title(title, fontsize=11)
    axis.margins(0.1)
    axis.grid(alpha=0.25)

    # The legend stands beside the picture, where it hides no point.
    entries = [
        axis.plot([], [], label=label, linestyle="", **_marker(marker, colour, 7.0))[0]
        for label, marker, colour in _used(rows)
    ]
    if any(map(_combines_by_plan, rows)):
        pale = {"label": "plan combines", "alpha": 0.35, "linestyle": ""}
        entries += axis.plot([], [], **pale, **_marker("o", "tab:cyan", 7.0))
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
    write_figure(figure, path)


def plot_router_curves(
    rows: list[dict],
    path: str | os.PathLike,
    title: str = "Routers along training",
) -> None:
    """Draws accuracy and loss over the steps of training, and saves the picture.

    A column is a k or c, as in Figure 3 of *Routers in Vision Mixture of Experts*;
    accuracy is above, the training loss below. Bands are one standard deviation over
    the seeds. Lines are dashed where the transport plan combines
    (`combine="affinity"`).

    Args:
        rows: dicts of the configurations, each with "router" (a name of
            `keras_moe.routers.get`), "selected" (k or c), "combine" ("softmax" where
            it is missing), and "curves": "step", a list of training steps, and
            "grouped_test_accuracy" and "train_loss", each a dict of "mean" and "std",
            lists as long.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there are no rows, or a row has an unknown router.
        ImportError: if matplotlib is not installed.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> row = {
    ...     "router": "soft",
    ...     "selected": 1,
    ...     "curves": {
    ...         "step": [10, 20],
    ...         "grouped_test_accuracy": {"mean": [0.5, 0.9], "std": [0.1, 0.0]},
    ...         "train_loss": {"mean": [2.0, 1.0], "std": [0.2, 0.1]},
    ...     },
    ... }
    >>> path = os.path.join(tempfile.mkdtemp(), "curves.png")
    >>> plots.plot_router_curves([row], path)
    >>> os.path.exists(path)
    True
    """
    _check_rows(rows)
    columns = sorted({row["selected"] for row in rows})
    figure = new_figure(figsize=(4.6 * len(columns) + 3.0, 6.4), dpi=110)
    axes = figure.subplots(2, len(columns), squeeze=False, sharex=True, sharey="row")
    measures = (("grouped_test_accuracy", 100.0), ("train_loss", 1.0))
    for row in rows:
        _, marker, colour = _ROUTERS[row["router"]]
        style = "--" if _combines_by_plan(row) else "-"
        curves = row["curves"]
        for (key, scale), axis in zip(
            measures, axes[:, columns.index(row["selected"])]
        ):
            mean = scale * np.asarray(curves[key]["mean"])
            std = scale * np.asarray(curves[key]["std"])
            # A single epoch is a point.
            marker = marker if len(mean) == 1 else ""
            axis.plot(curves["step"], mean, style, marker=marker, color=colour, lw=1.4)
            axis.fill_between(
                curves["step"], mean - std, mean + std, color=colour, alpha=0.12, lw=0
            )
    for axis, selected in zip(axes[0], columns):
        axis.set_title(f"k or c = {selected:g}", fontsize=10)
        # The last points of many lines lie close together.
        axis.set_ylim(bottom=_floor(rows), top=100.0)
    for axis in axes[1]:
        axis.set_yscale("log")
        axis.set_xlabel("step")
    for axis in axes.flat:
        axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("test accuracy (%)")
    axes[1, 0].set_ylabel("training loss")
    entries = [
        axes[0, 0].plot([], [], label=label, color=colour)[0]
        for label, _, colour in _used(rows)
    ]
    if any(map(_combines_by_plan, rows)):
        for label, style in (("softmax combines", "-"), ("plan combines", "--")):
            entries += axes[0, 0].plot([], [], style, label=label, color="gray")
    axes[0, -1].legend(
        handles=entries, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9
    )
    save_figure(figure, path, title)


def _floor(rows):
    """The lowest accuracy to draw, in %: that of the slowest router after a quarter."""
    lowest = []
    for row in rows:
        means = row["curves"]["grouped_test_accuracy"]["mean"]
        lowest.append(100.0 * means[len(means) // 4])
    return max(0.0, min(lowest) - 2.0)


def _check_rows(rows):
    if not rows:
        raise ValueError("Expected at least one row; received: rows=[]")
    unknown = sorted({str(row["router"]) for row in rows} - set(_ROUTERS))
    if unknown:
        raise ValueError(
            f"Expected routers of {sorted(_ROUTERS)}; received: {', '.join(unknown)}"
        )


def _used(rows):
    """The labels, markers and colours of the routers that there are, in one order."""
    used = {row["router"] for row in rows}
    return [style for name, style in _ROUTERS.items() if name in used]


def _combines_by_plan(row):
    return row.get("combine", "softmax") == "affinity"


def _marker(marker, colour, size):
    """The arguments that draw a marker; a cross has no area, and shows by its edge."""
    # Marks of one size look unequal: a star is mostly points, and a cross two lines.
    size = size * {"*": 1.5, "x": 1.1}.get(marker, 1.0)
    edge = (
        {"markeredgewidth": 2.2}
        if marker == "x"
        else {"markeredgewidth": 0.7, "markeredgecolor": "black"}
    )
    return {"marker": marker, "color": colour, "markersize": size, **edge}
