"""Show on digits what Multilinear Mixture of Experts shows on ImageNet and CelebA.

specialisation: a ViT learns to read numbers from 00 to 99, two scanned digits each.
With a CP muMoE head of more and more experts, each expert's ablation costs fewer
classes their accuracy: polysemanticity falls (Figures 2, 3, 18, 19 and 22). The dense
ViT's MLPs are cut to their largest singular values, too (Figure 7).

editing: digits of five attributes, where those from 5 on are hardly ever inverted in
the training data, so that inverted ones are mistaken. One edit of the head corrects it
without training (Table 2, Figure 25); it is compared with oversampling, adversarial
debiasing and the blind threshold.

patches: a muMoE Mixer, and the patches that use an expert most (Figure 4).

costs counts multiply-adds with and without the whole weight tensor (Table 8). Heads on
the features of the dense ViT compare entmax with softmax (activation, Figure 20), batch
normalisation of the coefficients with none (normalization, Figure 21), factorised heads
with a linear one of as many parameters (matched, Figure 23), and with dense and sparse
mixtures of linear heads (capacity, Figure 24).
"""

import argparse
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import keras
from rich.console import Console

from keras_moe import analysis, data, models
from keras_moe.analysis import plots
from keras_moe.cli._arguments import RESUMES, Result, add_count
from keras_moe.cli.train import backend_and_versions
from keras_moe.layers import MultilinearExperts, MuMoE, MuMoEConfig
from keras_moe.ops import Routing
from tools.studies import plots as study_plots
from tools.studies.mumoe_editing import Editing
from tools.studies.mumoe_heads import (
    Activation,
    Capacity,
    Heads,
    Matched,
    Normalization,
)
from tools.studies.mumoe_models import (
    SHAPE,
    SIZES,
    TEST_NUMBERS,
    TRAIN_NUMBERS,
    DenseModels,
    Fit,
)
from tools.studies.study import (
    OnProgress,
    Part,
    Run,
    Study,
    add_parts,
    add_training,
    new_table,
    percent,
    plus_minus,
    run_parts,
    run_settings,
    spread,
    spread_of,
)
from tools.studies.truncated_svd import TruncatedSVD

