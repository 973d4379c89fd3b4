"""What one GPU does with this library, in ten minutes, with nothing to download.

    python -m tools.benchmark.gpu
    python -m tools.benchmark.gpu --minutes 5 --backends torch --rows vmoe_b16
    python -m tools.benchmark.gpu --small --output /tmp/gpu.json

Training steps of V-MoE, ViT, Soft MoE and MoE++ and SigLino's forward pass, each beside
another's code of the same work; kernels beside their references; and whether an image's
logits depend on the batch around it. The most important rows come first. Each is saved
as soon as it is measured, so that a second start measures what is missing; what was too
long or failed is tried again. Without a GPU everything is tiny (--small).
"""

import os
import sys
from pathlib import Path

# The benchmarks import each other as programs of one folder do.
sys.path.insert(0, str(Path(__file__).parent))

from row import BACKENDS, MISSING, Row, installed, peer

os.environ.setdefault("KERAS_BACKEND", next(filter(installed, BACKENDS), "jax"))

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from backends import child_answers, forget, write_lines
from page import TITLES
from rich.console import Console

from keras_moe._files import write_json, write_text
from keras_moe.distribution import CHIPS
from tools.benchmark.timing import interleaved_times

NEEDED = ("keras", "keras_hub", "jax", "torch", "flax", "optax", "timm")
# What a candidate needs beside its backend.
PEERS = {
    "official, einsums": {"flax": "flax", "optax": "optax"},
    "official": {"flax": "flax", "optax": "optax"},
    "timm": {"timm": "timm"},
}
ONE_BACKEND = {
    "official, einsums": "jax",
    "official": "jax",
    "plain grouped_mm": "torch",
    "timm": "torch",
    "official form": "torch",
}
# No room is kept for other programs on the GPU, and threads do not wait busily.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    "OMP_WAIT_POLICY": "PASSIVE",
}
SIGLINO = "SigLino, 6 blocks, forward in float32, batch 64"
VMOE = ("ours", "ours, dropless", "official, einsums", "plain grouped_mm")
OUT_OF_MEMORY = "out of memory"
LONG = "took longer than its time"


def _row(name, work, source, subject="", /, **arguments):
    one = ONE_BACKEND.get(subject)
    return Row(
        name=name,
        work=work,
        source=f"gpu_work:{source}",
        subject=subject,
        goals={},
        arguments=arguments,
        peers=PEERS.get(subject, {}),
        backends=(one,) if one else ("jax", "torch"),
    )


def _steps(preset, title, batch_size, forms):
    work = f"{title}, training step, batch {batch_size}"
    return [
        _row(f"{preset}: {form}", work, "step", form,
             preset=preset, form=form, batch_size=batch_size)
        for form in forms
    ]  # fmt: skip


def _neighbours(*presets):
    work = "an image alone, and among other neighbours"
    return [
        _row(f"neighbours: {x}", f"{x}, {work}", "neighbours", preset=x)
        for x in presets
    ]


# By importance; each backend takes its rows of a part in one process.
PARTS = (
    [
        _row(f"kernels: {x}", f"kernels in {x}", "kernels", dtype=x)
        for x in ("float32", "bfloat16")
    ],
    [
        *_steps("vmoe_b16", "V-MoE-B/16", 128, VMOE),
        *_steps("vit_b16", "ViT-B/16", 128, ("ours", "timm")),
        *_neighbours("vit_b16", "vmoe_b16"),
    ],
    _steps("vmoe_l16", "V-MoE-L/16", 64, VMOE),
    [
        *_steps("soft_moe_b16", "Soft MoE-B/16", 128, ("ours", "official")),
        *_steps("moepp_vit_b16", "MoE++-B/16", 128, ("ours",)),
        *(
            _row(f"siglino: {x}", SIGLINO, "siglino", x, form=x, batch_size=64)
            for x in ("ours", "official form")
        ),
        *_neighbours("soft_moe_b16", "moepp_vit_b16"),
    ],
)  # fmt: skip
ROWS = tuple(row for part in PARTS for row in part)


# In the child, which measures.


