"""Published settings of sparse upcycling, by name.

Axes: K selected experts.
"""

from keras_moe.checks import check_one_of
from keras_moe.layers.mumoe_config import MUMOE
from keras_moe.routers import ROUTERS, TokenChoiceRouter

# `normalize_gates` of `upcycle`, `mask_padding` of text towers, MoE layers' arguments.
UPCYCLING_PRESETS = {
    # *CLIP-UP*, Table 3 and section 2.2; gates are normalised in appendix B.3 alone.
    "clip_up": {
        "normalize_gates": False,
        "noise_std": 0.0,
        "auxiliary_losses": {"load_balance": 0.01, "router_z": 1e-4},
        "num_selected_experts": 2,
        # The paper's 2.0 is Switch's convention, C = 2.0 S / E whatever K is; here C is
        # K times the factor.
        "capacity_factor": 1.0,
        "priority": "first_come",
        # Appendix B.3: the text encoder routes padding, which takes up capacity.
        "mask_padding": False,
    }
}


def upcycling_settings(preset: str | None, router: str) -> dict:
    """Arguments of `upcycle` by the name of a preset."""
    if preset is None:
        return {}
    check_one_of("preset", preset, UPCYCLING_PRESETS)
    if router == MUMOE or ROUTERS[router][0] is not TokenChoiceRouter:
        raise ValueError(
            f"Expected a token choice router for preset={preset!r}; "
            f"received: router={router!r}"
        )
    return dict(UPCYCLING_PRESETS[preset])
