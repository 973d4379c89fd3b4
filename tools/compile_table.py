"""Compiles models for devices that are not there, and prints tables.

    KERAS_BACKEND=jax python -m tools.compile_table kinds.json
    KERAS_BACKEND=jax python -m tools.compile_table kinds.json --topologies h200:4
    KERAS_BACKEND=jax python -m tools.compile_table presets.json --rows presets
    KERAS_BACKEND=jax python -m tools.compile_table layouts.json --rows layouts

A row of the first table is two blocks of a kind of model, or of a preset, one training
step and one prediction for each topology, 32 examples. A row of `layouts` is a training
step of a whole model on many devices: two blocks are compiled, and three, and each
block of the model costs what the third does.

A second run with the same file compiles what is missing or failed. It needs libtpu (the
extra tpu-plan) or, for GPUs, JAX's CUDA plugin (the extra cuda-plan), and half a minute
for each program.
"""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_moe import distribution, models, routers
from keras_moe._files import write_json
from keras_moe.distribution.chips import GENERATIONS

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
    "MoE++ language model": ("moepp_lm_0.6b", {"max_length": 256}),
    "GPT-2": ("gpt2", {}),
    "muMoE GPT-2, CP": ("mumoe_gpt2_cp", {}),
}
# Presets without classes.
NO_CLASSES = ("clip", "siglip", "limoe", "moe_lm", "moepp_lm", "gpt2", "mumoe_gpt2")


# Model, topology, examples on a device, and arguments of `compiled_costs`.
LAYOUTS = [
    ("vmoe_h14", "v5e:4x4", 8, {"rematerialize": True}),
    ("vmoe_h14", "v5e:8x8", 8, {}),
    ("vmoe_h14", "v5e:8x8", 16, {"rematerialize": True}),
    ("vmoe_h14", "v5e:8x8", 8, {"model_parallel": 2}),
    ("vmoe_h14", "v5e:16x16", 8, {}),
    ("vmoe_h14", "v5p:2x2x4", 32, {}),
    ("vmoe_h14", "v5p:4x4x4", 32, {}),
    ("vmoe_h14", "v5p:4x4x4", 32, {"model_parallel": 2}),
    ("vmoe_h14", "v5p:8x8x8", 32, {}),
    ("vmoe_h14", "v6e:4x4", 16, {}),
    ("vmoe_h14", "v6e:8x8", 16, {}),
    ("vmoe_h14", "v6e:16x16", 16, {}),
    ("vmoe_h14", "tpu7x:2x2x4", 32, {}),
    ("vmoe_h14", "tpu7x:4x4x4", 32, {}),
    ("vmoe_h14", "h200:2x8", 32, {}),
    ("vmoe_h14", "h200:8x8", 32, {}),
    ("limoe_h14", "v5e:8x8", 8, {"rematerialize": True}),
    ("limoe_h14", "v5p:4x4x4", 32, {}),
    ("limoe_h14", "v6e:8x8", 8, {}),
    # Groups of one text, since a group of several would be gathered.
    ("moepp_lm_7b", "v5e:8x8", 1, {"rematerialize": True, "examples_per_group": 1}),
    ("moepp_lm_7b", "v5e:16x16", 1, {"rematerialize": True, "examples_per_group": 1}),
    ("moepp_lm_7b", "v5p:2x2x4", 4, {"examples_per_group": 1}),
    ("moepp_lm_7b", "v5p:4x4x4", 4, {"examples_per_group": 1}),
    ("moepp_lm_7b", "v6e:8x8", 2, {"examples_per_group": 1}),
    ("moepp_lm_7b", "h200:2x8", 4, {"examples_per_group": 1}),
]
# What a layout's table says of a step, as in `CompiledCosts.seconds`.
PARTS = ("experts", "attention", "MLPs", "optimizer", "collectives")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--rows",
        nargs="+",
        default=[*ROWS],
        metavar="ROW",
        help="kinds of models, names of presets, 'presets' for all, or 'layouts'",
    )
    parser.add_argument(
        "--topologies", nargs="+", default=["v5e:2x2", "v5p:2x2x1", "v6e:2x2"]
    )
    parser.add_argument("--steps", nargs="+", default=["train", "predict"])
    args = parser.parse_args(arguments)
    if args.rows == ["layouts"]:
        jobs = {layout_name(*layout): (whole, layout) for layout in LAYOUTS}
    else:
        rows = preset_rows() if args.rows == ["presets"] else args.rows
        jobs = {
            f"{row} | {topology} | {step}": (result, (row, topology, step))
            for row in rows
            for topology in args.topologies
            for step in args.steps
            # Predictions have no capacity anyway.
            if not (row.endswith("dropless") and step == "predict")
        }
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    for key, (measure, job) in jobs.items():
        if "error" in results.get(key, {"error": None}):
            try:
                results[key] = measure(*job)
            except Exception as error:
                results[key] = {"error": " ".join(str(error).split())[:300]}
            write_json(args.results, results)
        print(key, results[key], file=sys.stderr)
    is_of_layouts = args.rows == ["layouts"]
    print(layouts_as_markdown(results) if is_of_layouts else as_markdown(results))


