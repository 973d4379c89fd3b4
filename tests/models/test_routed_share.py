"""The share of the FLOPs that is routed, and what is known of other settings."""

import pytest

from keras_moe import models
from tests.small_models import SMALL

# Nine tokens of size 16: patches of 4 x 4 x 2 numbers, two attentions, an MLP.
REST = 2 * 8 * 32 * 16 + 2 * (2 * 9 * 4 * 16 * 16 + 4 * 9 * 9 * 16) + 9 * 2048
# An expert's MLP for a token.
EXPERT = 2 * 2 * 16 * 32
NUMBERS = "routed_share", "selected_experts", "tokens_per_expert"


@pytest.mark.parametrize(("options", "slots", "others", "selected"), [
    ({"num_selected_experts": 1}, 9, 2 * 9 * 16 * 4, 1),
    ({"num_selected_experts": 2}, 18, 2 * 9 * 16 * 4, 2),
    # Four of eight experts, with half of the choices, cost nothing.
    ({"zero_experts": 4, "num_selected_experts": 2, "tau": 1.0}, 9, 2 * 9 * 16 * 8, 2),
    # The shared expert is not routed.
    ({"num_selected_experts": 1, "shared_experts": 1}, 9, 1152 + 9 * EXPERT, 1),
    # Logits, dispatch and combine of eight slots.
    ({"router": "soft", "num_slots": 2}, 8, 6 * 9 * 16 * 8, 8 / 9),
    # ceil(9 x 2 / 4) tokens for each of four experts.
    ({"router": "softmax_expert_choice", "capacity_factor": 1.0}, 20, 1152, 20 / 9),
])  # fmt: skip
def test_shares_by_hand(options, slots, others, selected):
    described = models.describe("vit_s16", **{**SMALL, **options})
    share = slots * EXPERT / (REST + others + slots * EXPERT)
    assert described.routed_share == pytest.approx(share, rel=1e-12)
    assert described.selected_experts == [pytest.approx(selected)]
    assert described.tokens_per_expert == [slots / 4]
    ratio = described.parameters / described.active_parameters
    assert described.to_dict()["parameter_ratio"] == ratio
    assert f"{share:.1%} of the FLOPs" in described.routing_text()
    assert f"with {slots * 8 / 4:g} " in described.routing_text(8)


@pytest.mark.parametrize("options", [{"moe_layers": None}, {"router": "mumoe"}])
def test_nothing_is_routed(options):
    described = models.describe("vit_s16", **{**SMALL, **options})
    assert [getattr(described, name) for name in NUMBERS] == [0, [], []]
    assert (described.routing_text(), described.findings()) == ("", [])


def test_pairs_texts_and_ensembles():
    # 196 patches and 16 words share experts, of which each token has one.
    limoe = models.describe("limoe_b16")
    assert limoe.tokens_per_expert == [(196 + 16) / 32]
    # Two towers have experts of their own.
    clip = models.describe("clip_up_b16")
    assert clip.tokens_per_expert == [77 * 2 / 8, 197 * 2 / 8]
    image = next(x for x in clip.parts if x.routed_flops)
    assert image.routed_flops == 197 * 2 * 2 * 2 * 768 * 3072
    lm = models.describe("moepp_lm_python")
    # What is known of image classifiers is not said of these.
    assert limoe.findings() == clip.findings() == lm.findings() == []
    assert lm.routed_share > 0
    # Members of an ensemble have copies of the tokens.
    sizes = {**SMALL, "num_selected_experts": 1}
    one, two = (
        models.describe("vit_s16", **sizes, ensemble_size=members).parts[2]
        for members in (1, 2)
    )
    assert two.routed_flops == 2 * one.routed_flops
    assert two.tokens_per_expert == 2 * one.tokens_per_expert


@pytest.mark.parametrize(("preset", "options", "more", "level"), [
    ("vmoe_s32_last2_e8", {}, "every_2", "good"),
    ("vmoe_s32_last2_e8", {"num_experts": 17}, "every_2", "notice"),
    ("vmoe_b32", {"expert_mlp_dim": 500}, "every_1", "notice"),
    ("vmoe_b32", {}, None, "good"),
])  # fmt: skip
def test_the_finding_on_the_share(preset, options, more, level):
    (finding,) = models.describe(preset, **options).findings()
    assert finding[0] == level
    is_robust = "robust choice (arXiv 2411.18322)" in finding[1]
    assert is_robust == (preset == "vmoe_s32_last2_e8" and not options)
    assert ("would make it" in finding[1]) == (more is not None)
    if more is not None:
        share = models.describe(preset, **options, moe_layers=more).routed_share
        assert f"moe_layers='{more}' would make it {share:.0%}" in finding[1]


def test_the_finding_on_narrow_experts_in_every_block():
    sizes = {"moe_layers": "every_1", "expert_mlp_dim": 200}
    ((level, text),) = models.describe("vmoe_b32", **sizes).findings()
    assert level == "notice"
    assert text.endswith(": a larger expert_mlp_dim would raise the share.")


def test_the_finding_on_one_expert_per_token():
    one, two = (
        models.describe("vmoe_b32", num_selected_experts=count) for count in (1, 2)
    )
    (text,) = (text for _, text in one.findings() if "ImageNet" in text)
    share = f"num_selected_experts=2 would route {two.routed_share:.0%} of the FLOPs."
    assert text.endswith(share)
