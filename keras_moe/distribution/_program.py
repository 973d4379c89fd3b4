"""Reads the text of a program that XLA compiled: cycles and collectives."""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from keras_moe.ops._row_blocks import FURTHER_ROUNDS

# Parts of a model by what the names of their operations contain, the first that fits.
PARTS = {
    "experts": "/experts/|/moe/(hidden|output)/",
    "router": "/router/|/moe/gate/",
    "dispatch": "/moe/",
    "attention": "/attention/",
    "MLPs": "mlp/",
}
COLLECTIVES = (
    "all-to-all",
    "ragged-all-to-all",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
)
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8}
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
INSTRUCTION = re.compile(r"  (?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
CALLED = re.compile(r"(body|condition|calls)=%?([\w.\-]+)")
BRANCHES = re.compile(r"(?:true|false|branch)_computations?=(\{[^}]*\}|[%\w.\-]+)")
# Fusions with a collective: an all-reduce and a slice; one that others wait for.
ALL_REDUCE_SCATTER = "calls=%all-reduce-scatter"
ASYNC = "async-collective-start"
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
# A condition that compares a counter with the only number in it.
LIMIT = re.compile(r" [su]32\[\]\S* constant\((\d+)\)")
COUNTS = re.compile(r"ROOT .* compare\(.*direction=LT")
# Devices that exchange data with each other, in one of three forms: a list of groups;
# their number and size; axes of a mesh, and those within a group.
GROUPS = re.compile(
    r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]|mesh\[(.*?)\].*?\{(.*?)\})"
)
AXIS = re.compile(r"('\w+')(?:=|:\(\d+\))(\d+)")
# Products of matrices; the second form is NVIDIA's library.
CONTRACTED = re.compile(
    r'(?:dot|custom-call)\(%([\w.\-]+).*?lhs_contracting_dim(?:ension)?s"?[:=][{\[]([\d,"]*)'
)
# The compiler counts all tiles of a grouped matmul for every group.
UNTIMED = "ragged_dot"
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
OP_NAME = re.compile(r'op_name="([^"]*)"')
ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")


class Operation(NamedTuple):
    """An operation, alike in all blocks, with its runs in a step and their cycles."""

    part: str
    operation: str
    runs: int
    cycles: int