def preset_rows() -> list[str]:
    """All presets, and those of token choice once more without a capacity."""
    rows = []
    for name in models.list_presets():
        rows.append(name)
        if all(part.kind == "dense" for part in blocks_of(name)):
            continue
        with contextlib.suppress(ValueError):
            models.abstract(name, load_weights=False, dropless=True)
            rows.append(f"{name}, dropless")
    return rows


def blocks_of(preset: str) -> list:
    """What `describe` says of a preset's blocks."""
    return [x for x in models.describe(preset).parts if "block_" in x.name]


def result(row: str, topology: str, step: str) -> dict:
    """The milliseconds and GiB of a step of two blocks on a device."""
    name, _, dropless = row.partition(", ")
    options = {"dropless": True} if dropless else {}
    preset, overrides = ROWS.get(row, (name, options))
    sizes = SIZES
    if preset.startswith(NO_CLASSES):
        sizes = {**SIZES, "num_classes": None}
    arguments = (preset, topology, 32, step)
    try:
        costs = distribution.compiled_costs(*arguments, **{**sizes, **overrides})
    except ValueError as error:
        if "moe_layers" not in str(error):
            raise
        # Not the last block of the deep model, but of these two.
        overrides = {"moe_layers": [1], **overrides}
        costs = distribution.compiled_costs(*arguments, **{**sizes, **overrides})
    times = costs.step_seconds
    return {
        "ms": None if times is None else round(1e3 * times[1], 2),
        "GiB": round(costs.memory_bytes / 2**30, 2),
        "untimed": costs.num_untimed,
    }


def layout_name(preset: str, topology: str, examples: int, options: dict) -> str:
    changes = "".join(f", {name}={value}" for name, value in options.items())
    return f"{preset} | {topology} | {examples}{changes}"


