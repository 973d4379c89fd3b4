"""A picture of accuracy by the number of constant experts."""

import os

from keras_moe.analysis.plots.figure import new_figure, save_figure


def plot_constant_experts(
    rows: dict[str, dict],
    path: str | os.PathLike,
    title: str = "MoE++ by the number of constant experts",
) -> None:
    """Draws accuracy, and FFN experts per token, against the constant experts' number.

    Args:
        rows: part "constants" of the results of the MoE++ study: a dict from the number
            of constant experts to "test_accuracy" and "ffn_experts_per_token", each
            with its "mean" and "std" over runs.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

    Raises:
        ValueError: if there is nothing to draw.
        ImportError: if matplotlib is not installed.

    Reference:
        *MoE++*, Figure 3.

    Example:

    >>> import os, tempfile
    >>> from keras_moe.analysis import plots
    >>> path = os.path.join(tempfile.mkdtemp(), "constants.png")
    >>> value = {"mean": 0.9, "std": 0.1}
    >>> row = {"test_accuracy": value, "ffn_experts_per_token": value}
    >>> plots.plot_constant_experts({"1": row, "2": row}, path)
    >>> os.path.exists(path)
    True
    """
    if not rows:
        raise ValueError("Expected at least one number of experts; received: rows={}")
    figure = new_figure(figsize=(9.0, 3.6), dpi=110)
    counts = sorted(map(int, rows))
    for axis, name, factor, label in zip(
        figure.subplots(1, 2),
        ("test_accuracy", "ffn_experts_per_token"),
        (100, 1),
        ("test accuracy (%)", "FFN experts per token"),
    ):
        values = [rows[str(count)][name] for count in counts]
        axis.errorbar(
            counts,
            [factor * value["mean"] for value in values],
            yerr=[factor * value["std"] for value in values],
            marker="o",
            capsize=3.0,
        )
        axis.set_xticks(counts)
        axis.set_xlabel("constant experts")
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    save_figure(figure, path, title)
