"""Compares MoE++ with a vanilla mixture of as many experts: cost, speed, accuracy.

    python tools/moepp_study.py
    python tools/moepp_study.py --parts costs speed --kinds 16 1 1 2
    python tools/moepp_study.py --parts training --seeds 5 --epochs 40

`--kinds`, `--selected`, `--gamma` and the sizes are those of the layer in `costs` and
`speed`; the models that train are the preset `moepp_digits` and changes of it.

`costs` counts what *MoE++* has in its Tables 1, A and B; `speed` measures expert
forward times by tau, as its Table 3 does; `training` trains on the bundled digits:
the vanilla twin, MoE++ by tau, without each kind of expert (Table 5) and without
gating residuals (Table 6). `removal` removes kinds of experts after training (Table C),
`tokens` counts the zero-computation experts that patches meet (Figure A), and
`constants` trains with `--constants` constant experts (Figure 3).

Every finished run is a file below the output folder. An interrupted study goes on where
it stopped.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
# PyTorch's idle threads would spin, and stand still on a machine with other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import math
import sys
import time
from pathlib import Path

import keras
import moepp_kinds
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
from rich.table import Table

# The layer that is timed is the benchmark's.
sys.path.append(str(Path(__file__).resolve().parent / "benchmark"))
import moepp_layers
from gradients import forward
from timing import interleaved

from keras_moe import analysis, data, models
from keras_moe.analysis import plots
from keras_moe.files import write_json
from keras_moe.layers import Experts, ZeroComputationExperts
from keras_moe.ops import ExpertKinds
from keras_moe.routers import PathwayAwareRouter

PARTS = ("costs", "speed", "training", "removal", "tokens", "constants")
# The column of Table 3.
TAUS = (0.1, 0.25, 0.5, 0.75, 1.0)
TAU = 0.75
# Tables A and B: 2,048 tokens of size 1,536, 16 experts.
PAPER_TOKENS, PAPER_DIM, PAPER_EXPERTS, PAPER_MLP = 2048, 1536, 16, 4096
PAPER_SHAPE = (PAPER_TOKENS, PAPER_DIM)
PRESET = "moepp_digits"
VANILLA = {
    "zero_experts": 0,
    "copy_experts": 0,
    "constant_experts": 0,
    "gating_residual": False,
}
NO_RESIDUALS = "no gating residuals"
PICTURE_IMAGES = 12
# What a run stores.
RESULTS = {
    "test_accuracy",
    "ffn_experts_per_token",
    "gflops",
    "loads",
    "scores",
    "seconds",
}
ARRAYS = {"images", "maps", "highest", "second"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("moepp_study"))
    parser.add_argument("--taus", type=float, nargs="+", default=list(TAUS))
    parser.add_argument(
        "--only", nargs="+", metavar="MODEL", help="of the models that train, by name"
    )
    parser.add_argument(
        "--constants", type=int, nargs="+", default=[0, 1, 2, 4, 6], help="of Figure 3"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    moepp_layers.add_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("seeds", "epochs", "batch_size", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"expected --{name.replace('_', '-')} of at least 1")
    if not all(0 < tau < math.inf for tau in args.taus):
        parser.error(f"expected --taus above 0: {args.taus}")
    if min(args.tokens, args.dim, args.mlp_dim) < 1:
        parser.error("expected --tokens, --dim and --mlp-dim of at least 1")
    if min(args.kinds) < 0 or not sum(args.kinds[1:]):
        parser.error(f"expected zero-computation experts in --kinds: {args.kinds}")
    if min(args.constants) < 0:
        parser.error(f"expected --constants of at least 0: {args.constants}")
    console = Console()
    results = {}
    try:
        (args.output / "runs").mkdir(parents=True, exist_ok=True)
        kinds = ExpertKinds(*args.kinds)
        # Parts of an earlier command stay.
        results = earlier_results(args.output / "results.json", keras.backend.backend())
        if "costs" in args.parts:
            results["costs"] = costs(kinds, args)
            print_costs(results["costs"], console)
        if "speed" in args.parts:
            results["speed"] = speed(kinds, args)
            print_speed(results["speed"], console)
        if "training" in args.parts:
            results["training"] = Training(args).run(console)
            print_training(results["training"], console)
        if {"removal", "tokens"} & set(args.parts):
            kinds_of_experts = moepp_kinds.Kinds(Training(args))
            with progress_of_runs(console) as progress:
                runs = kinds_of_experts.run(progress)
            if "removal" in args.parts:
                results["removal"] = kinds_of_experts.removal(runs)
                moepp_kinds.print_removal(results["removal"], console)
            if "tokens" in args.parts:
                results["tokens"] = kinds_of_experts.tokens(runs)
                moepp_kinds.print_tokens(results["tokens"], console)
                kinds_of_experts.draw(console)
        if "constants" in args.parts:
            results["constants"] = moepp_kinds.constant_experts(
                Training(args), args.constants, console
            )
            moepp_kinds.print_constants(results["constants"], console)
            picture = args.output / "constants.png"
            plots.plot_constant_experts(results["constants"], picture)
            console.print(f"picture   {picture}")
        has_tau = f"tau={TAU:g}" in results.get("training", {}).get("rows", {})
        if has_tau and "vanilla" in results["training"]["rows"] and "speed" in results:
            picture = args.output / "tau.png"
            plots.plot_tau_study(results["speed"], results["training"], picture)
            console.print(f"picture   {picture}")
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted: the same command goes on from here.", file=sys.stderr)
        return 130
    write_json(args.output / "results.json", plain(results))
    console.print(f"results   {args.output / 'results.json'}")
    return 0


def costs(kinds: ExpertKinds, args: argparse.Namespace) -> dict:
    """What is computed: Table 1 by tau, Table A by kind of expert, Table B."""
    shares = {}
    for tau in args.taus:
        router = PathwayAwareRouter(
            kinds.total, args.selected, kinds.zero, kinds.copy, kinds.constant, tau
        )
        shares[f"{tau:g}"] = router.ffn_share
    # The paper counts multiply-adds, and the additions of the residual.
    original = PathwayAwareRouter(PAPER_EXPERTS)
    aware = PathwayAwareRouter(PAPER_EXPERTS, gating_residual=True)
    additions = PAPER_TOKENS * PAPER_EXPERTS
    router_costs = {
        "original": original.cost(PAPER_SHAPE).flops // 2,
        "pathway-aware": aware.cost(PAPER_SHAPE).flops // 2 + additions,
    }
    return {
        "kinds": kinds._asdict(),
        "ffn_share": shares,
        "experts": expert_costs(args),
        "router_operations": router_costs,
    }


def expert_costs(args: argparse.Namespace) -> dict:
    """One expert of each kind: parameters, FLOPs and seconds on 2,048 tokens."""
    tokens = np.random.default_rng(0).normal(size=(1, PAPER_TOKENS, PAPER_DIM))
    tokens = tokens.astype("float32")
    ones = np.ones((1, PAPER_TOKENS, 1), "float32")
    ffn = Experts(1, PAPER_MLP, activation="silu", gated=True, use_bias=False)
    ffn.build((1, 1, PAPER_TOKENS, PAPER_DIM))
    found = {"ffn": (ffn, forward(ffn, tokens[None], training=False))}
    for kind in ("zero", "copy", "constant"):
        layer = ZeroComputationExperts(**{f"{kind}_experts": 1})
        layer.build(tokens.shape)
        found[kind] = (layer, one_kind(layer, tokens, ones))
    seconds = interleaved(
        {kind: function for kind, (_, function) in found.items()}, args.rounds
    )
    return {
        kind: {
            "parameters": layer.cost(PAPER_SHAPE).parameters,
            "flops": layer.cost(PAPER_SHAPE).flops,
            "seconds": seconds[kind],
        }
        for kind, (layer, _) in found.items()
    }


def one_kind(layer: ZeroComputationExperts, tokens, weights):
    """Its forward pass, compiled where the backend compiles."""

    class Weighted(keras.layers.Layer):
        def call(self, tokens, training=None):
            return layer(tokens, weights)

    weighted = Weighted()
    weighted.layer = layer
    weighted.built = True
    return forward(weighted, tokens, training=False)


def speed(kinds: ExpertKinds, args: argparse.Namespace) -> dict:
    """Forward times of a layer by tau, and how much more it gets through."""
    seconds = moepp_layers.measure(kinds, args.taus, args)
    rows = {}
    for form, times in seconds.items():
        vanilla = times["vanilla"]
        rows[form] = {"vanilla": {"seconds": vanilla, "throughput_increase": 0.0}}
        for tau in args.taus:
            own = times[f"tau={tau:g}"]
            bare = times[f"tau={tau:g}, {moepp_layers.WITHOUT}"]
            weight = tau * kinds.ffn
            rows[form][f"{tau:g}"] = {
                "seconds": own,
                "throughput_increase": vanilla / own - 1,
                "by_flops": kinds.zero_computation / weight,
                "zero_computation_share": own / bare - 1,
            }
    sizes = ("tokens", "dim", "mlp_dim", "selected", "gamma", "gated")
    return {
        "kinds": kinds._asdict(),
        "sizes": {name: getattr(args, name) for name in sizes},
        "forms": rows,
    }


class Training:
    """Runs on the digits, each once."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        # name -> overrides of the preset
        self.configurations = {"vanilla": VANILLA}
        for tau in sorted({*args.taus, TAU}):
            self.configurations[f"tau={tau:g}"] = {"tau": tau}
        full = {"zero": 1, "copy": 1, "constant": 2}
        for kept in (
            ("zero",), ("copy",), ("constant",),
            ("zero", "copy"), ("zero", "constant"), ("copy", "constant"),
        ):  # fmt: skip
            counts = {f"{kind}_experts": n * (kind in kept) for kind, n in full.items()}
            self.configurations[f"only {' and '.join(kept)}"] = counts
        self.configurations[NO_RESIDUALS] = {"gating_residual": False}
        if args.only:
            unknown = sorted(set(args.only) - set(self.configurations))
            if unknown:
                raise ValueError(
                    f"Expected models of {', '.join(self.configurations)}; "
                    f"received: {', '.join(unknown)}"
                )
            self.configurations = {
                name: self.configurations[name] for name in args.only
            }

    def run(self, console: Console) -> dict:
        """Trains what is not there yet, and draws."""
        rows = {}
        total = len(self.configurations) * self.args.seeds
        with progress_of_runs(console) as progress:
            task = progress.add_task("runs", total=total)
            for name, overrides in self.configurations.items():
                runs = []
                for seed in range(self.args.seeds):
                    progress.update(task, description=f"{name}, seed {seed}")
                    runs.append(self.one(name, overrides, seed))
                    progress.advance(task)
                rows[name] = {
                    key: spread([run[key] for run in runs])
                    for key in ("test_accuracy", "ffn_experts_per_token")
                }
                rows[name]["gflops"] = runs[0]["gflops"]
                rows[name]["loads"] = runs[0]["loads"]
                rows[name]["scores"] = runs[0]["scores"]
        for path in self.draw():
            console.print(f"picture   {path}")
        return {"preset": PRESET, "epochs": self.args.epochs, "rows": rows}

    def one(self, name: str, overrides: dict, seed: int) -> dict:
        """One run's result, of its file where there is one."""
        settings = self.settings(name, overrides, seed)
        path, arrays = self.paths(settings)
        result = read_result(path, settings)
        # Damaged files are no result: the run is done again.
        is_whole = isinstance(result, dict) and set(result) == RESULTS
        if not is_whole or set(read_arrays(arrays) or ()) != ARRAYS:
            result, kept = self.train(overrides, seed)
            write_arrays(arrays, kept)
            write_json(path, {"settings": settings, "result": result})
        return result

    def settings(self, name: str, overrides: dict, seed: int) -> dict:
        args = self.args
        return plain(
            {
                "name": name,
                "preset": PRESET,
                "config": models.builtin.builtin_presets()[PRESET]["config"],
                "overrides": overrides,
                "seed": seed,
                "epochs": args.epochs,
                "batch_size": args.batch_size,
                "learning_rate": args.learning_rate,
                "backend": keras.backend.backend(),
            }
        )

    def paths(self, settings: dict) -> tuple[Path, Path]:
        name = settings["name"].replace(" ", "_").replace("=", "_")
        stem = (
            self.args.output
            / "runs"
            / f"{name}-seed{settings['seed']}-{digest(settings)}"
        )
        return Path(f"{stem}.json"), Path(f"{stem}.npz")

    def fit(self, overrides: dict, seed: int) -> tuple:
        """A model trained from a seed, the test images with labels, and seconds."""
        args = self.args
        keras.utils.set_random_seed(seed)
        model = models.from_preset(PRESET, num_classes=10, seed=seed, **overrides)
        shape = model.backbone.image_shape
        batches = data.load(
            "digits",
            "train",
            shape,
            batch_size=args.batch_size,
            seed=seed,
            augment=[
                keras.layers.RandomTranslation(0.1, 0.1, fill_mode="nearest"),
                keras.layers.RandomRotation(0.03, fill_mode="nearest"),
            ],
            drop_remainder=True,
        )
        test = list(data.load("digits", "test", shape, batch_size=args.batch_size))
        images = np.concatenate([x.numpy() for x, _ in test])
        labels = np.concatenate([y.numpy() for _, y in test])
        steps = args.epochs * len(batches)
        schedule = keras.optimizers.schedules.CosineDecay(
            0.0, steps, warmup_target=args.learning_rate, warmup_steps=steps // 10
        )
        model.compile(
            optimizer=keras.optimizers.AdamW(
                schedule, weight_decay=0.05, global_clipnorm=1.0
            )
        )
        begin = time.perf_counter()
        history = model.fit(batches, epochs=args.epochs, shuffle=False, verbose=0)
        check_converged(history.history)
        return model, (images, labels), time.perf_counter() - begin

    def train(self, overrides: dict, seed: int) -> tuple[dict, dict]:
        """Trains from a seed, and says what the experts did with the test images."""
        args = self.args
        model, (images, labels), seconds = self.fit(overrides, seed)
        outputs = keras.Model(
            model.input, {"logits": model.output, "routing": model.routing}
        ).predict(images, batch_size=args.batch_size, verbose=0)
        backbone = model.backbone
        kinds, routing = backbone.expert_kinds, outputs["routing"]
        selected = backbone.get_config()["num_selected_experts"]
        loads = analysis.load_by_kind(routing, kinds, selected)
        scores = {
            block: analysis.routing_scores(record) for block, record in routing.items()
        }
        last = scores[list(scores)[-1]]
        maps = analysis.compute_map(routing, kinds, backbone.grid)
        chosen = np.argsort(labels[: len(labels) // 2], kind="stable")
        chosen = chosen[:: max(len(chosen) // PICTURE_IMAGES, 1)][:PICTURE_IMAGES]
        result = {
            "test_accuracy": float((outputs["logits"].argmax(-1) == labels).mean()),
            "ffn_experts_per_token": float(
                analysis.ffn_experts_per_token(routing, kinds).mean()
            ),
            "gflops": models.describe(PRESET, num_classes=10, **overrides).gflops,
            "loads": {block: row._asdict() for block, row in loads.items()},
            "scores": {block: row.to_dict() for block, row in scores.items()},
            "seconds": seconds,
        }
        kept = {
            "images": images[chosen],
            "maps": maps[chosen],
            "highest": last.highest,
            "second": last.second,
        }
        return plain(result), kept

    def draw(self) -> list[Path]:
        """Compute over images, loads by kind, and scores with and without residuals."""
        output, found = self.args.output, {}
        labels = {f"tau={TAU:g}": "with gating residuals", NO_RESIDUALS: "without"}
        for name in filter(self.configurations.get, labels):
            settings = self.settings(name, self.configurations[name], seed=0)
            path, arrays = self.paths(settings)
            found[name] = (read_result(path, settings), read_arrays(arrays))
        if not found:
            return []
        result, arrays = next(iter(found.values()))
        paths = [output / f"{name}.png" for name in ("compute", "loads", "scores")]
        plots.plot_compute_maps(arrays["images"], arrays["maps"], paths[0])
        loads = {
            block: analysis.KindLoads(**row) for block, row in result["loads"].items()
        }
        plots.plot_load_by_kind(loads, paths[1])
        scores = {
            labels[name]: analysis.RoutingScores(kept["highest"], kept["second"])
            for name, (_, kept) in found.items()
        }
        plots.plot_routing_scores(scores, paths[2], title="Gates of the last MoE block")
        return paths


def print_costs(found: dict, console: Console) -> None:
    table = Table(title="FFN computation over the vanilla layer's (Table 1)")
    table.add_column("tau")
    table.add_column("share", justify="right")
    for tau, share in found["ffn_share"].items():
        table.add_row(tau, f"{share:.4f}")
    console.print(table)
    table = Table(
        title=f"One expert on {PAPER_TOKENS} tokens of size {PAPER_DIM} (Table A)"
    )
    for column in ("kind", "parameters", "MFLOPs", "ms"):
        table.add_column(column, justify=None if column == "kind" else "right")
    for kind, row in found["experts"].items():
        table.add_row(
            kind,
            f"{row['parameters']:,}",
            f"{row['flops'] / 1e6:,.1f}",
            f"{1e3 * row['seconds']:.3f}",
        )
    console.print(table)
    table = Table(title=f"Operations of the router, {PAPER_EXPERTS} experts (Table B)")
    table.add_column("router")
    table.add_column("operations", justify="right")
    for name, operations in found["router_operations"].items():
        table.add_row(name, f"{operations:,}")
    console.print(table)


def print_speed(found: dict, console: Console) -> None:
    for form, rows in found["forms"].items():
        kinds = ExpertKinds(**found["kinds"])
        table = Table(title=f"MoE++ {kinds}, forward, {form} (Table 3)")
        for column in ("tau", "ms", "throughput", "by FLOPs", "zero-computation"):
            table.add_column(column, justify=None if column == "tau" else "right")
        for name, row in rows.items():
            more = (
                ("-", "-")
                if name == "vanilla"
                else (
                    f"{row['by_flops']:+.1%}",
                    f"{row['zero_computation_share']:+.1%}",
                )
            )
            table.add_row(
                name,
                f"{1e3 * row['seconds']:.1f}",
                f"{row['throughput_increase']:+.1%}",
                *more,
            )
        console.print(table)


def print_training(found: dict, console: Console) -> None:
    table = Table(
        title=f"{found['preset']} on digits, {found['epochs']} epochs (Tables 3, 5, 6)"
    )
    columns = ("model", "accuracy %", "FFN per token", "MFLOPs per image")
    for column in (*columns, "variance of gates"):
        table.add_column(column, justify=None if column == "model" else "right")
    for name, row in found["rows"].items():
        accuracy, ffn = row["test_accuracy"], row["ffn_experts_per_token"]
        last = row["scores"][list(row["scores"])[-1]]
        table.add_row(
            name,
            f"{100 * accuracy['mean']:.2f}±{100 * accuracy['std']:.2f}",
            f"{ffn['mean']:.3f}",
            f"{1e3 * row['gflops']:.2f}",
            f"{last['highest_variance']:.4f}, {last['second_variance']:.4f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
