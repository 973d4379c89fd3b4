"""MoE++ in backbones: residuals from MoE block to MoE block, presets, and training."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe import models
from keras_moe.models import MixerBackbone, ViTBackbone
from keras_moe.routers import TokenChoiceRouter
from tests.compare import assert_close
from tests.pair_models import IMAGE, IMAGES

KINDS = {"zero_experts": 1, "copy_experts": 1, "constant_experts": 2}
SMALL = {name: size for name, size in IMAGE.items() if name != "num_heads"}
SMALL |= {"num_layers": 4, "num_experts": 4, "seed": 0}
VANILLA = {**dict.fromkeys(KINDS, 0), "gating_residual": False}


def backbone(cls=ViTBackbone, **overrides):
    own = {"num_heads": 2} if cls is ViTBackbone else {"token_mlp_dim": 6}
    arguments = {"moe_layers": "every_2", "gating_residual": True, **KINDS}
    return cls.from_config({**SMALL, **own, **arguments, **overrides})


def routers_of(model):
    return {name: model.get_layer(name).feed_forward.router for name in model.routing}


@pytest.mark.parametrize("cls", [ViTBackbone, MixerBackbone])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_logits_go_from_moe_block_to_moe_block(cls, dtype):
    model = backbone(cls, dtype=dtype)
    first, last = routers_of(model).values()
    # Blocks 1 and 3: a dense block between them, and none before the first.
    assert not first.gating_residual
    last.kernel.assign(ops.zeros(last.kernel.shape))
    last.residual_kernel.assign(np.eye(8))
    records = keras.Model(model.input, model.routing).predict(IMAGES, verbose=0)
    logits = [record.logits for record in records.values()]
    assert logits[0].dtype == "float32"
    # All of the float32: bfloat16 keeps 8 bits of them.
    assert_close(logits[1], logits[0], 1e-6)
    assert np.abs(logits[0]).max() > 0.01


def test_experts_without_computation_bring_the_paper_s_defaults():
    arguments = {**SMALL, "num_heads": 2, "moe_layers": "every_1", "zero_experts": 1}
    model = ViTBackbone.from_config(arguments)
    preset = models.registry.builtin_presets()["moepp_vit_b32"]["config"]
    first, *others = routers_of(model).values()
    for router in (first, *others):
        assert router.capacity_factor == preset["capacity_factor"] == 1.1
        assert router.noise_std == preset["noise_std"] == 0.0
        assert router.capacity_multiple_of is preset["capacity_multiple_of"] is None
        assert router.tau == preset["tau"]
    # The first block has none before it.
    assert not first.gating_residual
    assert all(router.gating_residual for router in others)
    layer = model.get_layer("block_1").feed_forward
    assert {"heterogeneous_balance": layer.auxiliary_losses[0].weight} == (
        preset["auxiliary_losses"]
    )
    shared = layer.experts.shared_initialization
    assert shared is preset["shared_expert_initialization"] is False
    again = ViTBackbone.from_config(model.get_config())
    assert again.get_config() == model.get_config()
    # Without them it is a V-MoE.
    model = ViTBackbone.from_config({**arguments, "zero_experts": 0})
    layer = model.get_layer("block_1").feed_forward
    assert (layer.router.capacity_factor, layer.router.noise_std) == (1.05, 1.0)
    assert type(layer.router) is TokenChoiceRouter
    assert layer.experts.shared_initialization


@pytest.mark.parametrize("experts", [8, 16, 32])
def test_sizes_of_the_presets(experts):
    name = "moepp_vit_b32" + ("" if experts == 8 else f"_e{experts}")
    config = models.registry.builtin_presets()[name]["config"]
    constants = 6 if experts == 32 else 2
    assert [config[kind] for kind in KINDS] == [1, 1, constants]
    mine = models.describe(name)
    twin = models.describe(name, **VANILLA)
    per_block = 12 * (
        # The wider router, its map, and v and W_c of the constant experts.
        (constants + 2) * 768 + (experts + constants + 2) ** 2 + 3 * constants * 768
    )
    first = (experts + constants + 2) ** 2
    assert mine.parameters - twin.parameters == per_block - first
    # Table 1: tau N_FFN / (tau N_FFN + N_ZC) of the experts' FLOPs, which are most.
    share = 0.75 * experts / (0.75 * experts + constants + 2)
    tokens = mine.num_tokens
    vanilla_ffn = 12 * 4 * 2 * tokens * 768 * 3072 / 1e9
    saved = twin.gflops - mine.gflops
    assert saved == pytest.approx(vanilla_ffn * (1 - share), rel=0.02)


def test_saved_weights_keep_their_kinds(tmp_path):
    backbone().save_to_preset(tmp_path / "preset")
    folder = str(tmp_path / "preset")
    with pytest.raises(ValueError, match="zero_experts=2"):
        models.from_preset(folder, zero_experts=2, copy_experts=0)
    again = models.from_preset(
        folder, zero_experts=2, copy_experts=0, load_weights=False
    )
    assert again.expert_types == (4, 2, 0, 2)
