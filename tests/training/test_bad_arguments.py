"""What training refuses, and that the error names the value."""

import dataclasses

import keras
import numpy as np
import pytest

from keras_moe import training
from keras_moe.training import load_recipe, train
from keras_moe.training.optimizers import group_factors
from tests.pair_models import clip, limoe
from tests.refusals import check_refused, named_values, refuses
from tests.small_models import SMALL, classifier, images
from tests.training.pair_folder import pair_recipe
from tests.training.runs import LONG_RUN, linear_model, short_recipe

pytestmark = pytest.mark.usefixtures("op_by_op")

TWO, THREE = np.zeros((4, 2)), np.zeros((4, 3))
IMAGES, LABELS = images(6, *SMALL["image_shape"]), np.array([0, 1, 2, 0, 1, 2])
BRANCHED = short_recipe(**LONG_RUN)
COSINE = BRANCHED.replace(schedule={"decay": "cosine", "cooldown_steps": 0})
CLIP_TOKENS = {"objective.tokenizer": "clip", "objective.vocabulary_size": 600}
KERNELS = ["block_1/moe/experts/hidden_kernel", "predictions/kernel"]


def recipe(**settings):
    needed = {"preset": "mumoe_mixer_s16_cp", "batch_size": 128, "learning_rate": 0.1}
    return short_recipe(**{**needed, "epochs": 3, **settings})


def vit(moe_layers=None):
    return classifier(image_shape=(16, 8, 3), moe_layers=moe_layers)


def after(method, argument):
    model = vit()
    getattr(model, method)(argument)
    return model


def plain_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def measured(callback, model):
    callback.set_model(model)
    return callback.measure()


@dataclasses.dataclass(frozen=True)
class Most(training.Objective):
    monitor = training.Monitor("val_loss", "most")


MAKERS = {
    "recipe": recipe,
    "pairs": lambda **kw: pair_recipe("x", **kw),
    "schedule": lambda **kw: training.ScheduleConfig(
        **{"learning_rate": 0.1, "steps": 100, "warmup_steps": 10, **kw}
    ).new_schedule(1),
    "branch": training.cooldown_branch,
    "Adafactor": training.ViTGAdafactor,
    "Muon": training.Muon,
    "optimizer": lambda **kw: training.optimizer_class("adamw")(0.1, **kw),
    "groups": lambda **kw: group_factors([kw], KERNELS),
    "best epoch": lambda **kw: training.BestEpoch("loss", **kw),
    "recipe of labels": lambda **kw: recipe(objective={"name": "multi_label", **kw}),
    "precision": lambda **kw: training.MeanAveragePrecision(**{"num_classes": 3, **kw}),
    "health": lambda **kw: training.RouterHealth(**{"images": IMAGES, **kw}),
    "usage": lambda **kw: training.UsageRecorder(**{"inputs": IMAGES, **kw}),
    "upcycle": lambda **kw: training.upcycle(vit().backbone, **kw),
    "upcycle CLIP": lambda **kw: training.upcycle(clip({}), **kw),
    "upcycle LIMoE": lambda **kw: training.upcycle(limoe(None), **kw),
    "load": lambda **kw: load_recipe("mumoe_digits", **kw),
    "replace": lambda **kw: recipe().replace(**kw),
    "compile": lambda **kw: recipe(**kw).compile(linear_model(), 1),
    "datasets": lambda **kw: recipe(**kw).datasets(linear_model()),
    "train": lambda **kw: train(recipe(**kw)),
    "call": lambda call: call(),
}

