"""What models and their parts refuse, and that the error names the value."""

import numpy as np
import pytest
from keras.losses import MeanSquaredError

from keras_moe import models
from keras_moe.layers import MLP, Attention, Block, MuMoE
from keras_moe.losses import SigmoidContrastiveLoss
from keras_moe.models import (
    ContrastiveAccuracy,
    ContrastiveModel,
    ImagePreprocessor,
    ModelCard,
    TextBackbone,
    TextTokenizer,
    ViTBackbone,
    ViTImageClassifier,
)
from keras_moe.models.loading._overrides import updated_moe
from keras_moe.training import upcycle
from tests.pair_models import IDS, IMAGE, IMAGES, MOE, PAIRS, TEXT, TEXTS, clip, limoe
from tests.refusals import check_refused, named_values
from tests.small_models import images, mixer, small_tokenizer, vit

pytestmark = pytest.mark.usefixtures("op_by_op")

NAN = float("nan")
HEAD = MuMoE(3, 4, rank=5)
UNKNOWN = {"limoe": {"thresholds": {"sound": 1.0}}}
BY_MODALITY = {"auxiliary_losses": {"limoe": {"thresholds": {"text": 0.7}}}}
PROJECTED = {**TEXT, "projection_dim": 5}
EMPTY = {**TEXTS, "padding_mask": np.zeros(IDS.shape, bool)}
RESULT = models.CardResult
PIXELS = np.zeros((1, 2, 3, 4, 3), "uint8")
ODD = ImagePreprocessor((9, 9, 3))


def digits(**arguments):
    defaults = {"preset": "vmoe_digits", "load_weights": False}
    return models.from_preset(**{**defaults, **arguments})


def dense_mixer():
    return mixer(moe_layers=None)


def classifier(num_classes=3, **head):
    body = {name: head.pop(name) for name in list(head) if "norm_bias" in name}
    body |= {"num_layers": 1, "moe_layers": None}
    return ViTImageClassifier(vit(**body), num_classes, **head)


def pairs_model():
    return ContrastiveModel(clip())


MAKERS = {
    "digits": digits,
    "describe": lambda **kw: models.describe(**{"preset": "vmoe_digits", **kw}),
    "ViT": vit,
    "ViT(...)": ViTBackbone,
    "mixer": mixer,
    "mixer_s32": lambda **kw: models.from_preset("mixer_s32", **kw),
    "muMoE": lambda **kw: mixer(**{"router": "mumoe", **kw}),
    "MoE++": lambda **kw: vit(**{"zero_experts": 1, "copy_experts": 1, **kw}),
    "text": lambda **kw: TextBackbone.from_config({**TEXT, "projection_dim": 4, **kw}),
    "classifier": classifier,
    "preprocessor": lambda **kw: ImagePreprocessor(**{"image_shape": (8, 8, 3), **kw}),
    "card": ModelCard,
    "tokenizer": lambda **kw: TextTokenizer(
        **{"tokenizer": small_tokenizer().tokenizer, **kw}
    ),
    "block": lambda **kw: Block(Attention(2, 4), MLP(8), **kw),
    "clip": clip,
    "limoe": limoe,
    "contrastive accuracy": ContrastiveAccuracy,
    "overrides": lambda **kw: updated_moe(None, kw),
    "call": lambda call: call(),
}

