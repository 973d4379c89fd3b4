"""The picture of which groups of tokens each expert serves, such as modalities."""

import os

import numpy as np

from keras_moe.analysis.expert_usage import ExpertUsage
from keras_moe.analysis.plots.figure import new_figure, save_figure

# Colours that people with any colour vision tell apart (Okabe and Ito).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")


def plot_expert_usage(
    usage: ExpertUsage,
    path: str | os.PathLike,
    title: str = "Tokens that each expert serves",
) -> None:
    """Draws the share of each group's tokens that each expert serves.

    There is a panel for each MoE block. Experts stand in the order of their share of
    the first group, so that those of one modality lie together; the dashed line is an
    equal share.

    Args:
        usage: usage by group, as of `keras_moe.analysis.expert_usage`.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there is no block, or more groups than colours.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, Figures 17 and 39.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, plots
    >>> tokens = np.array([[8.0, 1.0], [0.0, 4.0]])
    >>> usage = ExpertUsage(["image", "text"], {"block_1": BlockUsage(tokens, tokens)})
    >>> path = os.path.join(tempfile.mkdtemp(), "usage.png")
    >>> plots.plot_expert_usage(usage, path)
    >>> os.path.exists(path)
    True
    """
    if not usage.blocks or len(usage.groups) > len(_COLOURS):
        raise ValueError(
            f"Expected usage of blocks by up to {len(_COLOURS)} groups; received: "
            f"blocks={list(usage.blocks)}, groups={list(usage.groups)}"
        )
    columns = min(3, len(usage.blocks))
    rows = -(-len(usage.blocks) // columns)
    figure = new_figure(figsize=(0.6 + 3.4 * columns, 0.9 + 2.1 * rows), dpi=110)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for axis, (name, block) in zip(grid, usage.blocks.items()):
        totals = block.tokens.sum(axis=1, keepdims=True)
        shares = 100 * block.tokens / np.where(totals > 0, totals, 1.0)
        order = np.argsort(-shares[0], kind="stable")
        places = np.arange(len(order))
        width = 0.8 / len(shares)
        for number, (group, row) in enumerate(zip(usage.groups, shares)):
            offset = (number - (len(shares) - 1) / 2) * width
            colour = _COLOURS[number]
            axis.bar(places + offset, row[order], width, color=colour, label=group)
        axis.axhline(100 / len(order), color="black", lw=0.8, ls="--")
        axis.set_title(name, fontsize=9, pad=3)
        axis.set_xticks(places if len(order) <= 16 else [])
        if len(order) <= 16:
            axis.set_xticklabels(order)
        axis.tick_params(labelsize=7)
        axis.set_xlabel("expert", fontsize=8)
    for axis in grid[len(usage.blocks) :]:
        axis.set_axis_off()
    for axis in grid[::columns]:
        axis.set_ylabel("% of the group's tokens", fontsize=8)
    grid[0].legend(fontsize=8)
    save_figure(figure, path, title)


def plot_expert_groups(
    usage: ExpertUsage,
    path: str | os.PathLike,
    title: str = "What each expert serves",
) -> None:
    """Draws of which groups the tokens are that each expert serves.

    There is a panel for each MoE block, with a row for each expert that serves a token,
    the most used first: its share of all tokens, and how these divide among the groups,
    in percent.

    Args:
        usage: usage by group, such as by the parts of speech of
            `keras_moe.analysis.tag_tokens`.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there is no block.
        ImportError: if matplotlib is not installed.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, Figure 40.

    Example:

    >>> import os, tempfile
    >>> import numpy as np
    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, plots
    >>> tokens = np.array([[8.0, 1.0], [0.0, 4.0]])
    >>> usage = ExpertUsage(["NOUN", "DET"], {"block_1": BlockUsage(tokens, tokens)})
    >>> path = os.path.join(tempfile.mkdtemp(), "words.png")
    >>> plots.plot_expert_groups(usage, path)
    >>> os.path.exists(path)
    True
    """
    if not usage.blocks:
        raise ValueError(
            f"Expected usage of at least one block; received: {usage!r:.200}"
        )
    tables = {name: group_table(block.tokens) for name, block in usage.blocks.items()}
    rows = max(len(experts) for experts, *_ in tables.values())
    columns = min(3, len(tables))
    size = (1.0 + 0.5 * len(usage.groups), 1.2 + 0.26 * rows)
    lines = -(-len(tables) // columns)
    figure = new_figure(figsize=(columns * size[0], 0.4 + lines * size[1]), dpi=110)
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis, (name, (experts, loads, shares)) in zip(grid, tables.items()):
        axis.imshow(shares, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            colour = "white" if share > 0.6 else "black"
            text = f"{100 * share:.0f}"
            place = {"ha": "center", "va": "center"}
            axis.text(column, row, text, color=colour, fontsize=7, **place)
        labels = [f"{e} ({load:.0%})" for e, load in zip(experts, loads)]
        axis.set_yticks(range(len(experts)), labels, fontsize=7)
        names = usage.groups
        axis.set_xticks(range(len(names)), names, fontsize=7, rotation=60, ha="right")
        for label in axis.get_xticklabels():
            label.set_parse_math(False)
        axis.set_title(name, fontsize=9, pad=3)
    for axis in grid[len(tables) :]:
        axis.set_axis_off()
    for axis in grid[::columns]:
        axis.set_ylabel("expert (share of all tokens)", fontsize=8)
    save_figure(figure, path, title)


def group_table(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The experts that serve tokens, their shares of all, and the groups' of theirs."""
    totals = tokens.sum(axis=0)
    order = np.argsort(-totals, kind="stable")
    order = order[totals[order] > 0]
    return order, totals[order] / totals.sum(), (tokens[:, order] / totals[order]).T
