"""A few batches of the digits, for studies that take seconds."""

from types import SimpleNamespace

from keras_moe import data
from keras_moe.cli.studies import moepp_training


def load_few(monkeypatch):
    """Lets the models of the study of MoE++ see three batches of each split."""

    def load(*arguments, **options):
        return data.load(*arguments, **options).take(3)

    monkeypatch.setattr(moepp_training, "data", SimpleNamespace(load=load))
