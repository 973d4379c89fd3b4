"""The study of muMoE at sizes that take seconds."""

from keras_moe.cli.studies import (
    mumoe,
    mumoe_digits,
    mumoe_editing,
    mumoe_patches,
    mumoe_specialisation,
)


def make_small(monkeypatch):
    sizes = {"patch_size": 8, "hidden_dim": 16, "num_layers": 1, "mlp_dim": 8}
    modules = (mumoe, mumoe_digits, mumoe_editing, mumoe_patches, mumoe_specialisation)
    for module in modules:
        monkeypatch.setattr(module, "SIZES", sizes)
    for name, value in {
        "TRAIN_NUMBERS": 400,
        "TEST_NUMBERS": 100,
        "SHARES": (0.5,),
    }.items():
        monkeypatch.setattr(mumoe_specialisation, name, value)
