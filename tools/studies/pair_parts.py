"""Parts of studies of pairs: configurations beside each other, with their spread."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from keras_moe.cli.result import Result
from tools.studies import plots
from tools.studies.study import (
    Part,
    Run,
    Study,
    percent,
    plus_minus,
    run_parts,
    spread,
)

# The titles of columns, the figures in them, and whether they are shares.
COLUMNS = (
    ("I→T R@1", "image_to_text_r1", True),
    ("T→I R@1", "text_to_image_r1", True),
    ("I→T R@5", "image_to_text_r5", True),
    ("T→I R@5", "text_to_image_r5", True),
    ("accuracy", "contrastive_accuracy", True),
    ("text experts", "text_experts", False),
    ("image experts", "image_experts", False),
    ("text dropped", "text_dropped", True),
    ("image dropped", "image_dropped", True),
)
NOTES = (
    "R@1, R@5: retrieval of the test pairs, images to texts and texts to images; "
    "accuracy: a pair's own among 1,024, or all where they are fewer; in %, ± one "
    "standard deviation over the seeds.",
    "experts: those that serve 90% of a modality's tokens, padding left out, at "
    "inference; dropped: tokens that no expert served, routed as in training. Both are "
    "averages over the MoE blocks.",
    "R@1 at start: mean of both ways of an upcycled model, before it trains.",
    "collapsed: runs of which the routers' health says so at their end.",
)


class Comparison(Part):
    """Configurations that are trained alike, each from several seeds."""

    def __init__(
        self, study: Study, name: str, title: str, rows: dict[str, Sequence[Run]]
    ):
        super().__init__(study)
        self.name, self.title, self.rows = name, title, rows

    def results(self) -> dict:
        # Seed by seed: an interrupted study has all rows of its first seeds.
        turns = [run for seed in zip(*self.rows.values()) for run in seed]
        results = iter(self.study.finish_all(turns))
        by_row = list(
            zip(*(tuple(next(results) for _ in self.rows) for _ in self.seeds))
        )
        return {
            "title": self.title,
            "rows": {name: summary(runs) for name, runs in zip(self.rows, by_row)},
        }

    @property
    def seeds(self) -> range:
        """The seeds of each configuration."""
        return range(len(next(iter(self.rows.values()))))

    def show(self, results: dict, console: Console) -> None:
        console.print(comparison_table(results))

    def draw(self, every: dict) -> list[Path]:
        path = self.study.folder / f"{self.name}.png"
        rows = {k: row["figures"] for k, row in every[self.name]["rows"].items()}
        plots.plot_pair_comparison(rows, path, self.title)
        return [path]


def run_comparisons(study: Study, parts: dict[str, Part]) -> Result:
    """Does parts of a study of pairs, and says what their columns are."""
    result = run_parts(study, parts)
    for note in NOTES:
        study.console.print(note, style="dim", highlight=False)
    return result


def chosen_rows(
    tables: dict[str, dict[str, Any]], parts: Sequence[str], only: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    """The rows that train, by part."""
    tables = {part: rows for part, rows in tables.items() if part in parts}
    if only is None:
        return tables
    chosen = {
        part: {name: row for name, row in rows.items() if name in only}
        for part, rows in tables.items()
    }
    unknown = {*only}.difference(*tables.values())
    if unknown or not all(chosen.values()):
        names = {part: list(rows) for part, rows in tables.items()}
        raise ValueError(
            f"Expected --only with rows of each part, of {names}; received: "
            f"{list(only)}"
        )
    return chosen


def summary(runs: Sequence[dict]) -> dict[str, Any]:
    """Means and spreads over the runs of a configuration."""
    return {
        "seeds": len(runs),
        "figures": spreads([run["figures"] for run in runs]),
        "start": spreads([run["start"] for run in runs]),
        "history": {
            name: [
                spread(list(epoch))
                for epoch in zip(*(x["history"][name] for x in runs))
            ]
            for name in runs[0]["history"]
            # Others are figures of callbacks.
            if "/" not in name
        },
        "epoch_seconds": spread([run["epoch_seconds"] for run in runs])
        if all(run["epoch_seconds"] for run in runs)
        else None,
        "parameters": runs[0]["parameters"],
        # The picture of one of them.
        "expert_shares": runs[0]["expert_shares"],
        "collapsed": [message for run in runs for message in run["collapsed"]],
    }


def spreads(figures: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The spread of each figure that all runs have."""
    names = [x for x in figures[0] if all(row.get(x) is not None for row in figures)]
    return {name: spread([row[name] for row in figures]) for name in names}


def comparison_table(results: dict) -> Table:
    """The table of a part."""
    rows = results["rows"]
    seeds = next(iter(rows.values()))["seeds"]
    table = Table(
        title=f"{results['title']}, {seeds} {'seed' if seeds == 1 else 'seeds'}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("model")
    columns = [
        x for x in COLUMNS if any(x[1] in row["figures"] for row in rows.values())
    ]
    for title, *_ in columns:
        table.add_column(title, justify="right")
    has_starts = any(row["start"] for row in rows.values())
    if has_starts:
        table.add_column("R@1 at start", justify="right")
    has_routers = any("collapsed" in row["figures"] for row in rows.values())
    if has_routers:
        table.add_column("collapsed", justify="right")
    for name, row in rows.items():
        cells = [cell(row["figures"], figure, share) for _, figure, share in columns]
        if has_starts:
            cells.append(cell(row["start"], "r1", True))
        if has_routers:
            count = row["figures"].get("collapsed")
            cells.append(
                "-" if count is None else f"{count['mean'] * row['seeds']:.0f}"
            )
        table.add_row(name, *cells)
    return table


def cell(figures: dict, name: str, is_share: bool) -> str:
    """A figure of the table as text."""
    if name not in figures:
        return "-"
    return percent(figures[name]) if is_share else plus_minus(figures[name], 1)