def measure(names: list[str], seconds: float, chip: str | None, small: bool) -> None:
    """Measures rows on this process's backend, and writes their lines as they come.

    Args:
        names: names of the rows.
        seconds: seconds of a row's rounds.
        chip: name of the GPU among `CHIPS`; None to find it by its own name.
        small: whether everything is tiny, as it is on a CPU.
    """
    rows = [row for row in ROWS if row.name in names]
    if any(row.subject == "timm" for row in rows):
        from zoo_step import import_timm

        # Before KerasHub's models, which import TensorFlow.
        import_timm()
    import gpu_work

    device, backend = gpu_work.device(), keras.backend.backend()
    small = small or device == "cpu"
    if chip is None:
        chip = next((x for x in CHIPS if x in device.lower()), None)
    peak = CHIPS[chip].peak_flops if chip else None
    write_lines([{"device": device, "small": small, **_versions(backend)}])
    for row in rows:
        found, note = [], None
        try:
            found, note = _measured(row, seconds, peak, small), _absent(row)
        except Exception as error:
            is_large = any(x in str(error) for x in ("RESOURCE_EXHAUSTED", "of memory"))
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            note = OUT_OF_MEMORY if is_large else f"failed: {reason}"
        write_lines(
            [_line(row, backend, **x) for x in found]
            or [_line(row, backend, note=note)]
        )
        if note == OUT_OF_MEMORY:
            # Another process begins with all of it.
            return
        forget()


def _absent(row):
    """The packages that a row needs and that are not here; None if there are none."""
    for module in row.peers.values():
        if peer(module) is None:
            return f"not installed: {MISSING[module]}"
    return None


def _measured(row, seconds, peak, small):
    """The lines of a row, or none if it needs a package that is not here."""
    if _absent(row):
        return []
    made = row.function()(**row.arguments, small=small)
    if not hasattr(made, "function"):
        return list(made)
    begin = time.perf_counter()
    interleaved_times({"": made.function}, 1, warm_ups=0)
    first = time.perf_counter() - begin
    rounds = 3 if small else 40
    times = interleaved_times({"": made.function}, rounds, warm_ups=2, budget=seconds)
    value = statistics.median(times[""])
    rate = None if made.flops is None else made.flops / value
    return [
        {
            "ms": 1e3 * value,
            "rounds_ms": [1e3 * x for x in times[""]],
            "first_s": first,
            "tokens_per_s": made.tokens / value,
            "tflops_per_s": None if rate is None else rate / 1e12,
            "share_of_peak": None if None in (rate, peak) else rate / peak,
        }
    ]


def _line(row, backend, *, form=None, **figures):
    line = {"row": row.name, "backend": backend, "work": row.work}
    return {**line, "form": form or row.subject, "note": None, **figures}


def _versions(backend):
    modules = {name: sys.modules[name] for name in ("keras", backend)}
    return {name: module.__version__ for name, module in modules.items()}


# In the parent, which saves.


class Results:
    """Lines in a JSON file, with their table in Markdown beside it.

    Args:
        path: the JSON file; it may be there already.
    """

    def __init__(self, path: Path):
        self.path = path
        self.machines, self.lines = {}, []
        if path.exists():
            document = json.loads(path.read_text(encoding="utf-8"))
            self.machines, self.lines = document["machines"], document["lines"]

    def add_machine(self, backend: str, machine: dict[str, Any]) -> None:
        """Takes the machine of a child, on which the lines before were measured, too.

        Raises:
            SystemExit: if they were not.
        """
        before = self.machines.setdefault(backend, machine)
        if before != machine:
            raise SystemExit(
                f"Expected the machine of {self.path}, {before}, or another --output; "
                f"received: {machine}"
            )

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Saves a row's lines instead of those it had."""
        key = lines[0]["row"], lines[0]["backend"]
        kept = [x for x in self.lines if (x["row"], x["backend"]) != key]
        self.lines = kept + lines
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"machines": self.machines, "lines": self.lines})
        write_text(self.path.with_suffix(".md"), self.markdown())

    def notes(self) -> dict[tuple[str, str], str | None]:
        """The note of each row that was begun."""
        return {(x["row"], x["backend"]): x["note"] for x in self.lines}

    def markdown(self) -> str:
        """The table: a line for each form of a work, a column for each backend."""
        backends = [x for x in TITLES if x in self.machines]
        heads = ["work", "form", *(TITLES[x] for x in backends)]
        cells, order = {}, {row.name: number for number, row in enumerate(ROWS)}
        for line in sorted(self.lines, key=lambda x: order.get(x["row"], len(order))):
            key = line["work"], line["form"]
            cells.setdefault(key, {})[line["backend"]] = _cell(line)
        rows = [
            [*key, *(found.get(x, "") for x in backends)]
            for key, found in cells.items()
        ]
        table = [heads, ["---"] * len(heads), *rows]
        machines = (
            ", ".join(f"{name} {value}" for name, value in machine.items())
            for machine in self.machines.values()
        )
        head = f"{datetime.date.today()}; {'; '.join(machines)}"
        return f"{head}\n\n" + "".join(f"| {' | '.join(x)} |\n" for x in table)


