"""The picture of a training run."""

import os
from typing import Any

import numpy as np

from keras_moe.analysis.plots.figure import new_figure, save_figure


def plot_training_history(
    history: dict[str, Any],
    path: str | os.PathLike,
    title: str = "Training",
) -> None:
    """Draws loss and accuracy over the epochs, and saves the picture.

    Args:
        history: dict of lists with a value for each epoch, such as `fit(...).history`:
            "loss" and "accuracy", or another metric, with `"val_"` before the name for
            those of the test images. Each metric has a panel of its own.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

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
    figure = new_figure(figsize=(4.5 * len(names), 3.4), dpi=110)
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for axis, name in zip(axes, names):
        for key, label, marker in (
            (name, "training", "."),
            (f"val_{name}", "test", "o"),
        ):
            values = history.get(key)
            if values is not None:
                epochs = np.arange(1, len(values) + 1)
                # A single epoch is a point, and several are a line.
                marker = marker if len(values) < 20 else ""
                axis.plot(epochs, values, marker=marker, label=label)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    save_figure(figure, path, title)