# The message names argument and value.
BAD_VALUES = {
    "digits": {
        "task": ["segmenter"], "num_classes": [0],
        "image_shape": [(16, 16), 8, (16.0, 16.0, 1), "16", (16, None, 1)],
        "patch_size": [4.0, "4"], "hidden_dim": ["64"], "num_layers": [0, 200_000],
        "num_heads": [0, 3], "class_token": [2], "final_norm": ["no"],
        "position_embedding": ["rotary"], "moe_layers": [[4], [1, 1], 5],
        "capacity_factor": ["1"], "examples_per_group": [0, 1.5],
    },
    "describe": {"num_classes": [-5], "num_layers": [200_000]},
    "ViT": {
        "router": ["hash"], "eval_capacity": [0], "evaluation": ["paper"],
        "expert_use_bias": [1], "shared_expert_initialization": ["no"], "slots": [3],
        "auxiliary_losses": ["all"], "seed": [1.5, -1, "x", True],
        "rematerialize": ["full"], "stochastic_depth": [1.0, NAN],
    },
    "ViT(...)": {"num_experts": [8], "num_layer": [8]},
    "mixer": {
        "token_mlp_dim": [0], "num_heads": [2], "stochastic_depth": [-0.1],
        "token_mixer": ["moe"],
    },
    "muMoE": {"rank": [0], "ranks": [2]},
    "MoE++": {
        "num_experts": [0], "tau": [0.0], "zero_experts": [-1],
        "gating_residual": ["yes"], "moe_layers": [[2]], "gated_experts": [1],
        "eval_capacity": [2],
    },
    "text": {
        "pooling": ["middle", None], "end_of_text_id": [20], "vocabulary_size": [0],
        "max_length": [0], "num_heads": [3], "causal": [1], "mask_padding": [None],
        "projection_dim": [0], "final_norm": [0],
    },
    "classifier": {
        "head": ["mumoe"], "head_dtype": ["flot32"], "multi_label": ["x"],
        "head_bias": ["log"], "output_activation": ["relu"], "dropout": [-1.0],
        "pooling": ["max"], "poolin": ["map"], "preprocessor": [3],
    },
    "preprocessor": {
        "image_shape": [(8, 8)], "mean": [[0.5, 0.5], "x"], "std": [0, NAN],
        "interpolation": ["lanczos"], "antialias": [1], "center_crop": [0, 1.2],
        "class_names": ["cat", range(3)],
    },
    "tokenizer": {
        "tokenizer": ["clip"], "max_length": [0], "start_id": [-1, 10**9],
        "end_id": [530], "padding_id": [None], "lower_case": [1],
    },
    "block": {
        "stochastic_depth": [-0.1, 1.0, NAN, "0.1", True],
        "layer_scale_initial_value": [0],
    },
    "clip": {"temperature": ["hot"], "num_experts": [4]},
    "limoe": {"num_heads": [3], "projection_dim": [0]},
    "contrastive accuracy": {"chunk_size": [0]},
    "overrides": {"experts": [3]},
}  # fmt: skip

# Values that do not fit together, and errors that say more.
OTHERS = [
    ("digits", {"preset": "vmoe_b23"}, "nearest: vmoe_b"),
    ("digits", {"num_expert": 8}, "num_expert=8 .nearest: num_experts"),
    ("digits", {"preset": "vit_s32", "task": "image_classifier"}, "num_classes=None"),
    ("digits", {"task": "backbone", "num_classes": 10}, "num_classes=10"),
    ("digits", {"patch_size": 5}, r"patch_size=\(5, 5\)"),
    ("digits", {"num_layers": 10**12, "moe_layers": [1]}, "<= 1000; .*=1000000000000"),
    ("digits", {"num_experts": 2, "num_selected_experts": 3}, "_experts=3"),
    ("digits", {"moe_layers": "every_9"}, "'every_9'"),
    ("digits", {"moe_layers": [1.7]}, "moe_layers=1.7"),
    ("digits", {"moe_layers": None, "auxiliary_losses": {"bogus": 1}}, "'bogus'"),
    ("digits", {"activation": lambda x: x}, "lambda"),
    ("ViT", {"router": "soft", "eval_capacity_factor": 1.0}, "capacity_factor=1.0"),
    ("ViT", {"router": "soft", "auxiliary_losses": {"load": 0.1}}, "SoftRouter"),
    ("ViT", {"moe": {"router": "mumoe", "eval_capacity": 3}}, "MuMoEConfig; .*city=3"),
    ("ViT", {"eval_capacity": 2, "eval_capacity_factor": 1.0}, "=2, .*_factor=1.0"),
    ("ViT", {"router": {"num_slots": 3}}, "the router's 'name'"),
    ("ViT", {"router": {"name": "soft", "num_experts": 2}}, "num_experts=2"),
    ("mixer", {"token_mixer": "mumoe", "router": "soft"}, "router=.*'soft'"),
    ("mixer_s32", {"pooling": "map", "num_classes": 2}, "pooling='map'"),
    ("muMoE", {"moe": {"router": "mumoe", "gating_residual": True}}, "MuMoEConfig;"),
    ("MoE++", {"router": "soft"}, "router='soft'"),
    ("text", {"pooling": "last", "end_of_text_id": 2}, "end_of_text_id=2"),
    ("text", {**MOE, "expert_pools": [[0, 1], [1, 2]]}, r"\[\[0, 1\], \[1, 2\]\]"),
    ("classifier", {"output_activation": "sigmoid"}, "activation='sigmoid'"),
    ("classifier", {"num_classes": 4, "head": HEAD}, "units=3"),
    ("classifier", {"head_position": "penultimate"}, "head=None"),
    ("classifier", {"head": HEAD, "head_position": "last"}, "head_position='last'"),
    ("classifier", {"pooling": "first"}, "class_token=True"),
    ("classifier", {"pooling": "map", "query_key_norm_bias": True}, "bias=True"),
    ("card", {"tags": "vision"}, "list of strings; received: 'vision'"),
    ("card", {"results": [RESULT("a", NAN, "c")]}, "a to be a finite number"),
    ("tokenizer", {"max_length": 2, "start_id": 1, "end_id": 2}, "max_length=2"),
    ("clip", {"projection_dim": None, "text": PROJECTED}, "one size"),
    ("clip", {"num_experts": 4}, "in the config of a tower"),
    ("clip", {"image": {**IMAGE, "dtype": "float16"}}, "dtype"),
    ("clip", {"text": {**TEXT, **MOE, "num_modalities": 2}}, "the tower text"),
    ("clip", {"text": {**TEXT, **MOE, **BY_MODALITY}}, "modalities 0 to 0"),
    ("clip", {"temperature": {"scale": -1.0}}, "scale > 0"),
    ("limoe", {"moe": {"router": "soft", "auxiliary_losses": None}}, "soft routing"),
    ("limoe", {"moe": {"auxiliary_losses": UNKNOWN}}, "modalit"),
]

