"""Compiles every kind of model for devices that are not there, and prints a table.

    KERAS_BACKEND=jax python -m tools.compile_table table.json
    KERAS_BACKEND=jax python -m tools.compile_table table.json --topologies h200:4

Each row is two blocks of one model, one training step and one prediction for each
topology, 16 images. A second run with the same file compiles what is missing or failed.
It needs libtpu (the extra tpu-plan) or, for GPUs, JAX's CUDA plugin (the extra
cuda-plan), and half a minute for each program.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_moe import distribution, routers
from keras_moe.files import write_json

SIZES = {"num_layers": 2, "num_classes": 1000}
ROWS = {
    "ViT": ("vit_s32", {}),
    **{router: ("vmoe_s32", {"router": router}) for router in routers.ROUTERS},
    "softmax_token_choice, dropless": ("vmoe_s32", {"dropless": True}),
    "softmax_token_choice, einsum": ("vmoe_s32", {"dispatcher": "einsum"}),
    "Soft MoE": ("soft_moe_s16", {"moe_layers": [1]}),
    "MoE++": ("moepp_vit_s32", {}),
    "muMoE, CP": ("mumoe_vit_s16_cp", {}),
    "muMoE, TR": ("mumoe_vit_s16_tr", {}),
    "Mixer": ("mixer_s32", {}),
    "CLIP": ("clip_b32", {"num_classes": None}),
    "SigLIP": ("siglip_b16", {"num_classes": None}),
    "LIMoE": ("limoe_s32", {"num_classes": None}),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, metavar="FILE.json")
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    parser.add_argument("--topologies", nargs="+", default=["v5e:2x2", "v6e:2x2"])
    parser.add_argument("--steps", nargs="+", default=["train", "predict"])
    args = parser.parse_args(arguments)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    for row in args.rows:
        for topology in args.topologies:
            for step in args.steps:
                key = f"{row} | {topology} | {step}"
                if "error" in results.get(key, {"error": None}):
                    results[key] = result(row, topology, step)
                    write_json(args.results, results)
                print(key, results[key], file=sys.stderr)
    print(as_markdown(results))


def result(row: str, topology: str, step: str) -> dict:
    """The milliseconds and GiB of a step on a device, or the compiler's error."""
    preset, overrides = ROWS[row]
    try:
        costs = distribution.compiled_costs(
            preset, topology, 16, step, **{**SIZES, **overrides}
        )
    except Exception as error:
        return {"error": " ".join(str(error).split())[:300]}
    times = costs.step_seconds
    return {
        "ms": None if times is None else round(1e3 * times[1], 2),
        "GiB": round(costs.memory_bytes / 2**30, 2),
        "untimed": costs.num_untimed,
    }


def as_markdown(results: dict) -> str:
    """A row for each model, and a column for each topology and step."""
    keys = [key.split(" | ") for key in results]
    columns = list(dict.fromkeys((topology, step) for _, topology, step in keys))
    lines = ["| model | " + " | ".join(f"{t}, {s}" for t, s in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for row in dict.fromkeys(row for row, *_ in keys):
        cells = [cell(results.get(f"{row} | {t} | {s}")) for t, s in columns]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(found: dict | None) -> str:
    if found is None:
        return ""
    if "error" in found:
        return "no"
    memory = f"{found['GiB']} GiB"
    if found["ms"] is None:
        return memory
    return f"{found['ms']} ms{'+' if found['untimed'] else ''}, {memory}"


if __name__ == "__main__":
    main()
