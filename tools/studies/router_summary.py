"""The router study's runs together: means, curves and the table."""

from rich import box
from rich.table import Table

from tools.studies.router_configuration import SHOTS, name_of
from tools.studies.study import percent, spread

# The keys of a run's result of which the summary has means and spreads.
MEASURES = (
    "test_accuracy",
    "grouped_test_accuracy",
    "few_shot_accuracy",
    "dropped_tokens",
    "load_entropy",
)
# The curves of a run's result: a value for each epoch.
CURVES = ("train_loss", "grouped_test_accuracy")
NOTES = (
    "accuracy: of the test images in %, each routed by itself, which is the library's "
    "default; ± is one standard deviation over the seeds.",
    "grouped: the same, with the groups and the capacity of training.",
    f"{SHOTS}-shot: of a linear classifier on {SHOTS} features per class.",
    "time: a training step's in `fit`, over that of {baseline}; medians of "
    "interleaved rounds.",
    "dropped: test tokens that no expert served, and entropy: of the experts' load, 1 "
    "is balanced; both with the groups and the capacity of training but no noise, "
    "averaged over the MoE blocks.",
    "combine: softmax, or the transport plan itself, through which gradients then flow "
    "(section 3.4).",
)


def summarise(
    runs: list[dict], seconds: dict[str, float], steps_per_epoch: int
) -> list[dict]:
    """One row for each configuration: means and spreads of its runs, and its cost."""
    # Softmax token choice with k = 1, if it is there.
    baseline = next(iter(seconds))
    rows = []
    for name in seconds:
        group = [run for run in runs if name_of(run) == name]
        row = {key: group[0][key] for key in ("router", "selected", "combine")}
        row["seeds"] = [run["seed"] for run in group]
        for key in MEASURES:
            row[key] = spread([run["result"][key] for run in group])
        row["curves"] = curves_of([run["result"]["curves"] for run in group])
        epochs = len(row["curves"]["train_loss"]["mean"])
        row["curves"]["step"] = [steps_per_epoch * (n + 1) for n in range(epochs)]
        row["step_seconds"] = seconds[name]
        row["relative_step_time"] = seconds[name] / seconds[baseline]
        row["step_time_over"] = baseline
        rows.append(row)
    return rows


def curves_of(runs: list[dict[str, list[float]]]) -> dict[str, dict]:
    """Means and spreads over the runs, epoch by epoch."""
    curves = {}
    for key in CURVES:
        epochs = [spread(list(values)) for values in zip(*(run[key] for run in runs))]
        curves[key] = {
            name: [epoch[name] for epoch in epochs] for name in ("mean", "std")
        }
    return curves


def summary_table(results: dict) -> Table:
    settings, rows = results["settings"], results["summary"]
    table = Table(
        title=f"{settings['preset']} on {settings['data']}, {settings['epochs']} "
        f"epochs, {len(rows[0]['seeds'])} seeds, {settings['backend']}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("router", min_width=20)
    table.add_column("combine", min_width=7)
    columns = ("k/c", "accuracy", "grouped", f"{SHOTS}-shot", "time")
    for column in (*columns, "dropped", "entropy"):
        table.add_column(column, justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], rows[-1]]):
        table.add_row(
            row["router"].replace("_", " "),
            "plan" if row["combine"] == "affinity" else row["combine"],
            str(row["selected"]),
            *(percent(row[key]) for key in MEASURES[:3]),
            f"{row['relative_step_time']:.2f}",
            f"{row['dropped_tokens']['mean']:.1%}",
            f"{row['load_entropy']['mean']:.3f}",
            end_section=any(
                row[key] != following[key] for key in ("selected", "combine")
            ),
        )
    return table
