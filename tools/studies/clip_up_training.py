"""The models of the study of CLIP-UP: dense, upcycled from those, and from scratch."""

import functools
from typing import Any

import keras
import numpy as np

from tools.studies import clip_up_configurations as configurations
from tools.studies.clip_up_configurations import Lengths, Overrides
from tools.studies.pair_training import PairTraining
from tools.studies.study import Run, Study, Tell

SEPARATED, SHARED = "separated", "shared"


class UpcycledPairs:
    """Dense models of pairs for each seed, and mixtures of experts made of them."""

    def __init__(
        self,
        study: Study,
        pairs: PairTraining,
        lengths: Lengths,
        config: dict,
        seeds: int,
    ):
        self.study, self.pairs, self.seeds = study, pairs, seeds
        self.lengths = lengths
        self.of_backbone = {
            SEPARATED: {},
            SHARED: configurations.shared_backbone(config),
        }

    def dense_runs(
        self, backbone: str = SEPARATED, is_whole: bool = False
    ) -> list[Run]:
        """Runs of the dense model, one for each seed."""
        return [self._dense_run(backbone, is_whole, seed) for seed in range(self.seeds)]

    def scratch_runs(
        self, overrides: Overrides, backbone: str = SEPARATED
    ) -> list[Run]:
        """Runs of a sparse model from scratch, one for each seed."""
        own = {**self.of_backbone[backbone], **overrides, **self.lengths.whole}
        return [
            self.pairs.new_run(own, seed, f"{backbone}, from scratch")
            for seed in range(self.seeds)
        ]

    def upcycled_runs(
        self, overrides: Overrides, backbone: str = SEPARATED
    ) -> list[Run]:
        """Runs of a model that is upcycled, one for each seed."""
        own = {**self.of_backbone[backbone], **overrides, **self.lengths.upcycled}
        rows = []
        for seed in range(self.seeds):
            settings = {
                "overrides": own,
                "dense": self.study.settings_of(self._dense_run(backbone, False, seed)),
            }
            make = functools.partial(self._upcycle, own, backbone, seed)
            rows.append(Run("upcycled", seed, settings, make, f"{backbone}, upcycled"))
        return rows

    def _dense_overrides(self, backbone, is_whole):
        return {
            **self.of_backbone[backbone],
            **configurations.without_experts(backbone),
            **(self.lengths.whole if is_whole else self.lengths.dense),
        }

    def _dense_run(self, backbone, is_whole, seed):
        overrides = self._dense_overrides(backbone, is_whole)
        make = functools.partial(self._train_dense, overrides, seed)
        return Run("dense", seed, {"overrides": overrides}, make, f"{backbone}, dense")

    def _train_dense(
        self, overrides: Overrides, seed: int, tell: Tell
    ) -> tuple[dict, dict[str, np.ndarray]]:
        """Trains a dense model, and keeps its weights."""
        model, result = self.pairs.train(overrides, seed, tell)
        weights = model.backbone.get_weights()
        return result, {f"w{index}": value for index, value in enumerate(weights)}

    def _upcycle(self, overrides, backbone, seed, tell):
        run = self._dense_run(backbone, False, seed)
        self.study.finish(run, tell)
        arrays = self.study.arrays(run)
        dense = self._new_dense(backbone, seed)
        dense.backbone.set_weights([arrays[f"w{n}"] for n in range(len(arrays))])
        return self.pairs.train(overrides, seed, tell, dense)[1], {}

    def _new_dense(self, backbone: str, seed: int) -> keras.Model:
        overrides: dict[str, Any] = self._dense_overrides(backbone, False)
        return self.pairs.recipe.replace(**{**overrides, "seed": seed}).new_model(None)
