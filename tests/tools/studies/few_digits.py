"""A few batches of the digits, for studies that take seconds."""

from types import SimpleNamespace

from keras_moe import data
from tools.studies import moepp

# Arguments of the studies of MoE++ and of routers with which they take seconds.
MOEPP = ["--tokens", "32", "--dim", "8", "--mlp-dim", "16", "--rounds", "1"]
ROUTERS = ["soft", "softmax_token_choice"]
TINY_ROUTERS = [
    "--routers", *ROUTERS, "--selected", "1", "--seeds", "2", "--epochs", "1",
    "--batch-size", "64", "--set", "num_layers=1", "moe_layers=[0]", "hidden_dim=16",
    "num_heads=2", "mlp_dim=16", "num_experts=4",
]  # fmt: skip


def load_few(monkeypatch, module=moepp, **batches):
    """Gives a study the first batches of each split: `batches`, or three."""

    def load(name, split, *arguments, **options):
        few = batches.get(split, 3)
        return data.load(name, split, *arguments, **options).take(few)

    few = SimpleNamespace(load=load, num_classes=data.num_classes)
    monkeypatch.setattr(module, "data", few)
