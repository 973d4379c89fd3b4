"""Parts of the study of MoE++ about cost and speed: Tables 1, 3, A and B."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe.layers import Experts, ZeroComputationExperts
from keras_moe.ops import ExpertTypes
from keras_moe.routers import PathwayAwareRouter
from tools.benchmark.execution import forward
from tools.benchmark.timing import interleaved
from tools.studies.moepp_layers import WITHOUT, Sizes, measure
from tools.studies.moepp_training import draw_tau
from tools.studies.study import Part, Study

# Tables A and B: 2,048 tokens of size 1,536, 16 experts.
PAPER_TOKENS, PAPER_DIM, PAPER_EXPERTS, PAPER_MLP = 2048, 1536, 16, 4096
PAPER_SHAPE = (PAPER_TOKENS, PAPER_DIM)


class Costs(Part):
    """The arithmetic: Table 1 by tau, Table A by kind of expert, Table B.

    Args:
        study: the study.
        sizes: types of experts, and K.
        taus: values of tau.
        rounds: rounds of timing.
    """

    def __init__(self, study: Study, sizes: Sizes, taus: Sequence[float], rounds: int):
        super().__init__(study)
        self.sizes, self.taus, self.rounds = sizes, taus, rounds

    def results(self) -> dict:
        expert_types, shares = self.sizes.expert_types, {}
        for tau in self.taus:
            router = PathwayAwareRouter(
                expert_types.total,
                self.sizes.selected,
                expert_types.zero,
                expert_types.copy,
                expert_types.constant,
                tau,
            )
            shares[f"{tau:g}"] = router.ffn_share
        # The paper counts multiply-adds, and the additions of the residual.
        original = PathwayAwareRouter(PAPER_EXPERTS)
        aware = PathwayAwareRouter(PAPER_EXPERTS, gating_residual=True)
        additions = PAPER_TOKENS * PAPER_EXPERTS
        router_operations = {
            "original": original.cost(PAPER_SHAPE).flops // 2,
            "pathway-aware": aware.cost(PAPER_SHAPE).flops // 2 + additions,
        }
        return {
            "kinds": expert_types._asdict(),
            "ffn_share": shares,
            "experts": expert_costs(self.rounds),
            "router_operations": router_operations,
        }

    def show(self, results: dict, console: Console) -> None:
        table = Table(title="FFN computation over the vanilla layer's (Table 1)")
        table.add_column("tau")
        table.add_column("share", justify="right")
        for tau, share in results["ffn_share"].items():
            table.add_row(tau, f"{share:.4f}")
        console.print(table)
        table = Table(
            title=f"One expert on {PAPER_TOKENS} tokens of size {PAPER_DIM} (Table A)"
        )
        for column in ("kind", "parameters", "MFLOPs", "ms"):
            table.add_column(column, justify=None if column == "kind" else "right")
        for kind, row in results["experts"].items():
            table.add_row(
                kind,
                f"{row['parameters']:,}",
                f"{row['flops'] / 1e6:,.1f}",
                f"{1e3 * row['seconds']:.3f}",
            )
        console.print(table)
        table = Table(
            title=f"Operations of the router, {PAPER_EXPERTS} experts (Table B)"
        )
        table.add_column("router")
        table.add_column("operations", justify="right")
        for name, operations in results["router_operations"].items():
            table.add_row(name, f"{operations:,}")
        console.print(table)


def expert_costs(rounds: int) -> dict:
    """One expert of each type: parameters, FLOPs and seconds on 2,048 tokens."""
    tokens = np.random.default_rng(0).normal(size=(1, PAPER_TOKENS, PAPER_DIM))
    tokens = tokens.astype("float32")
    ones = np.ones((1, PAPER_TOKENS, 1), "float32")
    ffn = Experts(1, PAPER_MLP, activation="silu", gated=True, use_bias=False)
    ffn.build((1, 1, PAPER_TOKENS, PAPER_DIM))
    layers = {"ffn": (ffn, forward(ffn, tokens[None], training=False))}
    for kind in ("zero", "copy", "constant"):
        layer = ZeroComputationExperts(**{f"{kind}_experts": 1})
        layer.build(tokens.shape)
        layers[kind] = (layer, one_kind(layer, tokens, ones))
    functions = {kind: function for kind, (_, function) in layers.items()}
    seconds = interleaved(functions, rounds)
    return {
        kind: {
            "parameters": layer.cost(PAPER_SHAPE).parameters,
            "flops": layer.cost(PAPER_SHAPE).flops,
            "seconds": seconds[kind],
        }
        for kind, (layer, _) in layers.items()
    }


def one_kind(
    layer: ZeroComputationExperts, tokens: np.ndarray, weights: np.ndarray
) -> Callable[[], Any]:
    """The forward pass of experts that serve every token with these gates."""

    class Weighted(keras.layers.Layer):
        def call(self, tokens, training=None):
            return layer(tokens, weights)

    weighted = Weighted()
    weighted.layer = layer
    weighted.built = True
    return forward(weighted, tokens, training=False)


class Speed(Part):
    """Forward times of a layer by tau, and how much more it gets through: Table 3."""

    def __init__(self, study: Study, sizes: Sizes, taus: Sequence[float], rounds: int):
        super().__init__(study)
        self.sizes, self.taus, self.rounds = sizes, taus, rounds

    def results(self) -> dict:
        expert_types, rows = self.sizes.expert_types, {}
        for form, times in measure(self.sizes, self.taus, self.rounds).items():
            vanilla = times["vanilla"]
            rows[form] = {"vanilla": {"seconds": vanilla, "throughput_increase": 0.0}}
            for tau in self.taus:
                own = times[f"tau={tau:g}"]
                bare = times[f"tau={tau:g}, {WITHOUT}"]
                weight = tau * expert_types.ffn
                rows[form][f"{tau:g}"] = {
                    "seconds": own,
                    "throughput_increase": vanilla / own - 1,
                    "by_flops": expert_types.zero_computation / weight,
                    "zero_computation_share": own / bare - 1,
                }
        sizes = self.sizes._asdict()
        sizes.pop("expert_types")
        return {"kinds": expert_types._asdict(), "sizes": sizes, "forms": rows}

    def show(self, results: dict, console: Console) -> None:
        expert_types = ExpertTypes(**results["kinds"])
        for form, rows in results["forms"].items():
            table = Table(title=f"MoE++ {expert_types}, forward, {form} (Table 3)")
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

    def draw(self, every: dict) -> list[Path]:
        return draw_tau(self.study.folder, every)
