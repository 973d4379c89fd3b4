"""The pictures of studies of pairs: configurations, thresholds and groups."""

import os

import numpy as np

from keras_moe.analysis.plots.figure import new_figure, save_figure

# Labels, markers and colours of what is drawn for each direction and modality.
_RECALLS = {
    "image_to_text_r1": ("image to text", "s", "tab:blue"),
    "text_to_image_r1": ("text to image", "o", "tab:orange"),
}
_EXPERTS = {
    "image_experts": ("image", "s", "tab:blue"),
    "text_experts": ("text", "o", "tab:orange"),
}


def plot_pair_comparison(
    rows: dict[str, dict],
    path: str | os.PathLike,
    title: str = "Models of pairs",
) -> None:
    """Draws retrieval beside the experts that models use, and saves the picture.

    Bars are one standard deviation over the seeds. The right panel, the number of
    experts that serve 90% of each modality's tokens, is there if a model has experts.

    Args:
        rows: dict from the name of a model to its figures: "image_to_text_r1",
            "text_to_image_r1", and where it has experts "image_experts" and
            "text_experts", each a dict of "mean" and "std". Others are left alone.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there is no model.
        ImportError: if matplotlib is not installed.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> figures = {
    ...     "image_to_text_r1": {"mean": 0.4, "std": 0.1},
    ...     "text_to_image_r1": {"mean": 0.3, "std": 0.1},
    ... }
    >>> path = os.path.join(tempfile.mkdtemp(), "losses.png")
    >>> plots.plot_pair_comparison({"none": figures}, path)
    >>> os.path.exists(path)
    True
    """
    _check("models", rows)
    has_experts = any(name in row for row in rows.values() for name in _EXPERTS)
    panels = [(_RECALLS, "R@1 (%)", 100.0)]
    if has_experts:
        panels.append((_EXPERTS, "experts for 90% of tokens", 1.0))
    figure = new_figure(
        figsize=(2.2 + 3.6 * len(panels), 1.5 + 0.34 * len(rows)), dpi=110
    )
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    places = np.arange(len(rows))
    for axis, (lines, label, scale) in zip(axes, panels):
        for shift, (name, (text, marker, colour)) in zip((-0.12, 0.12), lines.items()):
            own = [n for n, row in zip(places, rows.values()) if name in row]
            figures = [row[name] for row in rows.values() if name in row]
            axis.errorbar(
                [scale * value["mean"] for value in figures],
                np.array(own) + shift,
                xerr=[scale * value["std"] for value in figures],
                linestyle="",
                marker=marker,
                color=colour,
                capsize=3.0,
                label=text,
                clip_on=False,
            )
        axis.set_xlabel(label)
        axis.margins(x=0.08)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2)
    axes[0].set_yticks(places, list(rows), fontsize=9)
    # The first row is on top.
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    save_figure(figure, path, title)


