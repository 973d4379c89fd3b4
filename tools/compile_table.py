"""Compiles every kind of model for TPUs, without a TPU, and prints a table.

    KERAS_BACKEND=jax python -m tools.compile_table
    KERAS_BACKEND=jax python -m tools.compile_table --topologies v6e:2x2 --rows soft

Each row is two blocks of one model, one training step and one prediction for each
topology, 16 images. Results go to a JSON file, from which a second run continues. It
needs libtpu (the extra tpu-plan) and half a minute for each program.
"""

import argparse
import json
import sys
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    parser.add_argument("--topologies", nargs="+", default=["v5e:2x2", "v6e:2x2"])
    parser.add_argument("--steps", nargs="+", default=["train", "predict"])
    parser.add_argument("--output", type=Path, default=Path("compile_table.json"))
    args = parser.parse_args()
    results = json.loads(args.output.read_text()) if args.output.exists() else {}
    for row in args.rows:
        for topology in args.topologies:
            for step in args.steps:
                key = f"{row} | {topology} | {step}"
                if key not in results:
                    results[key] = result(row, topology, step)
                    write_json(args.output, results)
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
    return {
        "ms": round(1e3 * costs.step_seconds[1], 2),
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
    return f"{found['ms']} ms{'+' if found['untimed'] else ''}, {found['GiB']} GiB"


if __name__ == "__main__":
    main()
