"""Shows on digits what *Multilinear Mixture of Experts* shows on ImageNet and CelebA.

    python tools/mumoe_study.py
    python tools/mumoe_study.py --parts specialisation --experts 2 4 8 16 --seeds 5

`specialisation`: a ViT learns to read numbers from 00 to 99, two scanned digits each.
With a CP muMoE head of more and more experts, each expert's ablation costs fewer
classes their accuracy: polysemanticity falls (Figures 2, 3, 18, 19 and 22). The dense
ViT's MLPs are cut to their largest singular values, too (Figure 7).

`editing`: digits of five attributes, where those from 5 on are hardly ever inverted in
the training data, so that inverted ones are mistaken. One edit of the head corrects it
without training (Table 2, Figure 25), beside oversampling, adversarial debiasing and
the blind threshold.

`patches`: a muMoE Mixer, and the patches that use an expert most (Figure 4).

`costs` counts multiply-adds with and without the whole weight tensor (Table 8). Heads
on the features of the dense ViT compare entmax with softmax (`activation`, Figure 20),
batch normalisation of the coefficients with none (`normalization`, Figure 21),
factorised heads with a linear one of as many parameters (`matched`, Figure 23), and
with dense and sparse mixtures of linear heads (`capacity`, Figure 24).

Every finished run is a file below the output folder. An interrupted study goes on where
it stopped.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
# PyTorch's idle threads would spin, and stand still on a machine with other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import mumoe_heads
import numpy as np
from results import (
    check_converged,
    digest,
    earlier_results,
    plain,
    progress_of_runs,
    read_arrays,
    read_result,
    spread,
    write_arrays,
)
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from keras_moe import analysis, data, models, training
from keras_moe.analysis import plots
from keras_moe.files import write_json
from keras_moe.layers import MuMoE, MuMoEConfig
from keras_moe.ops import Routing

PARTS = ("costs", "specialisation", "editing", "patches", *mumoe_heads.PARTS)
SIZES = {"patch_size": 4, "hidden_dim": 64, "num_layers": 2, "mlp_dim": 128}
SHAPE = (16, 16, 1)
# Examples of the 100 numbers.
TRAIN_NUMBERS, TEST_NUMBERS = 6000, 2000
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
# The attributes of a digit; the last is the sensitive one, the first the target.
LABELS = ("5 and above", "even", "with a loop", "prime", "inverted")
# How many of the digits that are 5 and above, and of the others, are inverted.
RARE, COMMON = 0.03, 0.5
VALIDATION = 300
# Times --epochs: there are few images.
PASSES = 5
BIASED = (1, 1)
# The edit's strengths among which validation data choose, over the number of experts.
EXPERT_STRENGTHS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
BLIND_STRENGTHS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.5, 5.0)
METRICS = {
    "target": "target",
    "equality_of_opportunity": "eq. opp.",
    "std_bias": "STD bias",
    "max_min": "max-min",
    "accuracy": "accuracy",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("mumoe_study"))
    parser.add_argument(
        "--experts", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="of the heads"
    )
    parser.add_argument(
        "--positions", nargs="+", choices=("final", "penultimate"), default=["final"]
    )
    parser.add_argument("--rank", type=int, default=128, help="of the heads")
    parser.add_argument(
        "--edited-experts", type=int, default=32, help="of the head that is edited"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    args = parser.parse_args(argv)
    for name in ("seeds", "epochs", "batch_size", "rank", "edited_experts"):
        if getattr(args, name) < 1:
            parser.error(f"expected --{name.replace('_', '-')} of at least 1")
    if min(args.experts) < 1 or args.learning_rate <= 0:
        parser.error("expected --experts of at least 1 and --learning-rate above 0")
    console = Console()
    try:
        (args.output / "runs").mkdir(parents=True, exist_ok=True)
        # Parts of an earlier command stay.
        results = earlier_results(args.output / "results.json", keras.backend.backend())
        heads = None
        for name in args.parts:
            if name == "costs":
                results[name] = mumoe_heads.costs()
                mumoe_heads.print_costs(results[name], console)
                continue
            if name in mumoe_heads.PARTS:
                # One object, which keeps the features.
                heads = heads or mumoe_heads.Heads(
                    Specialisation(args),
                    numbers("train", TRAIN_NUMBERS),
                    numbers("test", TEST_NUMBERS),
                )
                with progress_of_runs(console) as progress:
                    results[name] = heads.run(name, progress)
                heads.report(name, results[name], console)
                continue
            part = {
                "specialisation": Specialisation,
                "editing": Editing,
                "patches": Patches,
            }[name](args)
            with progress_of_runs(console) as progress:
                results[name] = part.run(progress)
            part.report(results[name], console)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted: the same command goes on from here.", file=sys.stderr)
        return 130
    write_json(args.output / "results.json", plain(results))
    console.print(f"results   {args.output / 'results.json'}")
    return 0


class Study:
    """Runs that are done once, each kept as a result and arrays."""

    # Times --epochs.
    passes = 1

    def __init__(self, args: argparse.Namespace):
        self.args = args

    def once(self, settings: dict, make: Callable[[], tuple[dict, dict]]):
        """A run's result and arrays, of its files where they are whole."""
        names = ("epochs", "batch_size", "learning_rate")
        settings = plain(
            {
                **settings,
                **{name: getattr(self.args, name) for name in names},
                "sizes": SIZES,
                "backend": keras.backend.backend(),
            }
        )
        stem = f"{settings['run'].replace(' ', '_')}-seed{settings['seed']}"
        stem = self.args.output / "runs" / f"{stem}-{digest(settings)}"
        path, arrays_path = Path(f"{stem}.json"), Path(f"{stem}.npz")
        result, arrays = read_result(path, settings), read_arrays(arrays_path)
        if result is None or arrays is None:
            result, arrays = make()
            write_arrays(arrays_path, arrays)
            write_json(path, {"settings": settings, "result": plain(result)})
        return result, arrays

    def fit(self, model: keras.Model, images, labels, rate: float = 1.0):
        """Trains; `rate` times the learning rate."""
        optimizer = keras.optimizers.AdamW(
            rate * self.args.learning_rate, weight_decay=1e-4
        )
        model.compile(optimizer=optimizer)
        self.train(model, images, labels)
        return model

    def train(self, model: keras.Model, images, labels) -> None:
        history = model.fit(
            images,
            labels,
            batch_size=self.args.batch_size,
            epochs=self.passes * self.args.epochs,
            verbose=0,
        )
        check_converged(history.history)