class Program:
    """The optimised HLO of a program; operations of `optimizer` are its own part."""

    def __init__(self, text: str, optimizer: str | None = None):
        self._optimizer = optimizer
        self._computations, self._entry = _computations(text)

    @functools.cached_property
    def operations(self) -> list[Operation]:
        """All operations with estimated cycles; grouped matmuls have no true ones."""
        found = []
        for line, match, times in self._lines():
            name = OP_NAME.search(line)
            name = name[1] if name else ""
            cycles = CYCLES.search(line)
            if cycles and UNTIMED not in name:
                # The compiler's own copies have no names.
                operation = (self._part(name), _short(name) or match[3])
                found.append(Operation(*operation, times, times * int(cycles[1])))
        return found

    def num_untimed(self) -> int:
        """Number of grouped matmuls, whose time the compiler does not know."""
        return sum(
            times
            for line, match, times in self._lines()
            if UNTIMED in line and match[3] in ("fusion", "custom-call")
        )

    def num_open_loops(self) -> int:
        """Number of loops of unknown length, whose bodies count once."""
        return sum(
            match[3] == "while" and self._trips(line) is None
            for line, match, _ in self._lines()
        )

    def matmul_flops(self) -> int:
        """FLOPs of the products of matrices outside fusions."""
        shapes, flops = {}, 0
        for line, match, times in self._lines():
            shapes[match[1]], *_ = ARRAY.findall(match[2]) or [(None, "")]
            if product := CONTRACTED.search(line):
                (_, left), (_, result) = shapes[product[1]], shapes[match[1]]
                sizes = [int(size) for size in left.split(",")]
                axes = [int(axis) for axis in re.findall(r"\d+", product[2])]
                contracted = math.prod(sizes[axis] for axis in axes)
                flops += 2 * times * contracted * _count(result)
        return flops

    def longest(self, number: int) -> list[Operation]:
        """The operations with the most cycles, those of all blocks together."""
        runs, cycles = Counter(), Counter()
        for operation in self.operations:
            runs[operation[:2]] += operation.runs
            cycles[operation[:2]] += operation.cycles
        return [
            Operation._make((*operation, runs[operation], count))
            for operation, count in cycles.most_common(number)
        ]

    def cycles_by_part(self) -> dict[str, int]:
        """Cycles of each part that has some, the largest first."""
        cycles = Counter()
        for each in self.operations:
            cycles[each.part] += each.cycles
        return dict(cycles.most_common())

    def collectives(self) -> dict[str, tuple[int, int]]:
        """Number of runs, and bytes of their results on one device, by kind."""
        numbers, sizes = Counter(), Counter()
        for kind, _, times, size in self.transfers():
            numbers[kind] += times
            sizes[kind] += times * size
        return {kind: (numbers[kind], sizes[kind]) for kind in numbers}

    def transfers(self) -> Iterator[tuple[str, int, int, int]]:
        """Kind, devices in a group (0 for all), runs and bytes of each collective."""
        for line, match, times in self._lines():
            scatters = ALL_REDUCE_SCATTER in line
            lines = [line]
            if scatters or match[1].startswith(ASYNC):
                (_, called), *_ = CALLED.findall(line)
                lines = self._computations[called]
            for found in filter(None, map(_transfer, lines)):
                kind, group, size = found
                # Its ring sends the array before the slice.
                yield "reduce-scatter" if scatters else kind, group, times, size

    def _part(self, name):
        for part, pattern in PARTS.items():
            if re.search(pattern, name):
                return part
        if self._optimizer is not None and f"/{self._optimizer}/" in name:
            return "optimizer"
        return "other"

    def _lines(self, first=None):
        """Instructions that run, each with the number of its runs in a step."""
        waiting = [(first or self._entry, 1)]
        while waiting:
            name, times = waiting.pop()
            for line in self._computations[name]:
                match = INSTRUCTION.match(line)
                if match is None:
                    continue
                yield line, match, times
                # The operations of a fusion are in its own cycles.
                if match[3] == "fusion":
                    continue
                trips = self._trips(line)
                for role, called in CALLED.findall(line):
                    runs = 1 if role != "body" or trips is None else trips
                    if runs and called in self._computations:
                        waiting.append((called, times * runs))
                if branches := BRANCHES.findall(line):
                    waiting.append((self._longest_branch(branches), times))

    def _longest_branch(self, branches):
        """The branch with the most cycles, such as an optimizer's that updates."""

        def length(name):
            lines = list(self._lines(name))
            cycles = ((CYCLES.search(line), times) for line, _, times in lines)
            return sum(times * int(x[1]) for x, times in cycles if x), len(lines)

        return max(re.findall(r"[\w.\-]+", " ".join(branches)), key=length)

    def _trips(self, line):
        """Rounds of a loop, if the compiler or its condition tells them."""
        if FURTHER_ROUNDS in line:
            return 0
        if trips := TRIPS.search(line):
            return int(trips[1])
        condition = dict(CALLED.findall(line)).get("condition")
        lines = self._computations.get(condition, [])
        limits = [found[1] for x in lines if (found := LIMIT.search(x))]
        if len(limits) == 1 and any(map(COUNTS.search, lines)):
            return int(limits[0])
        return None


def _computations(text):
    """The lines of each computation, and the name of the first that runs."""
    computations, lines, entry = {}, [], None
    for line in text.splitlines():
        if line.startswith("  "):
            lines.append(line)
        elif match := COMPUTATION.match(line):
            lines = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
    return computations, entry


def _short(name):
    """The last layers and the operation of a full name."""
    return "/".join(name.split("/")[-3:])


def _transfer(line):
    """Kind, devices in a group and bytes of a collective; None for what is none."""
    match = INSTRUCTION.match(line)
    if match is None:
        return None
    kind = match[3].removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    # Without what only the hardware reads.
    arrays, group = _arrays(match[2].replace("u32[]", "")), _group_size(line)
    if kind != match[3] and kind != "all-reduce":
        # The arguments, and the results.
        arrays = arrays[len(arrays) // 2 :]
    if kind == "reduce-scatter":
        arrays = arrays * max(group, 1)
    return kind, group, sum(arrays)


def _group_size(line):
    """Devices in a group of a collective; 0 if it names none."""
    found = GROUPS.search(line)
    if found is None:
        return 0
    listed, size, axes, inside = found.groups()
    if size:
        return int(size)
    if listed:
        return listed.count(",") + 1
    sizes = dict(AXIS.findall(axes or ""))
    # An axis of a group may be a part of the mesh's: 'axis':(before)size.
    parts = dict(AXIS.findall(inside or ""))
    names = re.findall(r"'\w+'", inside or "")
    return math.prod(int(parts.get(name) or sizes[name]) for name in names)


def _count(shape):
    return math.prod(int(x) for x in shape.split(",") if x)


def _arrays(result):
    """Bytes of each array in the type of a result."""
    return [
        BYTES.get(dtype, 4) * _count(shape)
        for dtype, shape in ARRAY.findall(re.sub(r"\{[^{}]*\}", "", result))
    ]
