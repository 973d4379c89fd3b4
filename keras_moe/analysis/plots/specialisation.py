"""Pictures of what experts specialise in, and of edits."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.plots.figure import checked_images, in_colour, new_figure
from keras_moe.analysis.specialisation import expert_load
from keras_moe.ops.checks import check_integer


def plot_expert_images(
    images: Any,
    routing: Any,
    path: str | os.PathLike,
    labels: Any = None,
    experts: Any = None,
    images_per_expert: int = 8,
    threshold: float | None = 0.5,
    seed: int | None = 0,
    title: str = "Images of each expert",
) -> None:
    """Draws images that use an expert, and saves the picture.

    One row for each expert, with the coefficient above each image and the label below.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        routing: a muMoE head's `Routing` of arrays (B, 1, E).
        path: where to save the picture; its suffix says the format.
        labels: names or numbers of the images' classes (B,), or None.
        experts: which experts; None takes the first ten that have an image.
        images_per_expert: images in a row.
        threshold: the least coefficient of an image that is shown.
        seed: images are drawn at random with it, as in Figure 2; None takes those with
            the largest coefficients, as in Figure 17.
        title: above the picture.

    Raises:
        ValueError: if the arrays do not fit, or no expert has an image.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figures 2, 16 and 17.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import plots
    >>> from keras_moe.ops import Routing
    >>> routing = Routing(*[np.eye(3)[:, None]] * 6)
    >>> path = os.path.join(tempfile.mkdtemp(), "images.png")
    >>> plots.plot_expert_images(np.zeros((3, 8, 8, 1)), routing, path)
    >>> os.path.exists(path)
    True
    """
    images, gates = checked_images(images), np.asarray(routing.gates)
    if gates.ndim != 3 or gates.shape[1] != 1 or len(gates) != len(images):
        raise ValueError(
            f"Expected gates ({len(images)}, 1, experts), one for each image; "
            f"received: shape={gates.shape}"
        )
    check_integer("images_per_expert", images_per_expert)
    gates, generator, rows = gates[:, 0], np.random.default_rng(seed), {}
    for expert in range(gates.shape[1]) if experts is None else experts:
        if not 0 <= expert < gates.shape[1]:
            raise ValueError(
                f"Expected experts below {gates.shape[1]}; received: {expert}"
            )
        found = np.argsort(-gates[:, expert], kind="stable")
        found = found[gates[found, expert] >= (threshold or 0.0)]
        if seed is not None:
            found = generator.permutation(found)
        if len(found):
            rows[expert] = found[:images_per_expert]
        if experts is None and len(rows) == 10:
            break
    if not rows:
        raise ValueError(
            "Expected an expert with an image at least; received: none with a "
            f"coefficient of {threshold}"
        )
    height = 0.35 + 0.95 * images.shape[1] / images.shape[2]
    size = (0.9 + 0.95 * images_per_expert, 0.7 + height * len(rows))
    figure = new_figure(figsize=size, dpi=110)
    axes = figure.subplots(len(rows), images_per_expert, squeeze=False)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_frame_on(False)
    for row, (expert, found) in zip(axes, rows.items()):
        row[0].set_ylabel(
            f"expert {expert}", rotation=0, ha="right", va="center", fontsize=9
        )
        for axis, index in zip(row, found):
            axis.imshow(in_colour(images[index]))
            axis.set_title(f"{gates[index, expert]:.2f}", fontsize=7, pad=2)
            if labels is not None:
                axis.set_xlabel(str(labels[index]), fontsize=7, labelpad=1)
    figure.suptitle(title, fontsize=11)
    # Room for the title, in inches.
    figure.tight_layout(pad=0.4, rect=(0, 0, 1, 1 - 0.25 / size[1]))
    figure.savefig(path)


def plot_expert_patches(
    images: Any,
    routing: Any,
    grid: tuple[int, int],
    path: str | os.PathLike,
    experts: Any = None,
    patches_per_expert: int = 8,
    title: str = "Patches that use an expert most",
) -> None:
    """Draws the patches that use an expert most, and their images; saves the picture.

    Two rows for each expert: the patches, of as many images, and below each its image
    with the patch framed.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        routing: a block's `Routing` of arrays (B, N, E), N the patches of the grid,
            with or without a class token before them.
        grid: patches down and across.
        path: where to save the picture; its suffix says the format.
        experts: which experts; None takes the first three.
        patches_per_expert: patches in a row.
        title: above the picture.

    Raises:
        ValueError: if the arrays do not fit.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figures 4 and 12.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import plots
    >>> from keras_moe.ops import Routing
    >>> routing = Routing(*[np.ones((2, 4, 2))] * 6)
    >>> path = os.path.join(tempfile.mkdtemp(), "patches.png")
    >>> plots.plot_expert_patches(np.zeros((2, 8, 8, 1)), routing, (2, 2), path)
    >>> os.path.exists(path)
    True
    """
    images, gates = checked_images(images), np.asarray(routing.gates)
    num_patches = grid[0] * grid[1]
    fits = gates.ndim == 3 and gates.shape[1] in (num_patches, num_patches + 1)
    if not fits or len(gates) != len(images):
        raise ValueError(
            f"Expected gates ({len(images)}, {num_patches} or {num_patches + 1}, "
            f"experts) for grid={grid}; received: shape={gates.shape}"
        )
    gates = gates[:, -num_patches:]
    if experts is None:
        experts = range(min(gates.shape[2], 3))
    columns = min(check_integer("patches_per_expert", patches_per_expert), len(images))
    height, width = images.shape[1] // grid[0], images.shape[2] // grid[1]
    size = (0.9 + 0.95 * columns, 0.6 + 2.1 * len(experts))
    figure = new_figure(figsize=size, dpi=110)
    axes = figure.subplots(2 * len(experts), columns, squeeze=False)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    for number, expert in enumerate(experts):
        if not 0 <= expert < gates.shape[2]:
            raise ValueError(
                f"Expected experts below {gates.shape[2]}; received: {expert}"
            )
        best = gates[:, :, expert].max(axis=1)
        for column, index in enumerate(np.argsort(-best, kind="stable")[:columns]):
            row, across = divmod(int(gates[index, :, expert].argmax()), grid[1])
            top, left = row * height, across * width
            image = in_colour(images[index])
            patch, whole = axes[2 * number : 2 * number + 2, column]
            patch.imshow(image[top : top + height, left : left + width], vmin=0, vmax=1)
            patch.set_title(f"{best[index]:.2f}", fontsize=7, pad=2)
            whole.imshow(image)
            frame_x = np.array([left, left + width, left + width, left, left]) - 0.5
            frame_y = np.array([top, top, top + height, top + height, top]) - 0.5
            whole.plot(frame_x, frame_y, color="tab:red", linewidth=1.5)
        axes[2 * number, 0].set_ylabel(
            f"expert {expert}", rotation=0, ha="right", va="center", fontsize=9
        )
    figure.suptitle(title, fontsize=11)
    # Room for the title, in inches.
    figure.tight_layout(pad=0.4, rect=(0, 0, 1, 1 - 0.25 / size[1]))
    figure.savefig(path)


def plot_ablation(
    ablations: dict[str, Any],
    path: str | os.PathLike,
    class_names: list[str] | None = None,
    experts_per_model: int = 4,
    least_change: float = 0.5,
    title: str = "Accuracy lost without an expert",
) -> None:
    """Draws the share of its accuracy that each class loses without an expert.

    One row for each model, with its first experts that matter; saves the picture.

    Args:
        ablations: `ExpertAblation` by the name of a model, see
            `keras_moe.analysis.ablate_experts`.
        path: where to save the picture; its suffix says the format.
        class_names: of the classes; None numbers them.
        experts_per_model: columns.
        least_change: experts are shown, in order, that change the accuracy of some
            class by as much; where there are fewer, those that change most.
        title: above the picture.

    Raises:
        ValueError: if there is no model.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figures 18 and 19.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import ExpertAblation, plots
    >>> found = ExpertAblation(np.arange(2), np.ones(2), np.ones(2), np.eye(2))
    >>> path = os.path.join(tempfile.mkdtemp(), "ablation.png")
    >>> plots.plot_ablation({"2 experts": found}, path)
    >>> os.path.exists(path)
    True
    """
    if not ablations:
        raise ValueError("Expected at least one model; received: ablations={}")
    size = (2.3 * experts_per_model + 1, 1.6 * len(ablations) + 0.6)
    figure = new_figure(figsize=size, dpi=110)
    axes = figure.subplots(
        len(ablations), experts_per_model, sharey=True, squeeze=False
    )
    for row, (name, ablation) in zip(axes, ablations.items()):
        changes = ablation.changes
        largest = np.abs(changes).max(axis=1)
        chosen = np.flatnonzero(largest >= least_change)[:experts_per_model]
        if len(chosen) < experts_per_model:
            most = np.argsort(-largest, kind="stable")[:experts_per_model]
            chosen = np.sort(most)
        row[0].set_ylabel(f"{name}\n% lost", fontsize=8)
        for axis in row[len(chosen) :]:
            axis.axis("off")
        places = np.arange(changes.shape[1])
        for axis, index in zip(row, chosen):
            axis.bar(places, 100 * changes[index], width=1.0, color="tab:blue")
            axis.axhline(0, color="black", linewidth=0.5)
            score = ablation.polysemanticity[index]
            axis.set_title(
                f"expert {ablation.experts[index]}, p = {score:.2f}", fontsize=8, pad=3
            )
            axis.tick_params(labelsize=6)
            if class_names is not None:
                axis.set_xticks(places, class_names)
    if class_names is None:
        axes[-1, 0].set_xlabel("class", fontsize=8)
    axes[0, 0].set_ylim(min(-5, axes[0, 0].get_ylim()[0]), 105)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path)


def plot_polysemanticity(
    scores: dict[str, dict[int, list[float]]],
    path: str | os.PathLike,
    title: str = "More experts, each with less to do",
) -> None:
    """Draws the experts' mean polysemanticity against their number; saves the picture.

    Args:
        scores: by the name of a model: by the number of experts, the mean
            polysemanticity of each run.
        path: where to save the picture; its suffix says the format.
        title: above the picture.

    Raises:
        ValueError: if there is nothing to draw.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figure 3.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> path = os.path.join(tempfile.mkdtemp(), "polysemanticity.png")
    >>> plots.plot_polysemanticity({"final": {2: [2.0, 2.2], 4: [1.1, 1.0]}}, path)
    >>> os.path.exists(path)
    True
    """
    if not scores or not all(scores.values()):
        raise ValueError(f"Expected scores of models; received: scores={scores}")
    figure = new_figure(figsize=(5.2, 3.7), dpi=110)
    axis = figure.subplots()
    counts = sorted({count for rows in scores.values() for count in rows})
    for name, rows in scores.items():
        own = sorted(rows)
        axis.errorbar(
            own,
            [np.mean(rows[count]) for count in own],
            yerr=[np.std(rows[count], ddof=len(rows[count]) > 1) for count in own],
            marker="o",
            capsize=3.0,
            label=name,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("experts")
    axis.set_ylabel("mean class-level polysemanticity")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    axis.set_title(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path)


def plot_expert_load(
    routings: dict[str, Any],
    path: str | os.PathLike,
    threshold: float = 0.5,
    title: str = "Expert load",
) -> None:
    """Draws how many tokens each expert serves, and saves the picture.

    Args:
        routings: by the name of a model, a `Routing` of arrays (B, N, E).
        path: where to save the picture; its suffix says the format.
        threshold: the least coefficient that counts.
        title: above the picture.

    Raises:
        ValueError: if there is no model, or an array does not fit.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figure 22.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import plots
    >>> from keras_moe.ops import Routing
    >>> path = os.path.join(tempfile.mkdtemp(), "load.png")
    >>> plots.plot_expert_load({"2 experts": Routing(*[np.ones((3, 1, 2))] * 6)}, path)
    >>> os.path.exists(path)
    True
    """
    if not routings:
        raise ValueError("Expected at least one model; received: routings={}")
    figure = new_figure(figsize=(7.0, 0.7 + 1.5 * len(routings)), dpi=110)
    axes = figure.subplots(len(routings), 1, squeeze=False)[:, 0]
    colours = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
    for axis, (name, routing) in zip(axes, routings.items()):
        load = expert_load(routing, threshold)
        experts = np.arange(len(load))
        axis.bar(experts, load, color=[colours[e % len(colours)] for e in experts])
        unused = int((load == 0).sum())
        axis.set_title(f"{name}; {unused} without a token", fontsize=8, pad=3)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.tick_params(labelsize=7)
        axis.set_ylabel(f"tokens, a >= {threshold:g}", fontsize=7)
    axes[-1].set_xlabel("expert", fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path)


def plot_subpopulations(
    before: Any,
    after: Any,
    path: str | os.PathLike,
    target_names: Any = None,
    attribute_names: Any = None,
    target: tuple[int, int] | None = None,
    title: str = "Accuracy by subpopulation",
) -> None:
    """Draws accuracies before and after an edit, and their difference.

    Saves the picture.

    Args:
        before: `FairnessMetrics`, see `keras_moe.analysis.fairness_metrics`.
        after: the same, of the edited model.
        path: where to save the picture; its suffix says the format.
        target_names: of the values of the target, the rows; None numbers them.
        attribute_names: of the values of the attribute, the columns.
        target: the subpopulation that the edit was for, which gets a frame.
        title: above the picture.

    Raises:
        ValueError: if the metrics are of different subpopulations.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figure 25.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import fairness_metrics, plots
    >>> found = fairness_metrics([1, 0, 0, 1], [0, 0, 1, 1], [0, 1, 0, 1])
    >>> path = os.path.join(tempfile.mkdtemp(), "subpopulations.png")
    >>> plots.plot_subpopulations(found, found, path, target=(1, 0))
    >>> os.path.exists(path)
    True
    """
    first, second = before.accuracies, after.accuracies
    if first.shape != second.shape:
        raise ValueError(
            "Expected metrics of the same subpopulations; received: shapes "
            f"{first.shape} and {second.shape}"
        )
    rows = target_names or [f"target {i}" for i in range(first.shape[0])]
    columns = attribute_names or [f"attribute {i}" for i in range(first.shape[1])]
    figure = new_figure(figsize=(9.6, 1.3 + 0.8 * len(rows)), dpi=110)
    axes = figure.subplots(1, 3)
    reach = max(np.abs(second - first).max(), 0.01)
    for axis, name, values, limits, colours in (
        (axes[0], "before", first, (0, 1), "viridis"),
        (axes[1], "after", second, (0, 1), "viridis"),
        (axes[2], "difference", second - first, (-reach, reach), "RdBu"),
    ):
        axis.imshow(values, vmin=limits[0], vmax=limits[1], cmap=colours, aspect="auto")
        axis.set_xticks(range(len(columns)), columns, fontsize=8)
        axis.set_yticks(range(len(rows)), rows if axis is axes[0] else [], fontsize=8)
        axis.set_title(name, fontsize=9)
        for (row, column), value in np.ndenumerate(values):
            text = f"{value:+.3f}" if name == "difference" else f"{value:.3f}"
            share = (value - limits[0]) / (limits[1] - limits[0])
            light = 0.25 < share < 0.75 if name == "difference" else share > 0.5
            axis.text(
                column, row, text, ha="center", va="center", fontsize=9,
                color="black" if light else "white",
            )  # fmt: skip
        if target is not None:
            x, y = target[1] + np.array([-1, 1, 1, -1, -1]) * 0.47, target[0]
            y = y + np.array([-1, -1, 1, 1, -1]) * 0.47
            axis.plot(x, y, color="lime", linewidth=2.5)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path)


def plot_truncated_svd(
    found: dict[str, Any],
    path: str | os.PathLike,
    title: str = "MLPs with their largest singular values alone",
) -> None:
    """Draws a model's score by the share of singular values kept; saves the picture.

    Args:
        found: by the name of a model, `TruncatedSVD`, see
            `keras_moe.analysis.truncated_svd`.
        path: where to save the picture; its suffix says the format.
        title: above the picture.

    Raises:
        ValueError: if there is no model.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figure 7.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import TruncatedSVD, plots
    >>> path = os.path.join(tempfile.mkdtemp(), "svd.png")
    >>> found = TruncatedSVD([0.25, 0.5], [0.7, 0.9], 0.95, [])
    >>> plots.plot_truncated_svd({"mixer": found}, path)
    >>> os.path.exists(path)
    True
    """
    if not found:
        raise ValueError("Expected at least one model; received: found={}")
    figure = new_figure(figsize=(5.2, 3.7), dpi=110)
    axis = figure.subplots()
    for name, row in found.items():
        order = np.argsort(row.shares)
        shares = [100 * row.shares[i] for i in order]
        (line,) = axis.plot(
            shares, [row.scores[i] for i in order], marker="o", label=name
        )
        axis.axhline(
            row.full, linestyle="--", color=line.get_color(), label=f"{name}, as it is"
        )
    axis.set_xlabel("% of singular values kept")
    axis.set_ylabel("score")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    axis.set_title(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path)
