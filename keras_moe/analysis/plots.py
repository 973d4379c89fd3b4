"""Pictures of what the experts do. The only module that needs matplotlib."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.expert_views import expert_views


def _figure(**kwargs):
    """A figure for files: it needs no display, and leaves the caller's alone."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib: pip install 'keras-moe[plots]'"
        ) from error
    figure = Figure(**kwargs)
    FigureCanvasAgg(figure)
    return figure


def _images(images):
    """Images as an array, if they can be drawn."""
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise ValueError(
            "Expected images (batch, height, width, 1 or 3); "
            f"received: shape={images.shape}"
        )
    return images


def _in_colour(image):
    """An image in [-1, 1] as matplotlib draws it."""
    image = np.clip((image + 1.0) / 2.0, 0.0, 1.0)
    return np.broadcast_to(image, (*image.shape[:2], 3))


def plot_expert_views(
    images: Any,
    routing: Any,
    grid: tuple[int, int],
    path: str | os.PathLike,
    images_per_expert: int = 8,
    title: str = "What each expert looks at",
) -> None:
    """Draws what each expert of a layer looks at, and saves the picture.

    One row for each expert: a map of where in the image it works, then the images in
    which it works most, with the patches of other experts faded.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        routing: the layer's `Routing` of arrays (B, N, E).
        grid: patches down and across.
        path: where to save the picture; its suffix says the format.
        images_per_expert: images in a row.
        title: above the picture.

    Raises:
        ValueError: if images and routing do not fit.
        ImportError: if matplotlib is not installed.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import plots
    >>> from keras_moe.ops import Routing
    >>> routing = Routing(*[np.ones((2, 4, 2))] * 6)
    >>> path = os.path.join(tempfile.mkdtemp(), "experts.png")
    >>> plots.plot_expert_views(np.zeros((2, 8, 8, 1)), routing, (2, 2), path)
    >>> os.path.exists(path)
    True
    """
    images = _images(images)
    if len(images) != len(routing.combined):
        raise ValueError(
            "Expected a routing record for each image; received: "
            f"{len(images)} images and {len(routing.combined)} records"
        )
    views = expert_views(routing, grid, images_per_expert)
    columns = 1 + min(images_per_expert, len(images))
    figure = _figure(figsize=(1.0 + columns, 0.9 + 1.05 * len(views)), dpi=110)
    axes = figure.subplots(len(views), columns, squeeze=False)
    top = max(view.position_shares.max() for view in views)
    height, width = images.shape[1] // grid[0], images.shape[2] // grid[1]
    for row, (expert_axes, view) in enumerate(zip(axes, views)):
        for axis in expert_axes:
            axis.set_xticks([])
            axis.set_yticks([])
        heat = expert_axes[0].imshow(
            view.position_shares, vmin=0, vmax=top or 1, cmap="viridis"
        )
        expert_axes[0].set_ylabel(
            f"expert {row}", rotation=0, ha="right", va="center", fontsize=9
        )
        for axis, index, patches in zip(expert_axes[1:], view.images, view.patches):
            axis.imshow(
                _faded(images[index], np.kron(patches, np.ones((height, width))))
            )
    axes[0, 0].set_title("where", fontsize=9)
    if columns > 1:
        axes[0, 1].set_title("images where it works most", fontsize=9, loc="left")
    figure.suptitle(title, fontsize=11)
    figure.subplots_adjust(left=0.09, right=0.93, top=0.91, bottom=0.02, hspace=0.06)
    bar = figure.colorbar(heat, cax=figure.add_axes((0.945, 0.3, 0.012, 0.4)))
    bar.set_label("share of images", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path)


def _faded(image, chosen):
    """The image in colour, with what is not chosen faded to blue."""
    image = _in_colour(image)
    blue = np.array([0.16, 0.24, 0.42])
    return np.where(chosen[..., None] > 0, image, 0.25 * image + 0.75 * blue)


_KINDS = {
    "ffn": ("FFN", "tab:blue"),
    "constant": ("constant", "tab:green"),
    "copy": ("copy", "tab:orange"),
    "zero": ("zero", "lightgray"),
}


