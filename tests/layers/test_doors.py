"""Values that layers, routers, models and losses refuse at the door."""

import keras
import numpy as np
import pytest

from keras_moe import data, evaluation, losses, ops, routers, training
from keras_moe.layers import (
    MLP,
    EncoderBlock,
    Experts,
    MoE,
    MoEConfig,
    PatchEmbedding,
    PerExpert,
    SelfAttention,
    TokenEmbedding,
)
from keras_moe.models import (
    MixerBackbone,
    MixerImageClassifier,
    ViTBackbone,
    ViTImageClassifier,
    from_preset,
)
from keras_moe.routers import (
    SinkhornAffinity,
    SoftRouter,
    SparsityConstrainedAffinity,
    TokenChoiceRouter,
)
from keras_moe.training.optimizers import OPTIMIZERS
from tests.small_models import SMALL

pytestmark = pytest.mark.usefixtures("op_by_op")


def vit(**arguments):
    return ViTBackbone.from_config({**SMALL, **arguments})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vit(expert_mlp_dim=0), "expert_mlp_dim=0"),
        (
            lambda: ViTBackbone(moe={"moe_layers": [], "router": "soft"}),
            r"moe_layers=\[\]",
        ),
        (lambda: ViTBackbone(moe=MoEConfig(moe_layers=[])), r"moe_layers=\[\]"),
        (lambda: vit(seed=-1), "seed=-1"),
        (lambda: vit(dtype="flot32"), "policy of Keras.*received: dtype='flot32'"),
        (lambda: vit(dtype=3), "dtype=3"),
        (lambda: from_preset("limoe_s16", dtype="int9"), "dtype='int9'"),
        (
            lambda: ViTImageClassifier(vit(), 2, head_dtype="flot32"),
            "head_dtype='flot32'",
        ),
        (
            lambda: vit(router="soft", slot_initializer="normall"),
            "initializer of Keras.*received: slot_initializer='normall'",
        ),
        (lambda: vit(kernel_initializer=3), "kernel_initializer=3"),
        (lambda: PerExpert({"a": 1}), r"initializer=\{'a': 1\}"),
        (lambda: PatchEmbedding(8, 2, kernel_initializer=None), "_initializer=None"),
        (lambda: TokenEmbedding(8, 2, "glort"), "embeddings_initializer='glort'"),
        (lambda: vit(seed=1.5), "seed=1.5"),
        (lambda: vit(seed=True), "seed=True"),
        (lambda: vit(attention_dropout=1.0), "dropout=1.0"),
        (lambda: vit(attention_dropout=float("nan")), "dropout=nan"),
        (lambda: vit(query_key_norm=1), "query_key_norm=1"),
        (lambda: vit(seed=2**32), "seed=4294967296"),
        (lambda: vit(dropout_rate=1.0), "; received: dropout_rate=1.0"),
        (lambda: vit(position_embedding="x"), "position_embedding='x'"),
        (lambda: vit(activation="x"), "activation='x'"),
        (lambda: ViTImageClassifier(vit(), 3, preprocessor=3), "preprocessor=3"),
        (lambda: vit(layer_norm_epsilon=float("nan")), "layer_norm_epsilon=nan"),
        (
            lambda: vit(shared_expert_initialization=1),
            "shared_expert_initialization=1",
        ),
        (lambda: vit(normalize_gates=1), "normalize_gates=1"),
        (lambda: SelfAttention(2, 4, query_key_norm="x"), "query_key_norm='x'"),
        (lambda: SelfAttention(2, 4, seed=-1), "seed=-1"),
        (lambda: MLP(4, seed=-1), "seed=-1"),
        (lambda: Experts(4, 4, seed=0.5), "seed=0.5"),
        (lambda: Experts(4, 4, shared_initialization=1), "shared_initialization=1"),
        (lambda: EncoderBlock(MLP(4), MLP(4), seed=-1), "seed=-1"),
        (lambda: TokenChoiceRouter(4, seed=-1), "seed=-1"),
        (lambda: TokenChoiceRouter(4, normalize_gates=1), "normalize_gates=1"),
        (lambda: SoftRouter(4, normalize=1), "normalize=1"),
        (lambda: SparsityConstrainedAffinity(sparse=1), "sparse=1"),
        (lambda: SparsityConstrainedAffinity(iterations=10**9), "iterations="),
        (lambda: SinkhornAffinity(iterations=1e9), "iterations="),
        (lambda: SinkhornAffinity(iterations=10**9), "iterations="),
        (lambda: losses.AuxiliaryLoss("importance", float("nan")), "weight=nan"),
        (lambda: losses.AuxiliaryLoss("importance", "x"), "weight='x'"),
        (lambda: losses.AuxiliaryLoss("router_z", True), "weight=True"),
        (lambda: training.WarmupCooldown(float("nan"), 3), "peak=nan"),
        (lambda: training.WarmupCooldown(1.0, 3, final=float("nan")), "final=nan"),
        (lambda: training.warmup_schedule("cosine", float("nan"), 3), "peak=nan"),
        (lambda: training.warmup_schedule("linear", 0.0, 3), "peak=0.0"),
        (
            lambda: training.warmup_schedule("cosine", 1.0, 3, final=float("inf")),
            "final=inf",
        ),
        (lambda: OPTIMIZERS["adamw"](float("nan")), "learning_rate=nan"),
        (lambda: OPTIMIZERS["adamw"](learning_rate=-1.0), "learning_rate=-1.0"),
        (lambda: training.PrecisionAt1(sparse_labels=1), "sparse_labels=1"),
        (lambda: from_preset("vit_digits", load_weights="x"), "load_weights='x'"),
        (lambda: ViTBackbone.from_preset("vit_digits", load_weights=1), "load_weights"),
        (lambda: data.load_digits("test", image_shape=(8, 8, 2)), r"\(8, 8, 2\)"),
        (lambda: data.load("digits", "test", (8, 8, 2), batch_size=2), r"\(8, 8, 2\)"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("backbone", [None, 3, "vit"])
def test_a_classifier_wants_its_backbone(backbone):
    with pytest.raises(ValueError, match="Expected backbone to be a ViTBackbone"):
        ViTImageClassifier(backbone, 3)


def test_a_classifier_refuses_the_other_backbone_and_labels():
    backbone = vit()
    with pytest.raises(ValueError, match="Expected backbone to be a MixerBackbone"):
        MixerImageClassifier(backbone, 3)
    with pytest.raises(ValueError, match="multi_label='x'"):
        ViTImageClassifier(backbone, 3, multi_label="x")
    assert not issubclass(ViTBackbone, MixerBackbone)


GATES = np.ones((1, 6, 4), "float32")


@pytest.mark.parametrize("capacity", [2.5, 0, -1, float("nan"), True])
def test_capacities_are_positive_integers(capacity):
    with pytest.raises(ValueError, match="capacity="):
        ops.token_choice(GATES, GATES, 2, capacity)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": np.ones((2, 6), "float32")}, "mask.dtype=float32"),
        ({"mask": np.ones((2, 5), bool)}, r"mask.shape=\(2, 5\)"),
        ({"modality_ids": np.zeros((2, 5), "int32")}, "modality_ids.shape"),
        ({"modality_ids": np.zeros((6,), "int32")}, "modality_ids.shape"),
        ({"modality_ids": np.zeros((2, 6), "float32")}, "modality_ids.dtype"),
    ],
)
def test_masks_and_modalities_fit_the_tokens(arguments, message):
    layer = MoE(routers.get("softmax_token_choice", 4, num_modalities=2), Experts(4, 8))
    tokens = np.ones((2, 6, 8), "float32")
    ids = {"modality_ids": np.zeros((2, 6), "int32")}
    with pytest.raises(ValueError, match=message):
        layer(tokens, **{**ids, **arguments})


SCORES = np.array([[0.1, 0.9, 0.3]])


@pytest.mark.parametrize("label", [0.5, -1, 2, float("nan")])
def test_average_precision_wants_zeros_and_ones(label):
    with pytest.raises(ValueError, match="labels of 0 and 1"):
        evaluation.average_precision([[0, 1, label]], SCORES)


@pytest.mark.parametrize("label", [-7, 3])
def test_numbers_of_classes_are_in_range(label):
    labels = np.array([[0, label]])
    scores = SCORES.astype("float32")
    with pytest.raises(ValueError, match=str(label)):
        evaluation.average_precision(labels, scores, sparse_labels=True)
    for takes in (
        losses.SparseSigmoidCrossentropy(),
        training.PrecisionAt1(sparse_labels=True),
    ):
        with pytest.raises(ValueError, match=f"received: {label}"):
            takes(labels, scores)
    assert np.isfinite(
        keras.ops.convert_to_numpy(
            losses.SparseSigmoidCrossentropy()(np.array([[0, -1]]), scores)
        )
    )