class Specialisation(Study):
    """Polysemanticity by the number of experts."""

    def run(self, progress: Progress) -> dict:
        args = self.args
        train, test = numbers("train", TRAIN_NUMBERS), numbers("test", TEST_NUMBERS)
        heads = [(place, count) for place in args.positions for count in args.experts]
        task = progress.add_task("runs", total=args.seeds * (1 + len(heads)))
        dense, rows, self.first = [], {}, {}
        for seed in range(args.seeds):
            progress.update(task, description=f"dense, seed {seed}")
            result, weights = self.dense_once(train, test, seed)
            dense.append(result)
            progress.advance(task)
            for place, count in heads:
                name = f"{place} {count}"
                progress.update(task, description=f"{name} experts, seed {seed}")
                result, arrays = self.once(
                    {
                        "run": name,
                        "seed": seed,
                        "rank": args.rank,
                        "numbers": [TRAIN_NUMBERS, TEST_NUMBERS],
                    },
                    lambda place=place, count=count, seed=seed, weights=weights: (
                        self.head(place, count, weights, train, test, seed)
                    ),
                )
                rows.setdefault(name, []).append(result)
                self.first.setdefault(name, (result, arrays))
                progress.advance(task)
        self.images, self.labels = test
        svd = analysis.TruncatedSVD(**dense[0]["svd"])
        return {
            "dense": {"accuracy": spread([row["accuracy"] for row in dense])},
            "svd": svd.to_dict(),
            "heads": {
                name: {
                    "accuracy": spread([run["accuracy"] for run in runs]),
                    "polysemanticity": [run["polysemanticity"] for run in runs],
                    "experts_that_matter": spread([run["matter"] for run in runs]),
                    "experts_per_image": spread([run["per_image"] for run in runs]),
                }
                for name, runs in rows.items()
            },
        }

    def dense_once(self, train, test, seed: int) -> tuple[dict, dict]:
        """A dense ViT's result and weights, of its files where they are whole."""
        settings = {"run": "dense", "seed": seed}
        settings["numbers"] = [TRAIN_NUMBERS, TEST_NUMBERS]
        return self.once(settings, lambda: self.dense(train, test, seed))

    def model(self, seed: int, **head) -> keras.Model:
        keras.utils.set_random_seed(seed)
        shape = (SHAPE[0], 2 * SHAPE[1], SHAPE[2])
        backbone = models.ViTBackbone(shape, num_heads=4, seed=seed, **SIZES)
        return models.ViTImageClassifier(backbone, 100, **head)

    def dense(self, train, test, seed: int) -> tuple[dict, dict]:
        """A dense ViT, which all heads start from."""
        model = self.fit(self.model(seed), *train)
        svd = analysis.truncated_svd(model, *test, shares=SHARES, verbose=0)
        weights = model.backbone.get_weights()
        arrays = {f"w{index}": value for index, value in enumerate(weights)}
        return {"accuracy": svd.full, "svd": svd.to_dict()}, arrays

    def head(self, place, count, weights, train, test, seed) -> tuple[dict, dict]:
        """The ViT with a muMoE head, trained on together."""
        units = 100 if place == "final" else SIZES["hidden_dim"]
        head = MuMoE(units, count, rank=self.args.rank)
        model = self.model(seed, head=head, head_position=place)
        model.backbone.set_weights([weights[f"w{i}"] for i in range(len(weights))])
        self.fit(model, *train, rate=0.5)
        found = analysis.ablate_experts(model, *test, verbose=0)
        score = found.mean_polysemanticity
        if score is None:
            raise ValueError(
                f"Expected an expert that matters; received: none of {count} after "
                f"{self.args.epochs} epochs. Try more --epochs"
            )
        routing = keras.Model(model.input, model.routing["head"])
        gates = routing.predict(test[0], verbose=0).gates
        result = {
            "accuracy": float((found.accuracy * found.counts).sum() / len(test[1])),
            "polysemanticity": score,
            "matter": int((found.changes != 0).any(axis=1).sum()),
            "per_image": float((gates > 0).sum(axis=-1).mean()),
        }
        return result, {"gates": gates, **found._asdict()}

    def report(self, found: dict, console: Console) -> None:
        table = Table(title="Numbers from 00 to 99: CP muMoE heads (Figure 3)")
        columns = ("accuracy %", "polysemanticity", "experts that matter")
        for column in ("head", *columns, "experts per image"):
            table.add_column(column, justify=None if column == "head" else "right")
        table.add_row("dense", percent(found["dense"]["accuracy"]), "", "", "")
        for name, row in found["heads"].items():
            table.add_row(
                name,
                percent(row["accuracy"]),
                plus_minus(spread(row["polysemanticity"])),
                f"{row['experts_that_matter']['mean']:.1f}",
                f"{row['experts_per_image']['mean']:.1f}",
            )
        console.print(table)
        svd = analysis.TruncatedSVD(**found["svd"])
        analysis.print_truncated_svd(svd, console)
        output, scores = self.args.output, {}
        ablations, routings = {}, {}
        for name, (_, arrays) in self.first.items():
            place, count = name.split()
            own = found["heads"][name]["polysemanticity"]
            scores.setdefault(f"{place} layer", {})[int(count)] = own
            fields = analysis.ExpertAblation._fields
            ablations[f"{name} experts"] = analysis.ExpertAblation(
                **{field: arrays[field] for field in fields}
            )
            record = Routing(*[arrays["gates"]] * len(Routing._fields))
            routings[f"{name} experts"] = record
        labels = [f"{label:02d}" for label in self.labels]
        plots.plot_polysemanticity(scores, output / "polysemanticity.png")
        plots.plot_ablation(ablations, output / "ablation.png")
        plots.plot_expert_load(routings, output / "load.png")
        plots.plot_truncated_svd({"dense ViT": svd}, output / "svd.png")
        pictures = ["polysemanticity", "ablation", "load", "svd"]
        # Of the last head; after few steps no coefficient may be that large.
        if (record.gates >= 0.5).any():
            title = f"Images of each expert: {name} experts"
            plots.plot_expert_images(
                self.images, record, output / "images.png", labels, title=title
            )
            pictures.append("images")
        for picture in pictures:
            console.print(f"picture   {output / picture}.png")


