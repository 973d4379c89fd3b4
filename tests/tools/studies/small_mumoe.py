"""The study of muMoE at sizes that take seconds."""

from types import SimpleNamespace

from keras_moe import data
from tools.studies import mumoe, mumoe_editing, mumoe_models


def make_small(monkeypatch):
    sizes = {"patch_size": 8, "hidden_dim": 16, "num_layers": 1, "mlp_dim": 8}
    for module in (mumoe, mumoe_editing, mumoe_models):
        monkeypatch.setattr(module, "SIZES", sizes)
    for name, value in {"TRAIN_NUMBERS": 400, "TEST_NUMBERS": 100}.items():
        monkeypatch.setattr(mumoe, name, value)
        monkeypatch.setattr(mumoe_models, name, value)
    monkeypatch.setattr(mumoe_models, "SHARES", (0.5,))

    def load_digits(split, shape):
        return tuple(array[:500] for array in data.load_digits(split, shape))

    few = SimpleNamespace(load_digits=load_digits, oversample=data.oversample)
    monkeypatch.setattr(mumoe_editing, "data", few)
