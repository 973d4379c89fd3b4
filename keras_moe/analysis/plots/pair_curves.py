"""Pictures of models of pairs along training, and as their experts are pruned."""

import os

import numpy as np

from keras_moe.analysis.plots.figure import new_figure, save_figure

_STYLES = {
    "router_drop": "-",
    "router_pred_skip": "--",
    "router_pred": ":",
}


def plot_pruned_pairs(
    rows: dict[str, dict[str, dict[str, dict[int, dict]]]],
    path: str | os.PathLike,
    title: str = "Retrieval with pruned experts",
) -> None:
    """Draws retrieval by the number of experts that are left, and saves the picture.

    There is a panel for each modality whose experts are pruned; a colour is a model,
    a style of line the way in which routers go on. Bars are one standard deviation over
    the seeds.

    Args:
        rows: dict from the name of a model to one from a modality to one from a method
            of `keras_moe.analysis.prune_experts` to one from the number of experts that
            each block keeps to R@1, a dict of "mean" and "std".
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there is no model, or a method is unknown.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, Figures 14 and 15.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> curve = {2: {"mean": 0.3, "std": 0.1}, 4: {"mean": 0.4, "std": 0.1}}
    >>> path = os.path.join(tempfile.mkdtemp(), "pruning.png")
    >>> plots.plot_pruned_pairs({"LIMoE": {"text": {"router_drop": curve}}}, path)
    >>> os.path.exists(path)
    True
    """
    modalities = list(dict.fromkeys(x for row in rows.values() for x in row))
    methods = list(
        dict.fromkeys(x for row in rows.values() for y in row.values() for x in y)
    )
    if not modalities or not methods or not {*methods} <= {*_STYLES}:
        raise ValueError(
            f"Expected models with methods of {', '.join(_STYLES)}; received: {rows!r}"
        )
    figure = new_figure(figsize=(2.6 + 3.4 * len(modalities), 3.6), dpi=110)
    axes = figure.subplots(1, len(modalities), squeeze=False, sharey=True)[0]
    for axis, modality in zip(axes, modalities):
        counts = set()
        for number, row in enumerate(rows.values()):
            for method, curve in row.get(modality, {}).items():
                places = sorted(curve)
                counts.update(places)
                axis.errorbar(
                    places,
                    [100 * curve[count]["mean"] for count in places],
                    yerr=[100 * curve[count]["std"] for count in places],
                    color=f"C{number}",
                    linestyle=_STYLES[method],
                    marker="o",
                    markersize=4,
                    capsize=2.5,
                )
        axis.set_title(f"{modality} experts are pruned", fontsize=10)
        axis.set_xlabel("experts left in each block")
        axis.set_xticks(sorted(counts))
        # Pruning goes to the right, as in the paper.
        axis.invert_xaxis()
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("R@1, mean of both ways (%)")
    entries = [
        axes[-1].plot([], [], color=f"C{number}", marker="o", label=name)[0]
        for number, name in enumerate(rows)
    ]
    entries += [
        axes[-1].plot([], [], _STYLES[x], color="gray", label=x.replace("_", "-", 1))[0]
        for x in methods
    ]
    axes[-1].legend(
        handles=entries, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0)
    )
    save_figure(figure, path, title)


def plot_pair_training(
    curves: dict[str, dict],
    path: str | os.PathLike,
    title: str = "Contrastive accuracy along training",
    length: str = "epochs",
) -> None:
    """Draws accuracies along training, and saves the picture.

    A model that starts from another begins where that one's training ended. Bands are
    one standard deviation over the seeds.

    Args:
        curves: dict from the name of a model to a dict of "start", the length of the
            training before its own, "end", the length after it, and "accuracy", a list
            of dicts of "mean" and "std", at equal distances from after "start" to
            "end".
        path: path of the picture; its suffix is the format.
        title: title above the picture.
        length: unit of "start" and "end".

    Raises:
        ValueError: if there is no model.
        ImportError: if matplotlib is not installed.

    Reference:
        *CLIP-UP*, Figure 4.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> curve = [{"mean": 0.3, "std": 0.1}, {"mean": 0.4, "std": 0.1}]
    >>> path = os.path.join(tempfile.mkdtemp(), "upcycling.png")
    >>> curves = {"dense": {"start": 0, "end": 2, "accuracy": curve}}
    >>> plots.plot_pair_training(curves, path)
    >>> os.path.exists(path)
    True
    """
    if not curves:
        raise ValueError(f"Expected at least one model; received: {curves!r}")
    figure = new_figure(figsize=(7.4, 3.8), dpi=110)
    axis = figure.subplots()
    for number, (name, curve) in enumerate(curves.items()):
        points = curve["accuracy"]
        places = np.linspace(curve["start"], curve["end"], len(points) + 1)[1:]
        mean = 100 * np.array([point["mean"] for point in points])
        std = 100 * np.array([point["std"] for point in points])
        marker = "o" if len(points) == 1 else ""
        axis.plot(places, mean, color=f"C{number}", marker=marker, label=name)
        axis.fill_between(
            places, mean - std, mean + std, color=f"C{number}", alpha=0.15, lw=0
        )
    axis.set_xlabel(length)
    axis.set_ylabel("contrastive accuracy (%)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    save_figure(figure, path, title)