class Editing(Study):
    """A planted bias, and what corrects it."""

    passes = PASSES

    def run(self, progress: Progress) -> dict:
        args = self.args
        task = progress.add_task("runs", total=args.seeds)
        runs = []
        for seed in range(args.seeds):
            progress.update(task, description=f"bias, seed {seed}")
            settings = {"run": "editing", "seed": seed, "rank": args.rank}
            settings |= {"experts": args.edited_experts, "shares": [RARE, COMMON]}
            settings |= {"passes": self.passes, "validation": VALIDATION}
            settings["strengths"] = [EXPERT_STRENGTHS, BLIND_STRENGTHS]
            result, _ = self.once(settings, lambda seed=seed: (self.one(seed), {}))
            runs.append(result)
            progress.advance(task)
        return {"experts": args.edited_experts, "runs": runs}

    def one(self, seed: int) -> dict:
        """All models of one seed, by name."""
        args = self.args
        generator = np.random.default_rng(seed)
        images, digits = data.load_digits("train", SHAPE)
        order = generator.permutation(len(digits))
        held, rest = order[:VALIDATION], order[VALIDATION:]
        validation = both_ways(images[held], digits[held])
        test = both_ways(*data.load_digits("test", SHAPE))
        images, digits = images[rest], digits[rest]
        rate = np.where(digits >= 5, RARE, COMMON)
        images, labels = with_attributes(
            images, digits, generator.random(len(digits)) < rate
        )
        members = (labels[:, 0] == BIASED[0]) & (labels[:, -1] == BIASED[1])
        others = (labels[:, 0] == BIASED[0]) & (labels[:, -1] != BIASED[1])

        def model(head=True):
            keras.utils.set_random_seed(seed)
            backbone = models.ViTBackbone(SHAPE, num_heads=4, seed=seed, **SIZES)
            own = MuMoE(len(LABELS), args.edited_experts, rank=args.rank)
            return models.ViTImageClassifier(
                backbone, len(LABELS), multi_label=True, head=own if head else None
            )

        rows, strengths = {}, {}
        rows["linear"] = evaluate(self.fit(model(head=False), images, labels), test)
        plain_model = self.fit(model(), images, labels)
        rows["muMoE"] = evaluate(plain_model, test)
        chosen = data.oversample(members, int(others.sum()), seed)
        rows["+ oversampling"] = evaluate(
            self.fit(model(), images[chosen], labels[chosen]), test
        )
        debiased = model()
        debiased.compile(keras.optimizers.AdamW(args.learning_rate, weight_decay=1e-4))
        attributes = labels[:, -1].astype("int32")
        self.train(
            training.adversarial_debiasing(debiased),
            images,
            {"predictions": labels, "attribute": attributes},
        )
        rows["+ adversarial"] = evaluate(debiased, test)
        edits = {
            "+ blind thresh.": (None, BLIND_STRENGTHS),
            "+ expert edit": (
                images[members],
                [share * args.edited_experts for share in EXPERT_STRENGTHS],
            ),
        }
        for name, (subpopulation, options) in edits.items():

            def edited(strength, subpopulation=subpopulation):
                return analysis.edit_expert_logits(
                    plain_model, subpopulation, output=0, strength=strength
                )

            found = {s: evaluate(edited(s), validation) for s in options}
            best = max(found, key=lambda s: found[s]["max_min"])
            strengths[name] = best
            rows[name] = evaluate(edited(best), test)
        rows["+ expert edit, N"] = evaluate(edited(args.edited_experts), test)
        return {"rows": rows, "strengths": strengths, "members": int(members.sum())}

    def report(self, found: dict, console: Console) -> None:
        runs = found["runs"]
        table = Table(
            title="Digits from 5 on, inverted: the target subpopulation (Table 2)"
        )
        table.add_column("model", no_wrap=True)
        for column in METRICS.values():
            table.add_column(column, justify="right", no_wrap=True)
        for name in runs[0]["rows"]:
            rows = [run["rows"][name] for run in runs]
            values = [spread([row[metric] for row in rows]) for metric in METRICS]
            table.add_row(name, *(plus_minus(value) for value in values))
        console.print(table)
        table = Table(title="Test accuracy by subpopulation, below 5 and from 5 on")
        table.add_column("model", no_wrap=True)
        for column in ("below", "below, inverted", "from 5 on", "from 5 on, inverted"):
            table.add_column(column, justify="right")
        for name in ("muMoE", "+ expert edit", "+ expert edit, N"):
            found_here = [run["rows"][name]["accuracies"] for run in runs]
            cells = np.reshape(found_here, (len(runs), -1)).T
            table.add_row(name, *(plus_minus(spread(cell.tolist())) for cell in cells))
        console.print(table)
        console.print(
            "Strengths that validation data chose: "
            + ", ".join(
                f"{name[2:]} {[run['strengths'][name] for run in runs]}"
                for name in runs[0]["strengths"]
            )
        )
        picture = self.args.output / "subpopulations.png"
        before, after = (
            average([run["rows"][name] for run in runs])
            for name in ("muMoE", "+ expert edit")
        )
        plots.plot_subpopulations(
            before,
            after,
            picture,
            target_names=["below 5", "5 and above"],
            attribute_names=["as scanned", "inverted"],
            target=BIASED,
            title="Accuracy before and after one edit, on test images",
        )
        console.print(f"picture   {picture}")


