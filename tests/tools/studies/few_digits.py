"""A few batches of the digits, for studies that take seconds."""

from types import ModuleType, SimpleNamespace

import pytest

from keras_moe import data
from tools.studies import moepp


def load_few(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType = moepp,
    **batches: int,
) -> None:
    """Lets the models of a study see the first batches of each split.

    Args:
        monkeypatch: pytest's fixture.
        module: the study's module that loads the digits.
        **batches: numbers of batches, by split; three of the others.
    """

    def load(name, split, *arguments, **options):
        few = batches.get(split, 3)
        return data.load(name, split, *arguments, **options).take(few)

    few = SimpleNamespace(load=load, num_classes=data.num_classes)
    monkeypatch.setattr(module, "data", few)
