"""Published model sizes, each with its source."""

from typing import NamedTuple


class Variant(NamedTuple):
    """A published encoder size.

    Attributes:
        hidden_dim: D.
        num_layers: number of blocks.
        num_heads: number of attention heads; None for a Mixer.
        mlp_dim: H.
        source: table or file that the row comes from.
        token_mlp_dim: H of a Mixer's token MLPs.
    """

    hidden_dim: int
    num_layers: int
    num_heads: int | None
    mlp_dim: int
    source: str
    token_mlp_dim: int | None = None

    def config(self) -> dict:
        """Returns the sizes as backbone arguments."""
        return {
            name: value
            for name, value in self._asdict().items()
            if name != "source" and value is not None
        }


_SCALING = "Scaling Vision Transformers, Table 2; big_vision models/vit.py"
_MIXER = "MLP-Mixer, Table 1; vit_jax configs/models.py"
_CLIP = (
    "Learning Transferable Visual Models From Natural Language Supervision, Table 20"
)
_SIGLIP = "Sigmoid Loss for Language Image Pre-Training; big_vision models/vit.py"
_MOEPP = "MoE++, Table 2"
_GPT2 = "muMoE, experiments/nanoGPT/model.py"
_EMOJI = "keras_moe: trains on emoji of 32 x 32 pixels in a few minutes"
_PYTHON = "keras_moe: trains on Python's documentation in some minutes"
_DIGITS = "keras_moe: trains on 8 x 8 digits in about a minute"
_VMOE = "google-research/vmoe configs/vmoe_paper; LIMoE, Table 4"

# Two different sizes are both called "S": V-MoE's and LIMoE's has 8 layers of width
# 512, ViT's 12 layers of width 384.
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
    "mixer/S": Variant(512, 8, None, 2048, _MIXER, token_mlp_dim=256),
    "mixer/B": Variant(768, 12, None, 3072, _MIXER, token_mlp_dim=384),
    "mixer/L": Variant(1024, 24, None, 4096, _MIXER, token_mlp_dim=512),
    "mixer/H": Variant(1280, 32, None, 5120, _MIXER, token_mlp_dim=640),
    # CLIP's image towers are ViTs; its text towers are narrower.
    "clip_text/B": Variant(512, 12, 8, 2048, _CLIP),
    "clip_text/L": Variant(768, 12, 12, 3072, _CLIP),
    # Both towers have the same size.
    "siglip/B": Variant(768, 12, 12, 3072, _SIGLIP),
    "siglip/L": Variant(1024, 24, 16, 4096, _SIGLIP),
    "siglip/So400m": Variant(
        1152, 27, 16, 4304, "Getting ViT in Shape, Table 1; big_vision models/vit.py"
    ),
    # H of each expert.
    "moepp_lm/0.6B": Variant(768, 12, 12, 2048, _MOEPP),
    "moepp_lm/7B": Variant(1536, 24, 16, 4096, _MOEPP),
    "gpt2/S": Variant(768, 12, 12, 3072, _GPT2),
    "python_docs/Ti": Variant(96, 4, 4, 64, _PYTHON),
    "emoji/Ti": Variant(64, 4, 4, 192, _EMOJI),
    "emoji/S": Variant(96, 4, 4, 192, _EMOJI),
    "digits/Ti": Variant(64, 4, 4, 128, _DIGITS),
    "digits_mixer/Ti": Variant(64, 4, None, 128, _DIGITS, token_mlp_dim=32),
}
