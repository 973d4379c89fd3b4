"""The table of accelerators: published figures, and what their compilers say."""

import itertools
import math
import tomllib
from pathlib import Path
from typing import NamedTuple

from keras_moe._checks import check_integer

# Chips along a dimension that wraps around, by the number of dimensions.
RING = {1: 4, 2: 16, 3: 4}
GIB = 2**30


class Chip(NamedTuple):
    """An accelerator in a pod or a node.

    Attributes:
        name: name of the chip.
        peak_flops: dense bfloat16 FLOP/s.
        memory: bytes of memory, as published.
        memory_bandwidth: memory bandwidth in bytes/s.
        links: number of links to its neighbours.
        link_bandwidth: bytes/s of one link in one direction.
        torus: dimensions of the torus of links; 0 for a switch that connects all chips.
        source: where the figures are published.
        generation: the compiler's name of the chip; None without a compiler.
        shapes: topologies that `compiled_costs` knows: chips along each dimension, or
            hosts and GPUs of a host.
        capacity: bytes that the compiler fills on a device, which may be half a chip.
        flops_per_cycle: FLOPs of a device in a cycle of its matrix units; None for
            GPUs, whose compiler counts no cycles.

    Example:

    >>> from keras_moe.distribution import CHIPS
    >>> chip = CHIPS["tpu_v4"]
    >>> chip.bandwidth / 1e9, chip.all_to_all_bandwidth(256) / 1e9
    (300.0, 50.0)
    """

    name: str
    peak_flops: float
    memory: float
    memory_bandwidth: float
    links: int
    link_bandwidth: float
    torus: int
    source: str
    generation: str | None = None
    shapes: tuple[str, ...] = ()
    capacity: float = 0.0
    flops_per_cycle: int | None = None

    @property
    def bandwidth(self) -> float:
        """Bytes/s that a chip sends over all its links."""
        return self.links * self.link_bandwidth

    def all_to_all_bandwidth(self, num_devices: int, all_devices: int = 0) -> float:
        """Bytes/s that each chip sends in an all-to-all.

        In a line of n chips half of all data crosses the middle link: n / 4 times a
        chip's data, so each chip gets 4 / n of a link. A ring (a dimension of a full
        torus, by 16 chips in two dimensions and by 4 in three) has two such cuts:
        8 / n. The longest dimension decides. A slice of a larger torus has lines only.

        Args:
            num_devices: number of chips, arranged as nearly as possible in a cube.
            all_devices: number of chips in the full torus; 0 for `num_devices`.
        """
        if self.torus == 0:
            return self.bandwidth
        side = max(torus_sides(num_devices, self.torus))
        is_ring = all_devices in (0, num_devices) and side % RING[self.torus] == 0
        cuts = 2 if is_ring else 1
        return min(self.bandwidth, 4 * cuts * self.link_bandwidth / side)


def torus_sides(num_devices: int, dimensions: int) -> tuple[int, ...]:
    """Returns the side lengths of the most cubic torus."""
    check_integer("num_devices", num_devices)
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    tori = (
        (*sides, num_devices // math.prod(sides))
        for sides in itertools.combinations_with_replacement(divisors, dimensions - 1)
        if num_devices % math.prod(sides) == 0
    )
    # Minimise the longest side, then the second longest.
    return min((tuple(sorted(x)) for x in tori), key=lambda x: x[::-1])


def _read_chips():
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    shapes = {name: tuple(table.pop("shapes", ())) for name, table in tables.items()}
    return {name: Chip(name, shapes=shapes[name], **x) for name, x in tables.items()}


CHIPS = _read_chips()
# Those with a compiler, by its name of the chip.
GENERATIONS = {chip.generation: chip for chip in CHIPS.values() if chip.generation}
