"""The pictures that only the studies draw.

A spread is a dict of "mean" and "std" over seeds, as `study.spread` makes it; error
bars and bands are one standard deviation.
"""

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from keras_moe.analysis.plots._figure import new_figure, save_figure

# The label, marker and colour of each router; the markers are like those of Figure 1 of
# *Routers in Vision Mixture of Experts*.
ROUTERS = {
    "softmax_token_choice": ("Softmax Token Choice", "x", "tab:red"),
    "sinkhorn_token_choice": ("Sinkhorn Token Choice", "P", "tab:orange"),
    "softmax_expert_choice": ("Softmax Expert Choice", "s", "tab:blue"),
    "sinkhorn_expert_choice": ("Sinkhorn Expert Choice", "o", "tab:cyan"),
    "sparsity_constrained_expert_choice": (
        "Sparsity-constrained Expert Choice",
        "^",
        "tab:green",
    ),
    "soft": ("Soft", "*", "tab:purple"),
}
# Labels, markers and colours of what is drawn for each direction and modality.
RECALLS = {
    "image_to_text_r1": ("image to text", "s", "tab:blue"),
    "text_to_image_r1": ("text to image", "o", "tab:orange"),
}
EXPERTS = {
    "image_experts": ("image", "s", "tab:blue"),
    "text_experts": ("text", "o", "tab:orange"),
}
PRUNING_STYLES = {"router_drop": "-", "router_pred_skip": "--", "router_pred": ":"}
Path = str | os.PathLike


def plot_router_study(rows: list[dict], path: Path, accuracy: str) -> None:
    """Draws the accuracy of routers against their cost, as Figure 1.

    The marker is the router, its size k or c; pale marks combine with the plan.
    """
    figure = new_figure(figsize=(9.5, 5.0), dpi=110)
    axis = figure.subplots()
    sizes = {}
    for row in rows:
        _, marker, colour = ROUTERS[row["router"]]
        sizes[row["selected"]] = 6.0 * row["selected"] ** 0.75
        axis.errorbar(
            row["relative_step_time"],
            100 * row[accuracy]["mean"],
            # A single seed has no spread.
            yerr=100 * row[accuracy]["std"] or None,
            elinewidth=1.0,
            capsize=3.0,
            alpha=0.35 if row["combine"] == "affinity" else 0.85,
            **_marker(marker, colour, sizes[row["selected"]]),
        )
    axis.set_xlabel("time of a training step, relative")
    axis.set_ylabel("test accuracy (%)")
    axis.set_title("Accuracy and cost of the routers", fontsize=11)
    axis.margins(0.1)
    axis.grid(alpha=0.25)
    entries = [
        {"label": label, **_marker(marker, colour, 7.0)}
        for label, marker, colour in _used(rows)
    ]
    if any(row["combine"] == "affinity" for row in rows):
        pale = {"label": "plan combines", "alpha": 0.35}
        entries.append({**pale, **_marker("o", "tab:cyan", 7.0)})
    entries += [
        {"label": f"k or c = {selected:g}", **_marker("o", "lightgray", size)}
        for selected, size in sorted(sizes.items())
    ]
    _legend_beside(axis, [{"linestyle": "", **entry} for entry in entries], fontsize=9)
    save_figure(figure, path)