# The message names argument and value.
BAD_VALUES = {
    "recipe": {
        "dtype": ["half"], "seed": [None], "batch_size": [2.5], "unreadable": ["skip"],
        "epochs": [0], "learning_rate": [0, "high"], "final_learning_rate": [-1],
        "warmup_steps": [-1], "decay": ["steps"], "timescale": [0], "best": ["newest"],
        "patience": [0, 1.5], "schedule_steps": [0], "weight_decay": [-0.1],
        "weight_decay_times": ["peak"], "gradient_clipping": [0],
        "gradient_accumulation_steps": [3], "ema_momentum": [1.0],
        "groups": [{"match": "head"}], "monitor": [5],
    },
    "replace": {
        "name": [5], "description": [None], "reference": [["x"]], "notes": [1.5],
    },
    "pairs": {
        "data.source": [{}, ["emoji"]], "data.captions": ["last"],
        "data.epoch_size": [0], "objective.loss": ["hinge"],
        "objective.multi_positive": [1], "objective.chunk_size": [0],
        "objective.similarity_dtype": ["int8"], "objective.vocabulary_size": [0],
        "objective.max_length": [2.5], "objective.evaluation_batch_size": [0],
    },
    "schedule": {"decay": ["stairs"]},
    "Muon": {
        "momentum": [1.0], "rms_rate": [0.0],
        "ns_dtype": ["float16"], "exclude_layers": [["("]],
    },
    "Adafactor": {"epsilon": [0.0], "momentum": [-0.1], "peak_learning_rate": [0.0]},
    "optimizer": {"groups": ["head"]},
    "best epoch": {"mode": ["most"]},
    "recipe of labels": {"max_labels": [0, True]},
    "precision": {"num_classes": [0], "num_bins": [1], "max_logit": [0]},
    "health": {"every": [0], "unit": ["batches"], "training": [1]},
    "usage": {"batch_size": [0], "unit": ["days"], "training": [1]},
    "upcycle CLIP": {"towers": [()]},
    "upcycle": {
        "num_experts": [0, 1], "noise": [-1.0], "router": ["hash"],
        "moe_layers": [[], [9]], "hidden_dim": [8], "expert_mlp_dim": [8],
        "preset": ["limoe"], "normalize_gates": ["never"],
    },
}  # fmt: skip

# Values that do not fit together, and errors that say more.
OTHERS = [
    ("recipe", {"epochs": None}, "epochs=None, steps=None"),
    ("recipe", {"steps": 10}, "epochs=3, steps=10"),
    ("recipe", {"cooldown_steps": 5}, "cooldown_steps=5, decay='cosine'"),
    ("recipe", {"groups": [{"match": "head", "rate": 1.0}]}, "rate=1.0"),
    ("recipe", {"augment": [len]}, "augment="),
    ("recipe", {"monitor": "val_loss"}, "monitor='val_loss', monitor_mode=None"),
    ("pairs", {"data.source": {"emoji": 0}}, r"source\['emoji'\]=0"),
    ("recipe", {"objective": {"max_labels": 3}}, "max_labels=3 .known"),
    ("load", {"schedule.epoch": 1}, "epoch=1 .nearest: epochs"),
    ("load", {"data.captions": "first"}, "received: captions='first'"),
    ("replace", {"data": "digits"}, "as data.batch_size; received: data='digits'"),
    ("replace", {"schedule.epochs.more": 1}, r"dict of settings at schedule\.epochs"),
    ("replace", {"objective.name": "none"}, r"objective\.name to be one of .*'multi_"),
    ("schedule", {"decay": "rsqrt", "cooldown_steps": 91}, "cooldown_steps=91"),
    ("schedule", {"decay": "constant", "final_learning_rate": 0.01}, "_rate=0.01"),
    ("schedule", {"decay": "cosine", "warmup_steps": 100}, "of 100 steps, or.*=100"),
    ("branch", {"recipe": COSINE, "start_step": 600, "cooldown_steps": 80}, "'cosine'"),
    ("branch", {"recipe": BRANCHED, "start_step": 99, "cooldown_steps": 80}, "step=99"),
    ("branch", {"recipe": BRANCHED, "start_step": 600, "cooldown_steps": 0}, "steps=0"),
    ("optimizer", {"groups": [{"match": "("}]}, r"'match': '\('"),
    ("optimizer", {"groups": [{"match": "a", "lr": 1.0}]}, "a group; received: lr=1.0"),
    ("groups", {"match": "expert"}, r"match='expert' .nearest: .*experts"),
    ("usage", {"inputs": IMAGES[:0]}, "number of inputs=0"),
    ("usage", {"groups": LABELS[:3]}, r"lengths \[3, 6\]"),
    ("usage", {"every": 5, "last": 4}, "last=4"),
    ("upcycle", {"preset": "clip_up", "router": "soft"}, "router='soft'"),
    ("upcycle", {"carry_optimizer": True}, "without an optimizer"),
    ("upcycle LIMoE", {"towers": ("image",)}, "towers=None for LIMoEBackbone"),
    ("upcycle CLIP", {"towers": ("sound",)}, "towers='sound'"),
    ("upcycle CLIP", {"towers": {"image": {"noise": 1}}}, "noise=1"),
    ("pairs", CLIP_TOKENS, "vocabulary_size=600 with tokenizer='clip'"),
    (
        "compile",
        {"optimizer_options": {"learning_rate": 1}},
        "options={'learning_rate'",
    ),
    ("compile", {"groups": [{"match": "experts"}]}, "match='experts'"),
    ("datasets", {"batch_size": 2000}, "batch_size=2000"),
    ("datasets", {"test_split": "dev"}, "split='dev'"),
    ("train", {"data": "digit"}, "source='digit'"),
    ("train", {"best": "keep"}, "best='keep'"),
]

