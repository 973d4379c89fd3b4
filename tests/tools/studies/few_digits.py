"""A few batches of the digits, for studies that take seconds."""

from types import SimpleNamespace

from keras_moe import data
from tools.studies import moepp


def load_few(monkeypatch, module=moepp, **batches):
    """Gives a study the first batches of each split: `batches`, or three."""

    def load(name, split, *arguments, **options):
        few = batches.get(split, 3)
        return data.load(name, split, *arguments, **options).take(few)

    few = SimpleNamespace(load=load, num_classes=data.num_classes)
    monkeypatch.setattr(module, "data", few)
