"""Training: recipes, schedules, sparse upcycling of dense models, and debiasing."""

from keras_moe.training.adafactor import ViTGAdafactor
from keras_moe.training.best_epoch import BestEpoch
from keras_moe.training.checkpoints import (
    clean_checkpoints,
    find_checkpoint,
    list_checkpoints,
    new_storage,
    open_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from keras_moe.training.contrastive import Contrastive
from keras_moe.training.data_config import DataConfig
from keras_moe.training.datasets import Datasets
from keras_moe.training.evaluation_callback import FewShot, PeriodicEvaluation
from keras_moe.training.local_storage import LocalStorage
from keras_moe.training.metrics import MeanAveragePrecision, PrecisionAt1
from keras_moe.training.model_config import ModelConfig
from keras_moe.training.non_finite import (
    NonFinite,
    NonFiniteLoss,
    StopOnNonFinite,
    locate_non_finite,
)
from keras_moe.training.objectives import (
    Classification,
    Headline,
    MultiLabel,
    Objective,
    register_objective,
)
from keras_moe.training.optimizer_config import OptimizerConfig
from keras_moe.training.optimizers import optimizer_class
from keras_moe.training.orbax_storage import OrbaxStorage
from keras_moe.training.pair_evaluators import Retrieval, ZeroShot
from keras_moe.training.recipe_files import list_recipes, load_recipe
from keras_moe.training.recipes import Recipe
from keras_moe.training.router_health import RouterHealth
from keras_moe.training.run import Training, train
from keras_moe.training.run_checkpoint import RunCheckpoint
from keras_moe.training.run_lock import run_lock
from keras_moe.training.schedule_config import ScheduleConfig
from keras_moe.training.schedules import (
    WarmupCooldown,
    WarmupLinearDecay,
    warmup_schedule,
)
from keras_moe.training.souping import Soup, cooldown_branch, greedy_soup
from keras_moe.training.storage import Checkpoint, Retention, Storage
from keras_moe.training.upcycling import UpcyclingReport, upcycle
from keras_moe.training.usage_recorder import UsageRecorder
from keras_moe.training.weight_averages import EvaluateAverages

__all__ = [
    "BestEpoch",
    "Checkpoint",
    "Classification",
    "Contrastive",
    "DataConfig",
    "Datasets",
    "EvaluateAverages",
    "FewShot",
    "Headline",
    "LocalStorage",
    "MeanAveragePrecision",
    "ModelConfig",
    "MultiLabel",
    "NonFinite",
    "NonFiniteLoss",
    "Objective",
    "OptimizerConfig",
    "OrbaxStorage",
    "PeriodicEvaluation",
    "PrecisionAt1",
    "Recipe",
    "Retention",
    "Retrieval",
    "RouterHealth",
    "RunCheckpoint",
    "ScheduleConfig",
    "Soup",
    "StopOnNonFinite",
    "Storage",
    "Training",
    "UpcyclingReport",
    "UsageRecorder",
    "ViTGAdafactor",
    "WarmupCooldown",
    "WarmupLinearDecay",
    "ZeroShot",
    "clean_checkpoints",
    "cooldown_branch",
    "find_checkpoint",
    "greedy_soup",
    "list_checkpoints",
    "list_recipes",
    "load_recipe",
    "locate_non_finite",
    "new_storage",
    "open_checkpoint",
    "optimizer_class",
    "register_objective",
    "restore_checkpoint",
    "run_lock",
    "save_checkpoint",
    "train",
    "upcycle",
    "warmup_schedule",
]