CALLS = [
    (lambda: load_recipe("mumoe_digit"), "'mumoe_digit' .nearest: mumoe_digits"),
    (lambda: training.ModelConfig(preset="vit_b16", overrides=[1]), r"overrides=\[1\]"),
    (lambda: training.optimizer_class("adamx"), "received: optimizer='adamx'"),
    (
        lambda: train(recipe(), training.Datasets([], [], 10, 1), checkpoint_dir="run"),
        "a function from steps to datasets",
    ),
    (
        lambda: recipe(model_arguments={"num_layer": 1}).new_model(10),
        "num_layer=1 .nearest: num_layers",
    ),
    (
        lambda: load_recipe("mumoe_mixer_s16", schedule={"epochs": 2}).learning_rate(1),
        "the run of 2 steps, or.*; received: warmup_steps=10000",
    ),
    *(
        (lambda metric=metric: metric.update_state(TWO, THREE), "sparse_labels=False")
        for metric in (training.MeanAveragePrecision(3), training.PrecisionAt1())
    ),
    (lambda: training.PeriodicEvaluation({}), r"evaluators=\{\}"),
    (
        lambda: training.FewShot((IMAGES, LABELS), (IMAGES, LABELS))(plain_model()),
        "with features; received: Sequential",
    ),
    (
        lambda: measured(training.RouterHealth(IMAGES), plain_model()),
        "with MoE blocks.*received: Sequential",
    ),
    (lambda: measured(training.UsageRecorder(IMAGES), vit()), "model with MoE blocks"),
    (lambda: training.register_objective("none")(Most), "mode='most'"),
    # Models that cannot be upcycled
    (lambda: training.upcycle(vit(moe_layers=[1])), "block_1"),
    (lambda: training.upcycle(after("enable_lora", 2)), "lora_enabled=True"),
    (lambda: training.upcycle(after("quantize", "int8")), "quantization_mode='int8'"),
    (lambda: training.upcycle(plain_model()), "KerasHub model .*: Sequential"),
    (lambda: training.upcycle("vmoe_b32"), "received: 'vmoe_b32'"),
]


@pytest.mark.parametrize(("maker", "arguments", "message"), [
    *named_values(BAD_VALUES),
    *OTHERS,
    *(("call", {"call": call}, message) for call, message in CALLS),
])  # fmt: skip
def test_bad_arguments_are_refused(maker, arguments, message):
    check_refused(MAKERS[maker], arguments, message)


@pytest.mark.parametrize(("name", "text", "message"), [
    ("bad.json", '{"preset": "vit"}', "preset='vit' .nearest: model.preset"),
    ("bad.json", "{", ""),
    ("bad.json", "[]", "is not a mapping"),
    ("bad.toml", "[data", ""),
    ("bad.toml", "[model]\npreset = 'vit'", "'data' and 'schedule'"),
])  # fmt: skip
def test_errors_of_a_file_name_it(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    refuses(f"{message}.*, in .*{name}", load_recipe, tmp_path / name)
