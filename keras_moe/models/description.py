"""Costs of a model: parameters, active parameters and FLOPs, part by part."""

from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class Part(NamedTuple):
    """One part of a model.

    Attributes:
        name: name of the part.
        kind: such as "dense".
        parameters: number of parameters.
        active_parameters: those used by one token.
        flops: forward FLOPs of matmuls per image, 2 per multiply-add.
    """

    name: str
    kind: str
    parameters: int
    active_parameters: int
    flops: int


class Description(NamedTuple):
    """The costs of a model.

    Attributes:
        name: name of the preset.
        num_tokens: tokens per image, including the class token.
        parts: parts in order.
        hidden_dim: D, the size of a token.
        example: kind of input, for tables.
    """

    name: str
    num_tokens: int
    parts: list[Part]
    hidden_dim: int
    example: str = "image"

    @property
    def parameters(self) -> int:
        """Total number of parameters."""
        return sum(part.parameters for part in self.parts)

    @property
    def active_parameters(self) -> int:
        """Number of parameters used by one token."""
        return sum(part.active_parameters for part in self.parts)

    @property
    def gflops(self) -> float:
        """Forward GFLOPs per image, 2 FLOPs per multiply-add."""
        return sum(part.flops for part in self.parts) / 1e9

    def to_dict(self) -> dict:
        """Returns a JSON-serialisable dict."""
        return {
            "name": self.name,
            "num_tokens": self.num_tokens,
            "hidden_dim": self.hidden_dim,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "gflops": self.gflops,
            "parts": [part._asdict() for part in self.parts],
        }

    def print(self, console: Console | None = None) -> None:
        """Prints the parts and totals as a table."""
        title = f"{self.name}: {self.num_tokens} tokens per {self.example}"
        table = Table("part", "kind", title=title)
        for column in ("parameters", "active per token", f"GFLOPs per {self.example}"):
            table.add_column(column, justify="right")
        for part in self.parts:
            table.add_row(
                part.name,
                part.kind,
                f"{part.parameters:,}",
                f"{part.active_parameters:,}",
                f"{part.flops / 1e9:.3f}",
            )
        table.add_section()
        table.add_row(
            "total",
            "",
            f"{self.parameters:,}",
            f"{self.active_parameters:,}",
            f"{self.gflops:.3f}",
        )
        (console or Console()).print(table)
