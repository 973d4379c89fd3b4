"""A row of the table of all benchmarks: a claim about speed, and how it is measured."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BACKENDS = ("jax", "tensorflow", "torch")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One piece of work, here and in the candidates that it is compared with.

    Attributes:
        name: name on the command line.
        work: the work in a few words.
        source: module of this folder and its function, as `"moe_layer:layers"`. The
            function returns candidates by name, or is a context manager that gives
            them: functions to time, or numbers where the row has a `unit`.
        arguments: keyword arguments of the function.
        subject: name of the candidate of this library.
        goals: the largest ratio of ours to a candidate that is a success, by the
            name of the candidate; a number, numbers by backend, or None where the
            comparison has no goal. A function may leave out candidates that a
            backend does not have.
        peers: modules of candidates that are other libraries' and need not be
            installed, by the name of the candidate; see `peer`.
        backends: the backends that the row is measured on.
        unit: unit of numbers that are not times, such as "MiB".
        clock: clock of the candidates: "wall", or "cpu" for the work of all threads
            and workers. A loader is timed by its work, since how much of it is done
            beside a training step depends on the number of cores.
        rounds: number of rounds; the budget of seconds may end them before.
    """

    name: str
    work: str
    source: str
    subject: str
    goals: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    peers: dict[str, str] = field(default_factory=dict)
    backends: tuple[str, ...] = BACKENDS
    unit: str | None = None
    clock: str = "wall"
    rounds: int = 15

    def goal(self, candidate: str, backend: str) -> float | None:
        """The largest ratio to a candidate that is a success, or None."""
        goal = self.goals[candidate]
        return goal.get(backend) if isinstance(goal, dict) else goal

    def function(self) -> Callable[..., Any]:
        """The function that makes the candidates; imports its module."""
        module, _, name = self.source.partition(":")
        return getattr(importlib.import_module(module), name)


# Reasons why peers that a benchmark asked for are not there, by module.
MISSING = {}


def peer(module: str) -> Any:
    """Another library's module, or None where it is not installed or does not import.

    A reason that is no plain absence, such as a build for another PyTorch, is shown in
    the table.

    Args:
        module: name of the module.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        MISSING[module] = f"{error.name} is not installed"
    except Exception as error:
        reason = str(error).partition("\n")[0]
        MISSING[module] = f"{module} does not import: {reason}"
    return None


def installed(module: str) -> bool:
    """Whether a module could be imported. It is not imported.

    Args:
        module: name of a top-level module.
    """
    return importlib.util.find_spec(module) is not None


def select(rows: tuple[Row, ...], names: list[str] | None) -> list[Row]:
    """Rows by their names, in the order of the table.

    Args:
        rows: all rows.
        names: names of rows, or their beginnings (`"router"` is all of the routers);
            a name that ends in `=` is a whole one. None is all rows.

    Raises:
        SystemExit: if a name is that of none.
    """
    if names is None:
        return list(rows)
    for name in names:
        if not any(f"{row.name}=".startswith(name) for row in rows):
            raise SystemExit(
                "Expected the names of rows, or their beginnings, among "
                f"{', '.join(row.name for row in rows)}; received: {name!r}"
            )
    return [row for row in rows if f"{row.name}=".startswith(tuple(names))]