def plot_router_curves(rows: list[dict], path: Path, title: str) -> None:
    """Draws accuracy and loss over the steps of training, as Figure 3.

    A column is a k or c. Lines are dashed where the transport plan combines.
    """
    columns = sorted({row["selected"] for row in rows})
    figure = new_figure(figsize=(4.6 * len(columns) + 3.0, 6.4), dpi=110)
    axes = figure.subplots(2, len(columns), squeeze=False, sharex=True, sharey="row")
    for row in rows:
        _, marker, colour = ROUTERS[row["router"]]
        style = "--" if row["combine"] == "affinity" else "-"
        steps, curves = row["curves"]["step"], row["curves"]
        accuracy, loss = axes[:, columns.index(row["selected"])]
        for axis, name, scale in (
            (accuracy, "grouped_test_accuracy", 100),
            (loss, "train_loss", 1),
        ):
            mean = scale * np.array(curves[name]["mean"])
            std = scale * np.array(curves[name]["std"])
            line = {"color": colour, "linestyle": style, "lw": 1.4}
            _band(axis, steps, mean, std, marker=marker, alpha=0.12, **line)
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
    entries = [{"label": label, "color": colour} for label, _, colour in _used(rows)]
    if any(row["combine"] == "affinity" for row in rows):
        for label, style in (("softmax combines", "-"), ("plan combines", "--")):
            entries.append({"label": label, "linestyle": style, "color": "gray"})
    _legend_beside(axes[0, -1], entries, fontsize=9)
    save_figure(figure, path, title)


def plot_constant_experts(rows: dict[str, dict], path: Path) -> None:
    """Draws MoE++ by its number of constant experts, as Figure 3."""
    figure = new_figure(figsize=(9.0, 3.6), dpi=110)
    counts = sorted(map(int, rows))
    for axis, name, scale, label in zip(
        figure.subplots(1, 2),
        ("test_accuracy", "ffn_experts_per_token"),
        (100, 1),
        ("test accuracy (%)", "FFN experts per token"),
    ):
        _points(axis, counts, [rows[str(count)][name] for count in counts], scale)
        axis.set_xticks(counts)
        axis.set_xlabel("constant experts")
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    save_figure(figure, path, "MoE++ by the number of constant experts")


def plot_tau_study(speed: dict, training: dict, path: Path) -> None:
    """Draws the throughput and accuracy of MoE++ by tau, as Table 3."""
    figure = new_figure(figsize=(9.0, 3.6), dpi=110)
    left, right = figure.subplots(1, 2)
    for form, times in speed["forms"].items():
        taus = sorted(float(name) for name in times if name != "vanilla")
        increases = [100 * times[f"{tau:g}"]["throughput_increase"] for tau in taus]
        left.plot(taus, increases, marker="o", label=f"measured, {form}")
    bound = [100 * times[f"{tau:g}"]["by_flops"] for tau in taus]
    left.plot(taus, bound, linestyle="--", color="gray", label="by FLOPs")
    left.set_ylabel("more throughput than vanilla (%)")
    rows = training["rows"]
    by_tau = {
        float(name.removeprefix("tau=")): row["test_accuracy"]
        for name, row in rows.items()
        if name.startswith("tau=")
    }
    taus = sorted(by_tau)
    _points(right, taus, [by_tau[tau] for tau in taus], 100, label="MoE++")
    vanilla = 100 * rows["vanilla"]["test_accuracy"]["mean"]
    right.axhline(vanilla, linestyle="--", color="gray", label="vanilla")
    right.set_ylabel("test accuracy (%)")
    for axis in (left, right):
        axis.set_xlabel("tau")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    save_figure(figure, path, "MoE++ by tau")


def plot_truncated_svd(svd: Any, path: Path) -> None:
    """Draws accuracy by the share of singular values kept, as Figure 7 of muMoE."""
    figure = new_figure(figsize=(5.2, 3.7), dpi=110)
    axis = figure.subplots()
    shares = [100 * share for share in svd.shares]
    (line,) = axis.plot(shares, svd.scores, marker="o", label="dense ViT")
    whole = {"color": line.get_color(), "label": "dense ViT, whole"}
    axis.axhline(svd.full, linestyle="--", **whole)
    axis.set_xlabel("% of singular values kept")
    axis.set_ylabel("score")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    axis.set_title("MLPs with their largest singular values alone", fontsize=11)
    save_figure(figure, path)


