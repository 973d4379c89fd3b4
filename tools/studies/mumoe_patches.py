"""The part of the study of muMoE about the patches of experts: Figure 4."""

from pathlib import Path

import keras
from rich.console import Console

from keras_moe import data, models
from keras_moe.analysis import plots
from keras_moe.layers import MuMoEConfig
from keras_moe.ops import Routing
from tools.studies.mumoe_digits import SHAPE, SIZES, Fit
from tools.studies.study import Part, Run, Study, Tell


class Patches(Part):
    """The patches that use the experts of a Mixer's first and last block."""

    def __init__(self, study: Study, fit: Fit):
        super().__init__(study)
        self.fit = fit
        self.run = Run("patches", 0, {}, self.train)

    def results(self) -> dict:
        return self.study.finish_all([self.run])[0]

    def train(self, tell: Tell) -> tuple[dict, dict]:
        """Trains the Mixer; keeps the gates of the test images."""
        keras.utils.set_random_seed(0)
        backbone = models.MixerBackbone(
            SHAPE,
            token_mlp_dim=32,
            moe=MuMoEConfig(num_experts=16),
            token_mixer="mumoe",
            activation="gelu",
            seed=0,
            **SIZES,
        )
        model = models.MixerImageClassifier(backbone, 10)
        model.compile(optimizer=self.fit.optimizer())
        self.fit.train(model, *data.load_digits("train", SHAPE), tell)
        images, labels = data.load_digits("test", SHAPE)
        metrics = model.evaluate(images, labels, verbose=0, return_dict=True)
        # The experts of token mixers see channels, which lie nowhere in an image.
        gates = {
            name: record.gates
            for name, record in model.routing.items()
            if not name.endswith("/token_mixer")
        }
        arrays = keras.Model(model.input, gates).predict(images, verbose=0)
        return {"accuracy": metrics["accuracy"]}, arrays

    def show(self, results: dict, console: Console) -> None:
        console.print(f"muMoE Mixer on digits: {results['accuracy']:.1%}")

    def draw(self, every: dict) -> list[Path]:
        images, _ = data.load_digits("test", SHAPE)
        grid = (SHAPE[0] // SIZES["patch_size"], SHAPE[1] // SIZES["patch_size"])
        paths = []
        for name, gates in self.study.arrays(self.run).items():
            paths.append(self.study.folder / f"patches_{name}.png")
            record = Routing(*[gates] * len(Routing._fields))
            title = f"Patches that use an expert most: {name}"
            plots.plot_expert_patches(images, record, grid, paths[-1], title=title)
        return paths