def whole(preset: str, topology: str, examples: int, options: dict) -> dict:
    """A training step of all blocks, by those of two, and of one more of each kind."""
    devices = 2 if topology.startswith("tpu7x") else 1
    devices *= math.prod(map(int, topology.partition(":")[2].split("x")))
    num_classes = None if preset.startswith(NO_CLASSES) else 1000
    options = {"num_classes": num_classes, **options}
    blocks = [x.kind for x in blocks_of(preset)]
    num_dense = blocks.count("dense")
    num_moe = len(blocks) - num_dense
    # Blocks, those with experts, and how many of the model's are as the last one.
    forms = [(2, [1], 0), (3, [2], num_dense - 1), (3, [1, 2], num_moe - 1)]
    if not num_dense:
        forms = [(2, [0, 1], 0), (3, [0, 1, 2], num_moe - 2)]
    one, *more = (
        distribution.compiled_costs(
            preset,
            topology,
            examples * devices // options.get("model_parallel", 1),
            **{**options, "num_layers": layers, "moe_layers": moe_layers},
        )
        for layers, moe_layers, _ in forms
    )

    def of_all(field):
        """A dict of `CompiledCosts` for the whole model."""
        first, *others = map(field, (one, *more))
        return {
            name: first.get(name, 0)
            + sum(
                count * (other.get(name, 0) - first.get(name, 0))
                for other, (_, _, count) in zip(others, forms[1:])
            )
            for name in dict.fromkeys([*first, *(n for x in others for n in x)])
        }

    memory = of_all(lambda costs: costs.memory)
    found = {
        "devices": devices,
        "batch": one.batch_size,
        "GiB": round(sum(memory.values()) / 2**30, 1),
        "of": round(one.capacity / 2**30, 1),
    }
    if one.seconds is None:
        return found
    seconds = of_all(lambda costs: costs.seconds)
    sending = seconds.pop("collectives")
    computing = sum(seconds.values())
    (flops,) = of_all(lambda costs: {"": costs.model_flops}).values()
    chip = GENERATIONS[topology.partition(":")[0]]
    peak = chip.peak_flops / (2 if topology.startswith("tpu7x") else 1)
    return {
        **found,
        "ms": {name: round(1e3 * x, 1) for name, x in seconds.items()}
        | {"collectives": round(1e3 * sending, 1)},
        "step": [
            round(1e3 * max(computing, sending)),
            round(1e3 * (computing + sending)),
        ],
        "utilization": round(flops / (peak * max(computing, sending)), 2),
    }


def layouts_as_markdown(results: dict) -> str:
    """A row for each layout, with its memory and the time of each part."""
    head = ("model", "devices", "batch", "GiB, of", "step, ms", "utilisation")
    lines = [f"| {' | '.join((*head, ', '.join((*PARTS, 'other'))))} |"]
    lines.append("|---" * (len(head) + 1) + "|")
    for key, found in results.items():
        preset, topology, changes = key.split(" | ")
        _, _, options = changes.partition(", ")
        row = [f"`{preset}`" + (f", {options}" if options else ""), f"`{topology}`"]
        if "error" in found:
            row += ["no", *[""] * (len(head) - 2)]
        else:
            row += [f"{found['batch']:,}", f"{found['GiB']} of {found['of']}"]
            row.append(" to ".join(map(str, found.get("step", ()))))
            share = found.get("utilization")
            row.append("" if share is None else f"{share:.0%}")
            times = dict(found.get("ms", {}))
            parts = [times.pop(part, 0.0) for part in PARTS]
            parts = [*parts, sum(times.values())] if found.get("ms") else []
            row.append(", ".join(f"{x:.0f}" for x in parts))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def as_markdown(results: dict) -> str:
    """For each step a table with a row for each model and a column for each device."""
    keys = [key.split(" | ") for key in results]
    topologies = list(dict.fromkeys(topology for _, topology, _ in keys))
    tables = []
    for step in dict.fromkeys(step for *_, step in keys):
        lines = [f"| {' | '.join((step, *topologies))} |"]
        lines.append("|---" * (1 + len(topologies)) + "|")
        for row in dict.fromkeys(row for row, _, its in keys if its == step):
            cells = [cell(results.get(f"{row} | {x} | {step}")) for x in topologies]
            lines.append(f"| {' | '.join((row, *cells))} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def cell(found: dict | None) -> str:
    if found is None:
        return ""
    if "error" in found:
        return "no"
    memory = f"{found['GiB']:.2f} GiB"
    if found["ms"] is None:
        return memory
    return f"{found['ms']:.2f} ms{'+' if found['untimed'] else ''}, {memory}"


if __name__ == "__main__":
    main()
