"""Parts of the study of MoE++ about one layer: Tables 1, 3, A and B.

MoE++ and its vanilla twin have the same feed-forward experts, gamma and K; the router's
kernel is random, so that the load is balanced over experts. `limited` is the form of
training, with the capacities of equation 8; `every token` serves all, as inference
does, with logits shifted by type so that equation 8's shares are what tokens choose.
`without zero-computation` is the same layer, whose zero-computation experts do nothing:
their cost is the difference.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console

from keras_moe import routers
from keras_moe.layers import Experts, MoE, ZeroComputationExperts
from keras_moe.ops import ExpertTypes
from keras_moe.routers import PathwayAwareRouter
from tools.benchmark.execution import forward
from tools.benchmark.timing import interleaved
from tools.studies.study import Part, Study, new_table

# Tables A and B: 2,048 tokens of size 1,536, 16 experts.
PAPER_TOKENS, PAPER_DIM, PAPER_EXPERTS, PAPER_MLP = 2048, 1536, 16, 4096
PAPER_SHAPE = (PAPER_TOKENS, PAPER_DIM)
# Whether the layer trains.
FORMS = {"limited": True, "every token": False}
WITHOUT = "without zero-computation"


class Sizes(NamedTuple):
    """Sizes of a layer.

    Attributes:
        expert_types: number of experts of each type.
        tokens: number of tokens.
        dim: D, size of a token.
        mlp_dim: H, size of an expert's hidden layer.
        selected: K.
        gamma: capacity factor.
        gated: whether experts are SwiGLU-like.
    """

    expert_types: ExpertTypes
    tokens: int
    dim: int
    mlp_dim: int
    selected: int
    gamma: float
    gated: bool


class Costs(Part):
    """The arithmetic: Table 1 by tau, Table A by type of expert, Table B."""

    def __init__(self, study: Study, sizes: Sizes, taus: Sequence[float], rounds: int):
        super().__init__(study)
        self.sizes, self.taus, self.rounds = sizes, taus, rounds

    def results(self) -> dict:
        types, selected = self.sizes.expert_types, self.sizes.selected
        counts = (types.total, selected, types.zero, types.copy, types.constant)
        # The paper counts multiply-adds, and the additions of the residual.
        original = PathwayAwareRouter(PAPER_EXPERTS)
        aware = PathwayAwareRouter(PAPER_EXPERTS, gating_residual=True)
        additions = PAPER_TOKENS * PAPER_EXPERTS
        return {
            "kinds": types._asdict(),
            "ffn_share": {
                f"{tau:g}": PathwayAwareRouter(*counts, tau).ffn_share
                for tau in self.taus
            },
            "experts": expert_costs(self.rounds),
            "router_operations": {
                "original": original.cost(PAPER_SHAPE).flops // 2,
                "pathway-aware": aware.cost(PAPER_SHAPE).flops // 2 + additions,
            },
        }

    def show(self, results: dict, console: Console) -> None:
        title = "FFN computation over the vanilla layer's (Table 1)"
        table = new_table(title, "tau", "share")
        for tau, share in results["ffn_share"].items():
            table.add_row(tau, f"{share:.4f}")
        console.print(table)
        title = f"One expert on {PAPER_TOKENS} tokens of size {PAPER_DIM} (Table A)"
        table = new_table(title, "type", "parameters", "MFLOPs", "ms")
        for name, row in results["experts"].items():
            table.add_row(
                name,
                f"{row['parameters']:,}",
                f"{row['flops'] / 1e6:,.1f}",
                f"{1e3 * row['seconds']:.3f}",
            )
        console.print(table)
        title = f"Operations of the router, {PAPER_EXPERTS} experts (Table B)"
        table = new_table(title, "router", "operations")
        for name, operations in results["router_operations"].items():
            table.add_row(name, f"{operations:,}")
        console.print(table)


def expert_costs(rounds: int) -> dict:
    """One expert of each type: parameters, FLOPs and seconds on 2,048 tokens."""
    tokens = np.random.default_rng(0).normal(size=(1, PAPER_TOKENS, PAPER_DIM))
    tokens = tokens.astype("float32")
    gates = np.ones((1, PAPER_TOKENS, 1), "float32")
    ffn = Experts(1, PAPER_MLP, activation="silu", gated=True, use_bias=False)
    ffn.build((1, 1, PAPER_TOKENS, PAPER_DIM))
    layers, functions = (
        {"ffn": ffn},
        {"ffn": forward(ffn, tokens[None], training=False)},
    )
    for name in ("zero", "copy", "constant"):
        layer = layers[name] = ZeroComputationExperts(**{f"{name}_experts": 1})
        layer.build(tokens.shape)
        functions[name] = serving_all(layer, tokens, gates)
    seconds = interleaved(functions, rounds)
    return {
        name: {
            "parameters": layer.cost(PAPER_SHAPE).parameters,
            "flops": layer.cost(PAPER_SHAPE).flops,
            "seconds": seconds[name],
        }
        for name, layer in layers.items()
    }


def serving_all(
    layer: ZeroComputationExperts, tokens: np.ndarray, gates: np.ndarray
) -> Callable[[], Any]:
    """The forward pass of experts that serve every token with these gates."""

    class Weighted(keras.layers.Layer):
        def call(self, tokens, training=None):
            return layer(tokens, gates)

    weighted = Weighted()
    weighted.layer = layer
    weighted.built = True
    return forward(weighted, tokens, training=False)


class Speed(Part):
    """Forward times of a layer by tau, and how much more it gets through: Table 3."""

    def __init__(
        self,
        study: Study,
        sizes: Sizes,
        taus: Sequence[float],
        rounds: int,
        draw_tau: Callable[[Path, dict], list[Path]],
    ):
        super().__init__(study)
        self.sizes, self.taus, self.rounds = sizes, taus, rounds
        self.draw_tau = draw_tau

    def results(self) -> dict:
        types, rows = self.sizes.expert_types, {}
        for form, times in measure(self.sizes, self.taus, self.rounds).items():
            vanilla = times["vanilla"]
            rows[form] = {"vanilla": {"seconds": vanilla, "throughput_increase": 0.0}}
            for tau in self.taus:
                own = times[f"tau={tau:g}"]
                bare = times[f"tau={tau:g}, {WITHOUT}"]
                rows[form][f"{tau:g}"] = {
                    "seconds": own,
                    "throughput_increase": vanilla / own - 1,
                    "by_flops": types.zero_computation / (tau * types.ffn),
                    "zero_computation_share": own / bare - 1,
                }
        sizes = self.sizes._asdict()
        sizes.pop("expert_types")
        return {"kinds": types._asdict(), "sizes": sizes, "forms": rows}

    def show(self, results: dict, console: Console) -> None:
        types = ExpertTypes(**results["kinds"])
        for form, rows in results["forms"].items():
            table = new_table(
                f"MoE++ {types}, forward, {form} (Table 3)",
                *("tau", "ms", "throughput", "by FLOPs", "zero-computation"),
            )
            for name, row in rows.items():
                shares = ("throughput_increase", "by_flops", "zero_computation_share")
                table.add_row(
                    name,
                    f"{1e3 * row['seconds']:.1f}",
                    *(f"{row[x]:+.1%}" if x in row else "-" for x in shares),
                )
            console.print(table)

    def draw(self, every: dict) -> list[Path]:
        return self.draw_tau(self.study.folder, every)


def measure(
    sizes: Sizes, taus: Sequence[float], rounds: int
) -> dict[str, dict[str, float]]:
    """Median seconds of the forward pass, by form and by layer."""
    types = sizes.expert_types
    tokens = np.random.default_rng(0).normal(size=(1, sizes.tokens, sizes.dim))
    tokens = tokens.astype("float32")
    tokens[..., -1] = 1.0
    layers = {"vanilla": new_layer(ExpertTypes(types.ffn), 1.0, tokens.shape, sizes)}
    for tau in taus:
        layers[f"tau={tau:g}"] = new_layer(types, tau, tokens.shape, sizes)
        bare = new_layer(types, tau, tokens.shape, sizes)
        # They contribute nothing, and cost nothing.
        bare.zero_computation_experts.call = lambda tokens, weights: (
            keras.ops.zeros_like(tokens)
        )
        layers[f"tau={tau:g}, {WITHOUT}"] = bare
    return {
        form: interleaved(
            {
                name: forward(moe, tokens, training=training)
                for name, moe in layers.items()
            },
            rounds,
        )
        for form, training in FORMS.items()
    }


def new_layer(types: ExpertTypes, tau: float, shape: tuple, sizes: Sizes) -> MoE:
    """A built MoE layer whose tokens choose experts by equation 8's shares."""
    router = routers.get(
        "softmax_token_choice",
        types,
        num_selected_experts=sizes.selected,
        capacity_factor=sizes.gamma,
        noise_std=0.0,
        **({"tau": tau} if types.zero_computation else {}),
    )
    gated = sizes.gated
    moe = MoE(
        router, Experts(types.ffn, sizes.mlp_dim, gated=gated, use_bias=not gated)
    )
    moe.build(shape)
    # The tokens' last feature is 1, so that its row of the kernel is a bias.
    kernel = np.array(router.kernel)
    kernel[-1] = 0.0
    if types.zero_computation:
        kernel[-1, : types.ffn] = shift_of_ffn(kernel, types, tau, sizes.selected)
    router.kernel.assign(kernel)
    return moe


def shift_of_ffn(
    kernel: np.ndarray, types: ExpertTypes, tau: float, selected: int
) -> float:
    """What lowers the FFN experts' logits until they get equation 8's share.

    It is found by bisection on the K largest of E random logits of other tokens.
    """
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(8192, types.total)) * np.linalg.norm(kernel, axis=0)
    share = tau * types.ffn / (tau * types.ffn + types.zero_computation)
    is_ffn = np.arange(types.total) < types.ffn
    low, high = -20.0, 20.0
    for _ in range(40):
        shift = (low + high) / 2
        chosen = np.argsort(-(logits + shift * is_ffn), axis=-1)[:, :selected]
        if (chosen < types.ffn).mean() < share:
            low = shift
        else:
            high = shift
    return shift
