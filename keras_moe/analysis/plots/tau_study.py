"""The picture of MoE++ by tau."""

import os

from keras_moe.analysis.plots.figure import new_figure, save_figure


def plot_tau_study(
    speed: dict,
    training: dict,
    path: str | os.PathLike,
    title: str = "MoE++ by tau",
) -> None:
    """Draws throughput and accuracy against tau, and saves the picture.

    Args:
        speed: part "speed" of the results of the MoE++ study.
        training: part "training" of these results.
        path: path of the picture; its suffix is the format.
        title: title above the picture.

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
    figure = new_figure(figsize=(9.0, 3.6), dpi=110)
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
    save_figure(figure, path, title)
