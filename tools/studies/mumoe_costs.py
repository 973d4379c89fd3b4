"""The part of the study of muMoE that counts multiply-adds: Table 8."""

from rich.console import Console
from rich.table import Table

from keras_moe.layers import MultilinearExperts, MuMoE
from tools.studies.study import Part

# Experts, inputs and units, ranks, and what the paper prints.
TABLE_8 = (512, 768, 768)
PRINTED = {
    "CP": ("cp", 512, "155.1B", "1.4M"),
    "TR": ("tr", (4, 4, 512), "622.8B", "3.5M"),
}


class Costs(Part):
    """Multiply-adds of one token, by the whole tensor and in factors."""

    def results(self) -> dict:
        experts, inputs, units = TABLE_8
        rows = {}
        for name, (kind, rank, *printed) in PRINTED.items():
            layer = MultilinearExperts(units, experts, kind, rank)
            gate = MuMoE(units, experts, kind, rank).gate.cost((1, inputs)).parameters
            rows[name] = {
                "naive": gate + layer.naive_multiply_adds(inputs),
                "factorized": gate + layer.multiply_adds(inputs),
                "printed": printed,
            }
        return rows

    def show(self, results: dict, console: Console) -> None:
        experts, inputs, units = TABLE_8
        table = Table(
            title=f"Multiply-adds, {experts} experts on {inputs} inputs and {units} "
            "units (Table 8)"
        )
        table.add_column("layer")
        columns = ("naive", "paper", "factorized", "paper", "naive / factorized")
        for column in columns:
            table.add_column(column, justify="right")
        for name, row in results.items():
            table.add_row(
                name,
                f"{row['naive'] / 1e9:.1f}B",
                row["printed"][0],
                f"{row['factorized'] / 1e6:.2f}M",
                row["printed"][1],
                f"{row['naive'] / row['factorized']:,.0f}",
            )
        console.print(table)