def _cell(line):
    if line["note"] is not None:
        return line["note"]
    if "ms" in line:
        share = line["share_of_peak"]
        peak = "" if share is None else f", {share:.1%} of peak"
        return f"{line['ms']:.4g} ms{peak}"
    if "bits" in line:
        if not line["bits"]:
            return "no bit differs"
        return (
            f"{line['bits']:,} bits in {line['values']:,} of {line['of']:,} logits, "
            f"at most {line['largest']:.1e}"
        )
    mark = "✓" if line["met"] else "✗"
    return (
        f"{line['forward']:.1e}, gradients {line['gradients']:.1e} "
        f"({mark} {line['tolerance']:.0e})"
    )


def missing(
    results: Results, backends: Iterable[str], names: list[str] | None
) -> Iterator[tuple[str, list[Row]]]:
    """Backends and their rows that are to be measured, the most important first.

    A row that is measured, or whose memory did not suffice, is not measured again. One
    that failed comes after all others.

    Args:
        results: what is there.
        backends: names of backends.
        names: beginnings of rows' names; None for all rows.
    """
    notes = results.notes()
    for again in (False, True):
        for part in PARTS:
            for backend in backends:
                rows = [
                    row
                    for row in part
                    if backend in row.backends
                    and row.name.startswith(tuple(names or [""]))
                    and ((row.name, backend) in notes) is again
                    and notes.get((row.name, backend), "") not in (None, OUT_OF_MEMORY)
                ]
                if rows:
                    yield backend, rows


def measure_in_children(
    args: argparse.Namespace, results: Results, console: Console
) -> None:
    """Measures what is missing, as long as there is time."""
    end = time.monotonic() + 60 * args.minutes

    def left():
        return max(0.0, min(args.row_seconds, end - time.monotonic()))

    command = ["-m", "tools.benchmark.gpu", "--child", "--seconds", str(args.seconds)]
    command += ["--small"] if args.small else []
    command += ["--chip", args.chip] if args.chip else []
    for backend, rows in [*missing(results, args.backends, args.rows)]:
        while rows and time.monotonic() < end:
            names = ["--rows", *(row.name for row in rows)]
            answers = child_answers([*command, *names], backend, left, **ENVIRONMENT)
            begun, status = False, 0
            for answer in answers:
                if isinstance(answer, int):
                    status = answer
                elif not begun:
                    begun = True
                    results.add_machine(backend, answer[0])
                else:
                    results.add(answer)
                    rows = rows[1:]
                    for line in answer:
                        text = f"{backend}, {line['row']} {line['form']}"
                        console.print(f"{text}: {_cell(line)}", highlight=False)
            if rows and time.monotonic() < end and (status or not begun):
                note = LONG if status == -9 else f"failed: ended with status {status}"
                if not begun:
                    raise SystemExit(f"{backend} did not begin: {note}")
                results.add([_line(rows[0], backend, note=note)])
                console.print(f"{backend}, {rows[0].name}: {note}")
                rows = rows[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whole = "minutes after which no row goes on"
    parser.add_argument("--minutes", type=float, default=10, help=whole)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), metavar="FILE",
                        help="JSON file; the table is beside it, as .md")  # fmt: skip
    parser.add_argument("--backends", nargs="+", choices=("jax", "torch"),
                        default=["jax", "torch"])  # fmt: skip
    parser.add_argument("--rows", nargs="+", metavar="NAME",
                        help="beginnings of rows' names; all by default")  # fmt: skip
    parser.add_argument("--row-seconds", type=float, default=150,
                        help="seconds of a row, its compilation included")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=8,
                        help="seconds of a row's rounds")  # fmt: skip
    parser.add_argument("--chip", choices=CHIPS, help="whose peak is the measure")
    parser.add_argument("--small", action="store_true", help="everything tiny")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(args.rows, args.seconds, args.chip, args.small)
        return
    console, results = Console(stderr=True), Results(args.output)
    absent = [name for name in NEEDED if not installed(name)]
    console.print(f"Needs {', '.join(NEEDED)}; not installed: {absent or 'none'}")
    args.backends = [x for x in args.backends if x not in absent]
    measure_in_children(args, results, console)
    sys.stdout.write(results.markdown())
    rest = [f"{x}: {row.name}" for x, rows in missing(results, args.backends, args.rows)
            for row in rows]  # fmt: skip
    if rest:
        console.print(f"Not measured: {', '.join(rest)}. Start it again")


if __name__ == "__main__":
    main()
