"""The sizes of the families: one table, each row with its source."""

from typing import NamedTuple


class Variant(NamedTuple):
    """The size of a transformer encoder, and where it is published.

    Attributes:
        hidden_dim: D.
        num_layers: blocks.
        num_heads: attention heads.
        mlp_dim: H.
        source: the table or file that the row comes from.
    """

    hidden_dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    source: str

    def config(self) -> dict:
        """The row as arguments of a backbone."""
        return {
            name: value for name, value in self._asdict().items() if name != "source"
        }


_SCALING = "Scaling Vision Transformers, Table 2; big_vision models/vit.py"
_VMOE = "google-research/vmoe configs/vmoe_paper; LIMoE, Table 4"

# V-MoE's and LIMoE's S is 8 layers of 512, ViT's S is 12 layers of 384: their authors
# call both "S".
VARIANTS = {
    "vit/Ti": Variant(192, 12, 3, 768, _SCALING),
    "vit/S": Variant(384, 12, 6, 1536, _SCALING),
    "vit/B": Variant(768, 12, 12, 3072, _SCALING),
    "vit/L": Variant(1024, 24, 16, 4096, _SCALING),
    "vit/H": Variant(1280, 32, 16, 5120, _SCALING),
    "vmoe/S": Variant(512, 8, 8, 2048, _VMOE),
    "vmoe/B": Variant(768, 12, 12, 3072, _VMOE),
    "vmoe/L": Variant(1024, 24, 16, 4096, _VMOE),
    "vmoe/H": Variant(1280, 32, 16, 5120, _VMOE),
    "digits/Ti": Variant(
        64, 4, 4, 128, "keras_moe: trains on 8 x 8 digits in about a minute"
    ),
}