def plot_entropy_thresholds(
    rows: list[dict],
    path: str | os.PathLike,
    title: str = "Global entropy thresholds",
) -> None:
    """Draws performance, entropies and experts by soft minimum, and saves the picture.

    A line is a soft minimum of image experts. The dashed grey lines are the threshold
    itself and as many experts as the soft minimum of text.

    Args:
        rows: dicts with "text" and "image", the soft minima, and "figures": "r1",
            "text_routing_entropy", "image_routing_entropy", "text_experts" and
            "image_experts", each a dict of "mean" and "std".
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there are no rows.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, Figures 8, 9 and 10.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> one = {"mean": 0.5, "std": 0.1}
    >>> names = ("r1", "text_routing_entropy", "image_routing_entropy")
    >>> figures = dict.fromkeys((*names, "text_experts", "image_experts"), one)
    >>> path = os.path.join(tempfile.mkdtemp(), "thresholds.png")
    >>> plots.plot_entropy_thresholds(
    ...     [{"text": 2, "image": 4, "figures": figures}], path
    ... )
    >>> os.path.exists(path)
    True
    """
    _check("rows", rows)
    figure = new_figure(figsize=(11.5, 3.6), dpi=110)
    axes = figure.subplots(1, 3)
    texts = sorted({row["text"] for row in rows})
    images = sorted({row["image"] for row in rows})
    for number, image in enumerate(images):
        own = sorted(
            (row for row in rows if row["image"] == image), key=lambda x: x["text"]
        )
        style = {"alpha": 0.35 + 0.65 * (number + 1) / len(images)}
        _line(axes[0], own, "r1", 100.0, color="tab:green", label=f"{image:g}", **style)
        for axis, name in ((axes[1], "routing_entropy"), (axes[2], "experts")):
            _line(axis, own, f"image_{name}", color="tab:blue", **style)
            _line(axis, own, f"text_{name}", color="tab:orange", **style)
    line = {"color": "gray", "linestyle": "--", "lw": 1.0, "zorder": 0}
    axes[1].plot(texts, np.log(texts), **line)
    axes[2].plot(texts, texts, **line)
    for axis, label in zip(
        axes,
        ("R@1, mean of both ways (%)", "routing entropy (nats)", "experts for 90%"),
    ):
        axis.set_xlabel("soft minimum of text experts")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    axes[0].legend(title="of image experts", fontsize=8, title_fontsize=8)
    handles = [
        axes[2].plot([], [], color=colour, marker=marker, markersize=4, label=text)[0]
        for text, marker, colour in (
            ("image", "o", "tab:blue"),
            ("text", "o", "tab:orange"),
        )
    ]
    axes[2].legend(
        handles=handles, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0)
    )
    save_figure(figure, path, title)


def plot_group_sizes(
    rows: dict[int, dict],
    path: str | os.PathLike,
    title: str = "Groups of a batch",
) -> None:
    """Draws retrieval and the time of an epoch by number of groups, and saves it.

    Args:
        rows: dict from the number of groups to a dict of "r1" and "seconds", each a
            dict of "mean" and "std"; "seconds" may be None.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there are no rows.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, Figure 16.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> row = {"r1": {"mean": 0.4, "std": 0.1}, "seconds": {"mean": 2.0, "std": 0.1}}
    >>> path = os.path.join(tempfile.mkdtemp(), "groups.png")
    >>> plots.plot_group_sizes({1: row}, path)
    >>> os.path.exists(path)
    True
    """
    _check("rows", rows)
    figure = new_figure(figsize=(5.6, 3.7), dpi=110)
    axis = figure.subplots()
    counts = sorted(rows)
    recalls = [rows[count]["r1"] for count in counts]
    lines = [
        axis.errorbar(
            counts,
            [100 * value["mean"] for value in recalls],
            yerr=[100 * value["std"] for value in recalls],
            marker="o",
            capsize=3.0,
            color="tab:blue",
            label="R@1",
        )
    ]
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlabel("groups of a batch")
    axis.set_ylabel("R@1, mean of both ways (%)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    if all(rows[count]["seconds"] for count in counts):
        seconds = [rows[count]["seconds"] for count in counts]
        # Relative to the first.
        scale = 1.0 / seconds[0]["mean"]
        times = axis.twinx()
        lines.append(
            times.errorbar(
                counts,
                [scale * value["mean"] for value in seconds],
                yerr=[scale * value["std"] for value in seconds],
                marker="s",
                capsize=3.0,
                color="tab:orange",
                label="time of an epoch",
            )
        )
        times.set_ylabel(f"time, relative to {counts[0]}")
        times.set_ylim(bottom=0)
    axis.legend(handles=lines, fontsize=8, loc="lower left")
    save_figure(figure, path, title)


def _line(axis, rows, name, scale=1.0, **style):
    """A figure of rows by their soft minimum of text."""
    values = [row["figures"][name] for row in rows]
    axis.errorbar(
        [row["text"] for row in rows],
        [scale * value["mean"] for value in values],
        yerr=[scale * value["std"] for value in values],
        marker="o",
        markersize=4,
        capsize=2.5,
        **style,
    )


def _check(name, rows):
    if not rows:
        raise ValueError(f"Expected at least one of {name}; received: {rows!r}")