def plot_matched_heads(
    losses: dict[str, dict[int, dict]],
    ranks: dict[str, dict[int, int]],
    linear: float,
    path: Path,
) -> None:
    """Draws loss and expert matrix rank by the number of experts, as Figure 23.

    `losses` are spreads by factorisation and number of experts, `ranks` the largest
    rank of an expert's matrix for the same, `linear` the loss of a linear head.
    """
    figure = new_figure(figsize=(9.0, 3.6), dpi=110)
    left, right = figure.subplots(1, 2)
    for name, rows in losses.items():
        counts = sorted(rows)
        _points(left, counts, [rows[count] for count in counts], label=name)
        own = [ranks[name][count] for count in counts]
        right.plot(counts, own, marker="o", label=name)
    line = left.axhline(linear, linestyle="--", color="gray", label="linear")
    # The other names are those of the right panel.
    left.legend(handles=[line], fontsize=8)
    right.legend(fontsize=8)
    left.set_ylabel("validation loss")
    right.set_ylabel("largest rank of an expert's matrix")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        _powers_of_two(axis, sorted({x for rows in losses.values() for x in rows}))
        axis.set_xlabel("experts")
        axis.grid(alpha=0.25)
    save_figure(figure, path, "Heads with the parameters of a linear one")


def plot_head_capacity(accuracies: dict[str, dict[int, dict]], path: Path) -> None:
    """Draws heads' accuracy by their number of parameters, as Figure 24."""
    figure = new_figure(figsize=(5.8, 3.9), dpi=110)
    axis = figure.subplots()
    for name, rows in accuracies.items():
        sizes = sorted(rows)
        _points(axis, sizes, [rows[size] for size in sizes], 100, label=name)
    axis.set_xscale("log", subs=())
    low, high = axis.get_xlim()
    ticks = [digit * 10**power for power in range(12) for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_xlabel("parameters of the head")
    axis.set_ylabel("validation accuracy (%)")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    save_figure(figure, path, "Heads by their parameters")


def plot_pair_comparison(rows: dict[str, dict], path: Path, title: str) -> None:
    """Draws retrieval beside the experts that image-text models use.

    The right panel, the number of experts that serve 90% of each modality's tokens, is
    there if a model has experts. `rows` are spreads by model and figure.
    """
    panels = [(RECALLS, "R@1 (%)", 100.0)]
    if any(name in row for row in rows.values() for name in EXPERTS):
        panels.append((EXPERTS, "experts for 90% of tokens", 1.0))
    figure = new_figure(
        figsize=(2.2 + 3.6 * len(panels), 1.5 + 0.34 * len(rows)), dpi=110
    )
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (lines, label, scale) in zip(axes, panels):
        for shift, (name, (text, marker, colour)) in zip((-0.12, 0.12), lines.items()):
            own = [n for n, row in enumerate(rows.values()) if name in row]
            spreads = [row[name] for row in rows.values() if name in row]
            axis.errorbar(
                [scale * value["mean"] for value in spreads],
                np.array(own) + shift,
                xerr=[scale * value["std"] for value in spreads],
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
    axes[0].set_yticks(range(len(rows)), list(rows), fontsize=9)
    # The first row is on top.
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    save_figure(figure, path, title)


def plot_entropy_thresholds(rows: list[dict], path: Path) -> None:
    """Draws recall, entropies and experts by soft minimum, as LIMoE's Figures 8 to 10.

    A line is a soft minimum of image experts. The dashed grey lines are the threshold
    itself and as many experts as the soft minimum of text. `rows` are dicts of "text"
    and "image", the soft minima, and "figures", spreads.
    """
    figure = new_figure(figsize=(11.5, 3.6), dpi=110)
    axes = figure.subplots(1, 3)
    images = sorted({row["image"] for row in rows})
    for number, image in enumerate(images):
        own = sorted(
            (row for row in rows if row["image"] == image), key=lambda row: row["text"]
        )
        texts = [row["text"] for row in own]

        def line(axis, name, colour, scale=1, own=own, texts=texts, number=number):
            style = {"alpha": 0.35 + 0.65 * (number + 1) / len(images), "markersize": 4}
            style |= {"color": colour, "label": f"{images[number]:g}"}
            spreads = [row["figures"][name] for row in own]
            _points(axis, texts, spreads, scale, capsize=2.5, **style)

        line(axes[0], "r1", "tab:green", 100)
        for axis, name in ((axes[1], "routing_entropy"), (axes[2], "experts")):
            line(axis, f"image_{name}", "tab:blue")
            line(axis, f"text_{name}", "tab:orange")
    texts = sorted({row["text"] for row in rows})
    grey = {"color": "gray", "linestyle": "--", "lw": 1.0, "zorder": 0}
    axes[1].plot(texts, np.log(texts), **grey)
    axes[2].plot(texts, texts, **grey)
    labels = "R@1, mean of both ways (%)", "routing entropy (nats)", "experts for 90%"
    for axis, label in zip(axes, labels):
        axis.set_xlabel("soft minimum of text experts")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    axes[0].legend(title="of image experts", fontsize=8, title_fontsize=8)
    _legend_beside(
        axes[2],
        [
            {"label": label, "color": colour, "marker": "o", "markersize": 4}
            for label, _, colour in EXPERTS.values()
        ],
    )
    save_figure(figure, path, "Global entropy thresholds")


def plot_group_sizes(rows: dict[int, dict], path: Path) -> None:
    """Draws recall and the time of an epoch by number of groups, as LIMoE's Figure 16.

    `rows` have "r1" and "seconds", spreads; "seconds" may be None.
    """
    figure = new_figure(figsize=(5.6, 3.7), dpi=110)
    axis = figure.subplots()
    counts = sorted(rows)
    recalls = [rows[count]["r1"] for count in counts]
    lines = [_points(axis, counts, recalls, 100, color="tab:blue", label="R@1")]
    _powers_of_two(axis, counts)
    axis.set_xlabel("groups of a batch")
    axis.set_ylabel("R@1, mean of both ways (%)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    seconds = [rows[count]["seconds"] for count in counts]
    if all(seconds):
        times = axis.twinx()
        style = {"marker": "s", "color": "tab:orange", "label": "time of an epoch"}
        lines.append(_points(times, counts, seconds, 1 / seconds[0]["mean"], **style))
        times.set_ylabel(f"time, relative to {counts[0]}")
        times.set_ylim(bottom=0)
    axis.legend(handles=lines, fontsize=8, loc="lower left")
    save_figure(figure, path, "Groups of a batch")


def plot_pruned_pairs(rows: dict[str, dict], path: Path) -> None:
    """Draws recall by the number of experts left, as LIMoE's Figures 14 and 15.

    A panel is a modality whose experts are pruned, a colour a model, a style of line
    the way in which routers go on. `rows` are spreads by model, modality, method and
    number of experts.
    """
    modalities = list(next(iter(rows.values())))
    methods = list(next(iter(rows.values()))[modalities[0]])
    figure = new_figure(figsize=(2.6 + 3.4 * len(modalities), 3.6), dpi=110)
    axes = figure.subplots(1, len(modalities), squeeze=False, sharey=True)[0]
    for axis, modality in zip(axes, modalities):
        for number, row in enumerate(rows.values()):
            for method, curve in row[modality].items():
                counts = sorted(curve, key=int)
                style = {"color": f"C{number}", "linestyle": PRUNING_STYLES[method]}
                spreads = [curve[count] for count in counts]
                counts = list(map(int, counts))
                style |= {"markersize": 4, "capsize": 2.5}
                _points(axis, counts, spreads, 100, **style)
        axis.set_title(f"{modality} experts are pruned", fontsize=10)
        axis.set_xlabel("experts left in each block")
        axis.set_xticks(counts)
        # Pruning goes to the right, as in the paper.
        axis.invert_xaxis()
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("R@1, mean of both ways (%)")
    entries = [
        {"label": name, "color": f"C{number}", "marker": "o"}
        for number, name in enumerate(rows)
    ]
    for method in methods:
        label = method.replace("_", "-", 1)
        style = PRUNING_STYLES[method]
        entries.append({"label": label, "linestyle": style, "color": "gray"})
    _legend_beside(axes[-1], entries)
    save_figure(figure, path, "Retrieval with pruned experts")


def plot_pair_training(curves: dict[str, dict], path: Path) -> None:
    """Draws contrastive accuracies along training, as CLIP-UP's Figure 4.

    `curves` have "start" and "end" in epochs, and "accuracy", spreads at equal
    distances from after "start" to "end": a model that starts from another begins where
    that one's training ended.
    """
    figure = new_figure(figsize=(7.4, 3.8), dpi=110)
    axis = figure.subplots()
    for number, (name, curve) in enumerate(curves.items()):
        spreads = curve["accuracy"]
        epochs = np.linspace(curve["start"], curve["end"], len(spreads) + 1)[1:]
        mean = 100 * np.array([value["mean"] for value in spreads])
        std = 100 * np.array([value["std"] for value in spreads])
        _band(axis, epochs, mean, std, color=f"C{number}", label=name)
    axis.set_xlabel("epochs")
    axis.set_ylabel("contrastive accuracy (%)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    save_figure(figure, path, "Contrastive accuracy along training")


def _points(axis, places, spreads, scale=1, **style):
    """Means with error bars, joined by lines."""
    return axis.errorbar(
        places,
        [scale * value["mean"] for value in spreads],
        yerr=[scale * value["std"] for value in spreads],
        **{"marker": "o", "capsize": 3.0, **style},
    )


def _band(axis, places, mean, std, color, marker="o", alpha=0.15, **style):
    """A line in a band; a single value is a point."""
    marker = marker if len(mean) == 1 else ""
    axis.plot(places, mean, color=color, marker=marker, **style)
    axis.fill_between(places, mean - std, mean + std, color=color, alpha=alpha, lw=0)


def _legend_beside(axis: Any, entries: Iterable[dict], fontsize: int = 8) -> None:
    """A legend of lines to the right of the axis, where it hides no point."""
    handles = [axis.plot([], [], **entry)[0] for entry in entries]
    place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    axis.legend(handles=handles, fontsize=fontsize, **place)


def _powers_of_two(axis, counts):
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])


def _floor(rows):
    """The lowest accuracy to draw, in %: that of the slowest router after a quarter."""
    lowest = []
    for row in rows:
        means = row["curves"]["grouped_test_accuracy"]["mean"]
        lowest.append(100.0 * means[len(means) // 4])
    return max(0.0, min(lowest) - 2.0)


def _used(rows):
    """The labels, markers and colours of the routers that there are, in one order."""
    used = {row["router"] for row in rows}
    return [style for name, style in ROUTERS.items() if name in used]


def _marker(marker, colour, size):
    """The arguments that draw a marker; a cross has no area, and shows by its edge."""
    # Marks of one size look unequal: a star is mostly points, and a cross two lines.
    size = size * {"*": 1.5, "x": 1.1}.get(marker, 1.0)
    edge = {"markeredgewidth": 0.7, "markeredgecolor": "black"}
    if marker == "x":
        edge = {"markeredgewidth": 2.2}
    return {"marker": marker, "color": colour, "markersize": size, **edge}


def plot_polysemanticity(
    scores: dict[str, dict[int, list[float]]],
    path: Path,
    title: str = "More experts, each with less to do",
) -> None:
    """Draws the mean polysemanticities of runs by number of experts, as Figure 3."""
    figure = new_figure(figsize=(5.2, 3.7), dpi=110)
    axis = figure.subplots()
    counts = sorted({count for rows in scores.values() for count in rows})
    for name, rows in scores.items():
        own = sorted(rows)
        means = [np.mean(rows[count]) for count in own]
        deviations = [np.std(rows[count], ddof=len(rows[count]) > 1) for count in own]
        axis.errorbar(own, means, yerr=deviations, marker="o", capsize=3, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("experts")
    axis.set_ylabel("mean class-level polysemanticity")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    save_figure(figure, path, title)


def plot_subpopulations(
    before: np.ndarray,
    after: np.ndarray,
    path: Path,
    target_names: list[str],
    attribute_names: list[str],
    target: tuple[int, int],
    title: str,
) -> None:
    """Draws accuracies (targets, attributes) before and after an edit of one cell."""
    figure = new_figure(figsize=(9.6, 1.3 + 0.8 * len(target_names)), dpi=110)
    axes = figure.subplots(1, 3)
    reach = max(np.abs(after - before).max(), 0.01)
    for axis, name, values, limits, colours in (
        (axes[0], "before", before, (0, 1), "viridis"),
        (axes[1], "after", after, (0, 1), "viridis"),
        (axes[2], "difference", after - before, (-reach, reach), "RdBu"),
    ):
        axis.imshow(values, vmin=limits[0], vmax=limits[1], cmap=colours, aspect="auto")
        axis.set_xticks(range(len(attribute_names)), attribute_names, fontsize=8)
        rows = target_names if axis is axes[0] else []
        axis.set_yticks(range(len(target_names)), rows, fontsize=8)
        axis.set_title(name, fontsize=9)
        for (row, column), value in np.ndenumerate(values):
            text = f"{value:+.3f}" if name == "difference" else f"{value:.3f}"
            share = (value - limits[0]) / (limits[1] - limits[0])
            light = 0.25 < share < 0.75 if name == "difference" else share > 0.5
            style = {"ha": "center", "va": "center", "fontsize": 9}
            axis.text(column, row, text, color="black" if light else "white", **style)
        x = target[1] + np.array([-1, 1, 1, -1, -1]) * 0.47
        y = target[0] + np.array([-1, -1, 1, 1, -1]) * 0.47
        axis.plot(x, y, color="lime", linewidth=2.5)
    save_figure(figure, path, title)


def plot_experts(tables: dict[str, dict[str, dict]], path: Path) -> None:
    """Draws each row's differences in accuracy from the first of its table, by seed.

    `tables` are rows by title and name, with "accuracies" and "difference" as shares.
    """
    count = sum(len(rows) for rows in tables.values())
    figure = new_figure(figsize=(8.0, 1.0 + 0.27 * (count + len(tables))), dpi=110)
    axis = figure.subplots()
    labels, place = {}, 0
    for number, (title, rows) in enumerate(tables.items()):
        labels[place] = title
        control = None
        for name, row in rows.items():
            place += 1
            values = 100 * np.array(row["accuracies"])
            control = values if control is None else control
            labels[place] = f"{name}  ({values.mean():.1f}%)"
            style = {"color": f"C{number % 10}", "clip_on": False}
            axis.plot(values - control, [place] * len(values), "o", alpha=0.35, **style)
            spread = {key: 100 * row["difference"][key] for key in ("mean", "std")}
            axis.errorbar(
                spread["mean"], place, xerr=spread["std"], marker="|", markersize=10,
                capsize=3.0, **style,
            )  # fmt: skip
        place += 1
    axis.set_yticks(list(labels), list(labels.values()), fontsize=8)
    for tick, name in zip(axis.get_yticklabels(), labels.values()):
        if name in tables:
            tick.set_fontweight("bold")
    axis.set_ylim(place - 0.5, -0.7)
    axis.axvline(0.0, color="black", linewidth=0.8)
    axis.grid(axis="x", alpha=0.25)
    axis.set_xlabel("test accuracy less that of the first row, in points")
    save_figure(figure, path, "What experts and their parts gain")


def plot_losses_over_steps(rows: dict[str, dict], path: Path, title: str) -> None:
    """Draws validation losses along training, a line for each model and seed.

    Args:
        rows: for each model, "curve" of each seed: steps, seconds and perplexities.
    """
    figure = new_figure(figsize=(6.5, 4.0), dpi=110)
    axis = figure.subplots()
    for number, (name, row) in enumerate(rows.items()):
        for seed, curve in enumerate(row["curve"]):
            steps, _, perplexities = zip(*curve)
            label = None if seed else name
            axis.plot(steps, np.log(perplexities), color=f"C{number}", label=label)
    axis.set_xlabel("steps")
    axis.set_ylabel("validation loss, nats per token")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    save_figure(figure, path, title)