def plot_compute_maps(
    images: Any,
    maps: Any,
    path: str | os.PathLike,
    num_selected_experts: int = 2,
    title: str = "Where the model spends compute",
) -> None:
    """Draws how many FFN experts each patch met over its image, and saves the picture.

    Each image stands beside itself with the map laid over it.

    Args:
        images: (B, height, width, channels) in [-1, 1], channels 1 or 3.
        maps: (B, rows, columns), as `keras_moe.analysis.compute_map` returns.
        path: where to save the picture; its suffix says the format.
        num_selected_experts: K, the most FFN experts that a token may meet.
        title: above the picture.

    Raises:
        ValueError: if images and maps do not fit.
        ImportError: if matplotlib is not installed.

    Reference:
        *MoE++*, Figure 5, for images.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import plots
    >>> path = os.path.join(tempfile.mkdtemp(), "compute.png")
    >>> plots.plot_compute_maps(np.zeros((2, 8, 8, 1)), np.ones((2, 2, 2)), path)
    >>> os.path.exists(path)
    True
    """
    images, maps = _images(images), np.asarray(maps)
    if maps.ndim != 3 or len(maps) != len(images) or not len(maps):
        raise ValueError(
            f"Expected a map (rows, columns) for each of {len(images)} images; "
            f"received: shape={maps.shape}"
        )
    columns = min(len(images), 6)
    rows = -(-len(images) // columns)
    size = (2.3 * columns + 1.0, 1.35 * rows + 0.5)
    figure = _figure(figsize=size, dpi=110)
    axes = figure.subplots(rows, 2 * columns, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    height, width = images.shape[1:3]
    for index, (image, counts) in enumerate(zip(images, maps)):
        row, column = divmod(index, columns)
        plain, overlaid = axes[row, 2 * column], axes[row, 2 * column + 1]
        image = _in_colour(image)
        for axis in (plain, overlaid):
            axis.imshow(image, extent=(0, width, height, 0))
        heat = overlaid.imshow(
            counts,
            extent=(0, width, height, 0),
            vmin=0,
            vmax=num_selected_experts,
            cmap="magma",
            alpha=0.7,
        )
        overlaid.set_title(f"{counts.mean():.2f}", fontsize=8, pad=2)
    figure.suptitle(title, fontsize=11)
    # Margins in inches, whatever the number of images.
    figure.subplots_adjust(
        left=0.05 / size[0],
        right=1 - 0.9 / size[0],
        top=1 - 0.5 / size[1],
        bottom=0.05 / size[1],
        wspace=0.06,
    )
    place = (1 - 0.75 / size[0], 0.1, 0.12 / size[0], 0.65)
    bar = figure.colorbar(heat, cax=figure.add_axes(place))
    bar.set_label("FFN experts per token", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path)


def plot_load_by_kind(
    loads: dict[str, Any],
    path: str | os.PathLike,
    title: str = "Load of each kind of expert",
) -> None:
    """Draws what each MoE block gives to each kind of expert, and saves the picture.

    Args:
        loads: `KindLoads` by block, as `keras_moe.analysis.load_by_kind` returns.
        path: where to save the picture; its suffix says the format.
        title: above the picture.

    Raises:
        ValueError: if there is no block.
        ImportError: if matplotlib is not installed.

    Reference:
        *MoE++*, Figure 4.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import KindLoads, plots
    >>> shares = {"ffn": 0.6, "zero": 0.2, "copy": 0.1, "constant": 0.1}
    >>> loads = {"block_0": KindLoads(shares, {**shares, "ffn": 1.2}, 0.0)}
    >>> path = os.path.join(tempfile.mkdtemp(), "loads.png")
    >>> plots.plot_load_by_kind(loads, path)
    >>> os.path.exists(path)
    True
    """
    if not loads:
        raise ValueError("Expected at least one MoE block; received: loads={}")
    figure = _figure(figsize=(6.5, 0.9 + 0.42 * len(loads)), dpi=110)
    axis = figure.subplots()
    names = list(loads)
    left = np.zeros(len(names))
    for kind, (label, colour) in _KINDS.items():
        shares = np.array([100 * loads[name].shares[kind] for name in names])
        axis.barh(names, shares, left=left, color=colour, label=label, height=0.7)
        left += shares
    for row, name in enumerate(names):
        axis.text(
            101, row, f"{loads[name].experts_per_token['ffn']:.2f}", va="center",
            fontsize=8,
        )  # fmt: skip
    axis.set_xlim(0, 112)
    axis.invert_yaxis()
    axis.set_xlabel("% of assignments; right: FFN experts per token", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.set_title(title, fontsize=11)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def plot_routing_scores(
    scores: dict[str, Any],
    path: str | os.PathLike,
    title: str = "Routing scores",
) -> None:
    """Draws how the two highest gates of tokens spread, and saves the picture.

    Args:
        scores: `RoutingScores` by the name of a model, such as with and without gating
            residuals; see `keras_moe.analysis.routing_scores`.
        path: where to save the picture; its suffix says the format.
        title: above the picture.

    Raises:
        ValueError: if there are no scores.
        ImportError: if matplotlib is not installed.

    Reference:
        *MoE++*, Figure 6.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import RoutingScores, plots
    >>> scores = RoutingScores(np.linspace(0.4, 1, 50), np.linspace(0, 0.4, 50))
    >>> path = os.path.join(tempfile.mkdtemp(), "scores.png")
    >>> plots.plot_routing_scores({"with gating residuals": scores}, path)
    >>> os.path.exists(path)
    True
    """
    if not scores:
        raise ValueError("Expected scores of at least one model; received: scores={}")
    figure = _figure(figsize=(4.2 * len(scores), 3.7), dpi=110)
    axes = figure.subplots(1, len(scores), sharex=True, sharey=True, squeeze=False)[0]
    bins = np.linspace(0, 1, 41)
    for axis, (name, values) in zip(axes, scores.items()):
        for label, gates, colour in (
            ("highest", values.highest, "tab:blue"),
            ("second-highest", values.second, "tab:orange"),
        ):
            axis.hist(
                gates,
                bins,
                alpha=0.6,
                color=colour,
                weights=np.full(len(gates), 100 / len(gates)),
                label=f"{label}: mean {gates.mean():.3f}, variance {gates.var():.4f}",
            )
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("gate")
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    axes[0].set_ylabel("% of tokens")
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path)


def plot_tau_study(
    speed: dict,
    training: dict,
    path: str | os.PathLike,
    title: str = "MoE++ by tau",
) -> None:
    """Draws throughput and accuracy against tau, and saves the picture.

    Args:
        speed: the part "speed" of the results of `tools/moepp_study.py`.
        training: the part "training".
        path: where to save the picture; its suffix says the format.
        title: above the picture.

    Raises:
        ValueError: if the parts have no tau.
        ImportError: if matplotlib is not installed.

    Reference:
        *MoE++*, Table 3.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> rows = {"0.5": {"throughput_increase": 0.8, "by_flops": 1.0}}
    >>> row = {"test_accuracy": {"mean": 0.97, "std": 0.01}}
    >>> path = os.path.join(tempfile.mkdtemp(), "tau.png")
    >>> training = {"rows": {"tau=0.5": row, "vanilla": row}}
    >>> plots.plot_tau_study({"forms": {"limited": rows}}, training, path)
    >>> os.path.exists(path)
    True
    """
    forms, rows = speed["forms"], training["rows"]
    by_tau = {
        float(name.removeprefix("tau=")): row["test_accuracy"]
        for name, row in rows.items()
        if name.startswith("tau=")
    }
    if not by_tau or not all(set(times) - {"vanilla"} for times in forms.values()):
        raise ValueError("Expected results for at least one tau; received: none")
    if "vanilla" not in rows:
        raise ValueError(
            f"Expected a row 'vanilla'; received: {', '.join(map(str, rows))}"
        )
    figure = _figure(figsize=(9.0, 3.6), dpi=110)
    left, right = figure.subplots(1, 2)
    for form, times in forms.items():
        taus = sorted(float(name) for name in times if name != "vanilla")
        increases = [100 * times[f"{tau:g}"]["throughput_increase"] for tau in taus]
        left.plot(taus, increases, marker="o", label=f"measured, {form}")
    bound = [100 * times[f"{tau:g}"]["by_flops"] for tau in taus]
    left.plot(taus, bound, linestyle="--", color="gray", label="by FLOPs")
    left.set_ylabel("more throughput than vanilla (%)")
    left.legend(fontsize=8)
    taus = sorted(by_tau)
    right.errorbar(
        taus,
        [100 * by_tau[tau]["mean"] for tau in taus],
        yerr=[100 * by_tau[tau]["std"] for tau in taus],
        marker="o",
        capsize=3.0,
        label="MoE++",
    )
    vanilla = 100 * rows["vanilla"]["test_accuracy"]["mean"]
    right.axhline(vanilla, linestyle="--", color="gray", label="vanilla")
    right.set_ylabel("test accuracy (%)")
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.set_xlabel("tau")
        axis.grid(alpha=0.25)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path)


def plot_training_history(
    history: dict[str, Any],
    path: str | os.PathLike,
    title: str = "Training",
) -> None:
    """Draws loss and accuracy over the epochs, and saves the picture.

    Args:
        history: lists with a value for each epoch, as `fit(...).history`: "loss" and
            "accuracy", or another metric, and "val_" before the name for those of
            the test images. Each metric has a panel of its own.
        path: where to save the picture; its suffix says the format.
        title: above the picture.

    Raises:
        ValueError: if there are no epochs.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multilinear Mixture of Experts*, Figure 10.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> history = {"loss": [2.0, 1.0], "val_loss": [2.1, 1.2], "accuracy": [0.3, 0.6]}
    >>> path = os.path.join(tempfile.mkdtemp(), "training.png")
    >>> plots.plot_training_history(history, path)
    >>> os.path.exists(path)
    True
    """
    names = list(dict.fromkeys(name.removeprefix("val_") for name in history))
    if not names or not all(len(values) for values in history.values()):
        raise ValueError(f"Expected at least one epoch; received: history={history}")
    figure = _figure(figsize=(4.5 * len(names), 3.4), dpi=110)
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for axis, name in zip(axes, names):
        for key, label, marker in (
            (name, "training", "."),
            (f"val_{name}", "test", "o"),
        ):
            values = history.get(key)
            if values is not None:
                epochs = np.arange(1, len(values) + 1)
                # One epoch is a point, and many are a line.
                marker = marker if len(values) < 20 else ""
                axis.plot(epochs, values, marker=marker, label=label)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path)


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
    figure = _figure(figsize=(9.5, 5.0), dpi=110)
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