class Patches(Study):
    """What experts of a Mixer's first and last block look at."""

    def run(self, progress: Progress) -> dict:
        task = progress.add_task("runs", total=1)
        result, self.gates = self.once({"run": "patches", "seed": 0}, self.one)
        progress.advance(task)
        return result

    def one(self) -> tuple[dict, dict]:
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
        self.fit(model, *data.load_digits("train", SHAPE))
        images, labels = data.load_digits("test", SHAPE)
        accuracy = model.evaluate(images, labels, verbose=0, return_dict=True)
        # The experts of token mixers see channels, which lie nowhere in an image.
        gates = {
            name: record.gates
            for name, record in model.routing.items()
            if not name.endswith("/token_mixer")
        }
        found = keras.Model(model.input, gates).predict(images, verbose=0)
        return {"accuracy": accuracy["accuracy"]}, found

    def report(self, found: dict, console: Console) -> None:
        console.print(f"muMoE Mixer on digits: {found['accuracy']:.1%}")
        images, _ = data.load_digits("test", SHAPE)
        grid = (SHAPE[0] // SIZES["patch_size"], SHAPE[1] // SIZES["patch_size"])
        for name, gates in self.gates.items():
            picture = self.args.output / f"patches_{name}.png"
            record = Routing(*[gates] * len(Routing._fields))
            title = f"Patches that use an expert most: {name}"
            plots.plot_expert_patches(images, record, grid, picture, title=title)
            console.print(f"picture   {picture}")


def numbers(split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers from 00 to 99, as many of each, of two digits of a split."""
    images, digits = data.load_digits(split, SHAPE)
    generator = np.random.default_rng(0)
    labels = generator.permutation(np.arange(count) % 100)
    of_digit = [np.flatnonzero(digits == digit) for digit in range(10)]
    halves = [
        images[[generator.choice(of_digit[digit]) for digit in place]]
        for place in (labels // 10, labels % 10)
    ]
    return np.concatenate(halves, axis=2), labels.astype("int32")


def with_attributes(images, digits, inverted) -> tuple[np.ndarray, np.ndarray]:
    """Images, some of them inverted, and their attributes (B, 5)."""
    images = np.where(inverted[:, None, None, None], -images, images)
    labels = [digits >= 5, digits % 2 == 0, np.isin(digits, [0, 6, 8, 9])]
    labels += [np.isin(digits, [2, 3, 5, 7]), inverted]
    return images, np.stack(labels, axis=1).astype("float32")


def both_ways(images, digits) -> tuple[np.ndarray, np.ndarray]:
    """Every image twice: as it is, and inverted."""
    inverted = np.repeat([False, True], len(digits))
    return with_attributes(
        np.concatenate([images, images]), np.concatenate([digits, digits]), inverted
    )


def evaluate(model: keras.Model, examples) -> dict:
    """Fairness metrics of the first label by the last, and the target's accuracy."""
    images, labels = examples
    predictions = model.predict(images, verbose=0)[:, 0] > 0
    targets, attributes = labels[:, 0].astype(int), labels[:, -1].astype(int)
    found = analysis.fairness_metrics(predictions, targets, attributes)
    return plain({**found.to_dict(), "target": float(found.accuracies[BIASED])})


def average(rows: list[dict]) -> analysis.FairnessMetrics:
    """The mean of the metrics over runs."""
    fields = analysis.FairnessMetrics._fields
    return analysis.FairnessMetrics(
        *(np.mean([row[field] for row in rows], axis=0) for field in fields)
    )


def percent(value: dict) -> str:
    return f"{100 * value['mean']:.1f}±{100 * value['std']:.1f}"


def plus_minus(value: dict) -> str:
    return f"{value['mean']:.2f}±{value['std']:.2f}"


if __name__ == "__main__":
    sys.exit(main())
