"""Training: recipes, runs, checkpoints, optimizers and sparse upcycling."""

from keras_moe.training._upcycled import UpcyclingReport
from keras_moe.training.callbacks import BestEpoch, ScalarLog
from keras_moe.training.checkpoints import (
    Checkpoint,
    find_checkpoint,
    open_checkpoint,
    run_lock,
    save_checkpoint,
)
from keras_moe.training.evaluators import (
    FewShot,
    PeriodicEvaluation,
    Retrieval,
    ZeroShot,
)
from keras_moe.training.metrics import MeanAveragePrecision, PrecisionAt1
from keras_moe.training.model_soups import Soup, cooldown_branch, greedy_soup
from keras_moe.training.muon import Muon
from keras_moe.training.non_finite import (
    NonFinite,
    NonFiniteLoss,
    locate_non_finite,
)
from keras_moe.training.objectives import (
    Classification,
    Monitor,
    MultiLabel,
    Objective,
    register_objective,
)
from keras_moe.training.optimizers import (
    OptimizerConfig,
    ViTGAdafactor,
    optimizer_class,
)
from keras_moe.training.recipes import Recipe, list_recipes, load_recipe
from keras_moe.training.router_health import RouterHealth, UsageRecorder
from keras_moe.training.run import Training, train
from keras_moe.training.run_checkpoint import RunCheckpoint
from keras_moe.training.schedules import ScheduleConfig, WarmupCooldown
from keras_moe.training.sections import (
    DataConfig,
    Datasets,
    ImageData,
    ModelConfig,
    PairData,
    TextData,
)
from keras_moe.training.text_objectives import Contrastive, NextToken
from keras_moe.training.twin_runs import Twin, Twins, twins
from keras_moe.training.upcycling import upcycle

__all__ = [
    "BestEpoch", "Checkpoint", "Classification", "Contrastive", "DataConfig",
    "Datasets", "FewShot", "ImageData", "MeanAveragePrecision", "ModelConfig",
    "Monitor", "MultiLabel", "Muon", "NextToken", "NonFinite", "NonFiniteLoss",
    "Objective", "OptimizerConfig", "PairData", "PeriodicEvaluation", "PrecisionAt1",
    "Recipe", "Retrieval", "RouterHealth", "RunCheckpoint", "ScalarLog",
    "ScheduleConfig", "Soup", "TextData", "Training", "Twin", "Twins",
    "UpcyclingReport", "UsageRecorder", "ViTGAdafactor", "WarmupCooldown", "ZeroShot",
    "cooldown_branch", "find_checkpoint", "greedy_soup", "list_recipes", "load_recipe",
    "locate_non_finite", "open_checkpoint", "optimizer_class", "register_objective",
    "run_lock", "save_checkpoint", "train", "twins", "upcycle",
]  # fmt: skip
__dir__ = __all__.copy