EXAMPLES = """\
python -m tools.studies mumoe
python -m tools.studies mumoe --parts specialisation --experts 2 4 8 16 --seeds 5"""
INTERRUPTED = RESUMES
PARTS = (
    "costs",
    "specialisation",
    "editing",
    "patches",
    "activation",
    "normalization",
    "matched",
    "capacity",
)
# Experts, inputs and units, ranks, and what the paper prints.
TABLE_8 = (512, 768, 768)
PRINTED = {
    "CP": ("cp", 512, "155.1B", "1.4M"),
    "TR": ("tr", (4, 4, 512), "622.8B", "3.5M"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    what = "The numbers of experts of the heads."
    add_count(parser, "--experts", what, [2, 4, 8, 16, 32], nargs="+")
    parser.add_argument(
        "--positions",
        nargs="+",
        choices=("final", "penultimate"),
        default=["final"],
        help="The layers that the heads are.",
    )
    add_count(parser, "--rank", "The rank of the heads.", 128)
    what = "The number of experts of the head that is edited."
    add_count(parser, "--edited-experts", what, 32)
    add_training(parser, "mumoe_study", 15, 64, 2e-3)


def run(args: argparse.Namespace, console: Console) -> Result:
    settings = run_settings(args)
    study = Study(
        args.output,
        {**settings, "sizes": SIZES, **backend_and_versions()},
        console,
        args.restart,
    )
    fit, experts, rank = Fit(**settings), args.experts, args.rank
    dense = DenseModels(study, fit, args.seeds)
    # One object, which keeps the features.
    heads = Heads(study, dense, fit)
    make = {
        "costs": lambda: Costs(study),
        "specialisation": lambda: Specialisation(
            study, dense, experts, rank, args.positions
        ),
        "editing": lambda: Editing(study, fit, args.seeds, args.edited_experts, rank),
        "patches": lambda: Patches(study, fit),
        "activation": lambda: Activation(study, heads, experts, rank),
        "normalization": lambda: Normalization(study, heads, experts, rank),
        "matched": lambda: Matched(study, heads, experts),
        "capacity": lambda: Capacity(study, heads),
    }
    return run_parts(
        study, {name: make[name]() for name in PARTS if name in args.parts}
    )


def naive_multiply_adds(layer: MultilinearExperts, dim: int) -> int:
    """Multiply-adds of one token if the weight tensor is built from its factors."""
    spec = layer.tensor_spec(dim)
    modes, rank, total = spec.modes, spec.rank, 0
    if spec.factorization == "cp":
        total = math.prod(modes) * rank
    elif spec.factorization == "tr":
        # A chain (R_1, built modes, R_l); the last core's other end is R_1 again.
        for mode in range(1, len(modes)):
            built = math.prod(modes[: mode + 1])
            total += rank[0] * built * rank[mode] * (*rank[1:], 1)[mode]
    # One mode after the other; the units are left.
    return total + sum(math.prod(modes[mode:]) for mode in range(len(modes) - 1))


class Costs(Part):
    """Multiply-adds of one token, by the whole tensor and in factors."""

    def results(self) -> dict:
        experts, inputs, units = TABLE_8
        rows = {}
        for name, (kind, rank, *printed) in PRINTED.items():
            layer = MultilinearExperts(units, experts, kind, rank)
            gate = MuMoE(units, experts, kind, rank).gate.cost((1, inputs)).parameters
            rows[name] = {
                "naive": gate + naive_multiply_adds(layer, inputs),
                "factorized": gate + layer.tensor_spec(inputs).multiply_adds,
                "printed": printed,
            }
        return rows

    def show(self, results: dict, console: Console) -> None:
        experts, inputs, units = TABLE_8
        table = new_table(
            f"Multiply-adds, {experts} experts on {inputs} inputs and {units} units "
            "(Table 8)",
            *("layer", "naive", "paper", "factorized", "paper", "naive / factorized"),
        )
        for name, row in results.items():
            table.add_row(
                name,
                f"{row['naive'] / 1e9:.1f}B",
                row["printed"][0],
                f"{row['factorized'] / 1e6:.2f}M",
                row["printed"][1],
                f"{row['naive'] / row['factorized']:,.0f}",
            )
        console.print(table)


class Specialisation(Part):
    """Polysemanticity by the number of experts."""

    def __init__(
        self,
        study: Study,
        dense: DenseModels,
        experts: Sequence[int],
        rank: int,
        positions: Sequence[str],
    ):
        super().__init__(study)
        self.dense, self.rank = dense, rank
        settings = {"rank": rank, "numbers": [TRAIN_NUMBERS, TEST_NUMBERS]}
        self.heads = [
            Run(
                f"{place} {count}",
                seed,
                settings,
                functools.partial(self.head, place, count, seed),
            )
            for seed in range(dense.seeds)
            for place in positions
            for count in experts
        ]

    def head(
        self, place: str, count: int, seed: int, on_progress: OnProgress
    ) -> tuple[dict, dict]:
        """The ViT with a muMoE head, trained on together."""
        weights, (train, test) = (
            self.dense.weights(seed, on_progress),
            self.dense.images,
        )
        units = 100 if place == "final" else SIZES["hidden_dim"]
        head = MuMoE(units, count, rank=self.rank)
        model = self.dense.new_model(seed, head=head, head_position=place)
        model.backbone.set_weights(weights)
        fit = self.dense.fit
        model.compile(optimizer=fit.optimizer(0.5))
        fit.train(model, *train, on_progress)
        ablation = analysis.ablate_experts(model, *test, verbose=0)
        score = ablation.mean_polysemanticity
        if score is None:
            raise ValueError(
                f"Expected an expert that matters; received: none of {count} after "
                f"{fit.epochs} epochs. Try more --epochs"
            )
        routing = keras.Model(model.input, model.routing["head"])
        gates = routing.predict(test[0], verbose=0).gates
        correct = (ablation.accuracy * ablation.counts).sum()
        result = {
            "accuracy": float(correct / len(test[1])),
            "polysemanticity": score,
            "matter": int((ablation.changes != 0).any(axis=1).sum()),
            "per_image": float((gates > 0).sum(axis=-1).mean()),
        }
        return result, {"gates": gates, **ablation._asdict()}

    def results(self) -> dict:
        runs = [*self.dense.runs, *self.heads]
        by_name = self.study.finish_all(runs)
        dense = by_name.pop("dense")
        return {
            "dense": {"accuracy": spread_of(dense, "accuracy")},
            "svd": dense[0]["svd"],
            "heads": {
                name: {
                    "accuracy": spread_of(runs, "accuracy"),
                    "polysemanticity": [run["polysemanticity"] for run in runs],
                    "experts_that_matter": spread_of(runs, "matter"),
                    "experts_per_image": spread_of(runs, "per_image"),
                }
                for name, runs in by_name.items()
            },
        }

    def show(self, results: dict, console: Console) -> None:
        table = new_table(
            "Numbers from 00 to 99: CP muMoE heads (Figure 3)",
            *("head", "accuracy %", "polysemanticity", "experts that matter"),
            "experts per image",
        )
        table.add_row("dense", percent(results["dense"]["accuracy"]), "", "", "")
        for name, row in results["heads"].items():
            table.add_row(
                name,
                percent(row["accuracy"]),
                plus_minus(spread(row["polysemanticity"])),
                f"{row['experts_that_matter']['mean']:.1f}",
                f"{row['experts_per_image']['mean']:.1f}",
            )
        console.print(table)
        console.print(TruncatedSVD(**results["svd"]).table())

    def draw(self, every: dict) -> list[Path]:
        """Pictures of the first seed's heads, and polysemanticity of all seeds."""
        results, folder = every["specialisation"], self.study.folder
        scores, ablations, loads = {}, {}, {}
        for run in self.heads:
            if run.seed:
                continue
            arrays = self.study.arrays(run)
            place, count = run.name.split()
            own = results["heads"][run.name]["polysemanticity"]
            scores.setdefault(f"{place} layer", {})[int(count)] = own
            fields = analysis.ExpertAblation._fields
            ablations[f"{run.name} experts"] = analysis.ExpertAblation(
                **{field: arrays[field] for field in fields}
            )
            record = Routing(*[arrays["gates"]] * len(Routing._fields))
            loads[f"{run.name} experts"] = analysis.expert_load(record)
        paths = {
            name: folder / f"{name}.png"
            for name in ("polysemanticity", "ablation", "load", "svd", "images")
        }
        svd = TruncatedSVD(**results["svd"])
        study_plots.plot_polysemanticity(scores, paths["polysemanticity"])
        plots.plot_ablation(ablations, paths["ablation"])
        plots.plot_expert_load(loads, paths["load"])
        study_plots.plot_truncated_svd(svd, paths["svd"])
        # Those of the last head; after few steps no coefficient may be that large.
        if not (record.gates >= 0.5).any():
            paths.pop("images")
        else:
            images, labels = self.dense.images[1]
            labels = [f"{label:02d}" for label in labels]
            title = f"Images of each expert: {run.name} experts"
            plots.plot_expert_images(
                images, record, paths["images"], labels, title=title
            )
        return list(paths.values())


class Patches(Part):
    """The patches that use the experts of a Mixer's first and last block."""

    def __init__(self, study: Study, fit: Fit):
        super().__init__(study)
        self.fit = fit
        self.run = Run("patches", 0, {}, self.train)

    def results(self) -> dict:
        return self.study.finish(self.run)

    def train(self, on_progress: OnProgress) -> tuple[dict, dict]:
        """Trains the Mixer; keeps the gates of the test images."""
        keras.utils.set_random_seed(0)
        backbone = models.MixerBackbone(
            image_shape=SHAPE,
            token_mlp_dim=32,
            moe=MuMoEConfig(num_experts=16),
            token_mixer="mumoe",
            activation="gelu",
            seed=0,
            **SIZES,
        )
        model = models.MixerImageClassifier(backbone, 10)
        model.compile(optimizer=self.fit.optimizer())
        self.fit.train(model, *data.load_digits("train", SHAPE), on_progress)
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
