"""Passes over data, the turns of benchmarks of loaders."""

from collections.abc import Iterable

BATCH = 32


def one_pass(loader: Iterable) -> None:
    """Takes every batch of a loader."""
    for _ in loader:
        pass
