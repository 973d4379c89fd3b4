"""Training steps on TPUs beside the official forms, by the compiler's cycles.

    KERAS_BACKEND=jax python -m tools.benchmark.tpu_cycles
    KERAS_BACKEND=jax python -m tools.benchmark.tpu_cycles --rows ViT --longest 20

Both sides are two blocks of size B/16 with an embedding and a head, mixed bfloat16,
AdamW, compiled for v5e without a TPU: the extra tpu-plan, flax and optax. Cycles are
those that the compiler estimates for each operation, times their runs; sorts, scatters
and collectives have none.
"""

import argparse
import functools
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from keras_moe import distribution, models
from keras_moe._backends import jax_compilation
from keras_moe.distribution._program import Program


class Row(NamedTuple):
    """A preset of ours, and the arguments of the official second feed-forward."""

    preset: str
    overrides: dict
    topology: str
    batch_size: int
    official: tuple
    pair: dict = {}


# Groups of 8 images with class tokens; 1.05 x 2 choices over 8 experts, in fours.
VMOE = ("TokenChoice", 8, 3072, 8 * 197, 416, 2)
ROWS = {
    "ViT": Row("vit_b16", {}, "v5e:1x1", 32, ("MLP", 3072)),
    "V-MoE, einsum": Row(
        "vmoe_b16_every2_e8", {}, "v5e:2x4", 256, (*VMOE, "einsum")
    ),
    "V-MoE, indices": Row(
        "vmoe_b16_every2_e8", {}, "v5e:2x4", 256, (*VMOE, "indices")
    ),
    "Soft MoE": Row(
        "soft_moe_b16", {"moe_layers": [1]}, "v5e:2x4", 256, ("SoftMoE", 128, 3072),
        {"class_token": False, "query_key_norm": True},
    ),
}  # fmt: skip


class Measured(NamedTuple):
    """A program's cycles, longest operations, sent bytes and temporary memory."""

    cycles: int
    longest: list
    sent: int
    memory: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    parser.add_argument("--longest", type=int, default=0, metavar="N")
    args = parser.parse_args()
    names = ("row", "side", "M cycles", "of official", "temporary MB", "sent MB")
    table = Table(*names)
    console = Console()
    with jax_compilation.alone():
        for name in args.rows:
            official = compiled_official(ROWS[name])
            for side, found in (("official", official), ("ours", ours(ROWS[name]))):
                table.add_row(
                    name,
                    side,
                    f"{found.cycles / 1e6:.2f}",
                    f"{found.cycles / official.cycles:.2f}",
                    f"{found.memory / 1e6:.0f}",
                    f"{found.sent / 1e6:.0f}",
                )
                for x in found.longest[: args.longest]:
                    console.print(f"{side}: {x.cycles / 1e6:7.3f} M x{x.runs} "
                                  f"{x.part} {x.operation} {x.source}")  # fmt: skip
    console.print(table)


def ours(row: Row) -> Measured:
    """A step of this library's model."""
    devices = jax_compilation.topology_devices(row.topology)
    arguments = {"num_layers": 2, "num_classes": 1000, "dtype": "mixed_bfloat16"}
    model = models.abstract(row.preset, **arguments, **row.overrides)
    layouts = distribution.auto(model, devices, batch_size=row.batch_size)
    lowered, *_ = jax_compilation.lower_step(model, layouts, "train", row.batch_size)
    return measured(lowered)


def compiled_official(row: Row) -> Measured:
    """A step of the same size as the official code forms it."""
    from tools.benchmark import official_forms

    devices = jax_compilation.topology_devices(row.topology)
    name, *sizes = row.official
    second = functools.partial(getattr(official_forms, name), *sizes)
    first = functools.partial(official_forms.MLP, 3072)
    pair = official_forms.Encoder(16, 768, 12, (first, second), **row.pair)
    lowered = official_forms.lower(pair, devices, row.batch_size, (224, 224, 3))
    return measured(lowered)


def measured(lowered: Any) -> Measured:
    compiled, text = jax_compilation.compile_lowered(lowered, "tpu")
    program = Program(text)
    return Measured(
        sum(program.cycles_by_part().values()),
        program.longest(100),
        sum(size for _, size in program.collectives().values()),
        compiled.memory_analysis().temp_size_in_bytes,
    )


if __name__ == "__main__":
    main()