CALLS = [
    (lambda: models.describe("mumoe_vit_s16_cp", zero_experts=1), "MuMoEConfig; rec"),
    (lambda: ViTBackbone(**IMAGE).with_router_arguments(tau=1.0), "Backbone without"),
    (lambda: upcycle(dense_mixer(), 4, router="mumoe", use_bias=False), "bias=False"),
    (lambda: classifier().with_logit_offsets(1, np.ones(4)), "head=None"),
    (lambda: small_tokenizer(vocabulary_size=514), "vocabulary_size=514"),
    (lambda: small_tokenizer()(["a cat", "a \ud800"]), r"surrogates; .*captions\[1\]"),
    (lambda: TextTokenizer.trained(["a b"], 600), "several letters"),
    (lambda: ImagePreprocessor((8, 8, 3))(None), "Expected images"),
    (lambda: ImagePreprocessor((8, 8, 3))(PIXELS), "Expected images"),
    # Models of pairs
    (lambda: clip().predict({"images": IMAGES, "token_ids": IDS}), "ding_mask alone"),
    (lambda: clip().predict(TEXTS), r"encoder\('text'\), which take one modality"),
    (lambda: clip().encoder("sound"), "received: modality='sound'"),
    (lambda: pairs_model().encode_text(EMPTY), "a token that is no padding"),
    (lambda: pairs_model().encode_text(["a cat"]), "TextTokenizer for its prepr"),
    (lambda: pairs_model().compile(loss="mse"), r"a loss of \(y_true, y_pred\)"),
    (lambda: pairs_model().compile(loss=MeanSquaredError()), "dict of emb.*loss=<Loss"),
    (lambda: pairs_model().compile(metrics=["accuracy"]), "metrics of embeddings"),
    (lambda: pairs_model().compile(loss=SigmoidContrastiveLoss()), r"\['logit_bias'"),
    (lambda: pairs_model().fit(PAIRS, np.zeros(3)), "y of ndarray"),
    (lambda: pairs_model().predict(IMAGES), "received: an array"),
    (lambda: ContrastiveModel(clip(), small_tokenizer()), "vocabulary_size"),
    (lambda: ContrastiveModel(clip(), None, ODD), "preprocessor of image_shape="),
    (lambda: ContrastiveModel(ViTBackbone(**IMAGE)), "to be a PairBackbone"),
]


@pytest.mark.parametrize(("maker", "arguments", "message"), [
    *named_values(BAD_VALUES),
    *OTHERS,
    *(("call", {"call": call}, message) for call, message in CALLS),
])  # fmt: skip
def test_bad_arguments_are_refused(maker, arguments, message):
    check_refused(MAKERS[maker], arguments, message)


@pytest.mark.parametrize(("changes", "message"), [
    ({"token_ids": IDS + 1}, "vocabulary_size - 1 = 19; received: 20"),
    ({"images": IMAGES[:2]}, "as many images as texts"),
    ({"images": images(3, 16, 8, 3)}, r"Expected images of shape \(batch, 8, 8"),
    ({k: np.pad(v, ((0, 0), (0, 2))) for k, v in TEXTS.items()}, "max_length=6"),
    ({"token_ids": IDS.astype("float32")}, "integers"),
    ({"image_ids": np.arange(3)}, "alone; received: .*'image_ids'"),
    ({k: v[:, :0] for k, v in TEXTS.items()}, "at least one token"),
    ({"padding_mask": EMPTY["padding_mask"]}, "a token that is no padding"),
])  # fmt: skip
@pytest.mark.parametrize("make", [clip, limoe, pairs_model])
def test_bad_pairs_are_refused(make, changes, message):
    inputs = {"x": {**PAIRS, **changes}, "verbose": 0}
    check_refused(make().predict, inputs, message)
