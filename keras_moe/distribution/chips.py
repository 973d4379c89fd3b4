"""The table of accelerators: published figures, and what their compilers say."""

import itertools
import math
from typing import NamedTuple

from keras_moe._checks import check_integer

# Chips along a dimension that wraps around, by the number of dimensions.
RING = {1: 4, 2: 16, 3: 4}
GIB = 2**30
# Shapes of topologies: chips along each dimension, or hosts and GPUs of a host.
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
HOSTS = ("1", "2", "4", "8", "2x8", "4x8", "8x8")


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
        shapes: shapes of topologies that `compiled_costs` knows.
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


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "tpu_v4", 275e12, 32 * GIB, 1200e9, 6, 50e9, 3,
            "Jouppi et al., TPU v4, Table 4: 275 TFLOP/s, 32 GiB, 1200 GB/s, 6 links "
            "of 50 GB/s", "v4", CUBES, 30.75 * GIB, 2**18,
        ),
        Chip(
            # 1600 Gbit/s over four links.
            "tpu_v5e", 197e12, 16 * GIB, 819e9, 4, 50e9, 2,
            "Google Cloud, TPU v5e: 197 TFLOP/s, 16 GiB, 819 GB/s, 1600 Gbit/s",
            "v5e", FLAT, 15.75 * GIB, 2**17,
        ),
        Chip(
            # 4800 Gbit/s over six links.
            "tpu_v5p", 459e12, 95 * GIB, 2765e9, 6, 100e9, 3,
            "Google Cloud, TPU v5p: 459 TFLOP/s, 95 GiB, 2765 GB/s, 4800 Gbit/s",
            "v5p", ("1x1x1", *CUBES), 95.73 * GIB, 2**18,
        ),
        Chip(
            # 800 GB/s over four links, both directions counted.
            "tpu_v6e", 918e12, 32 * GIB, 1638e9, 4, 100e9, 2,
            "Google Cloud, TPU v6e: 918 TFLOP/s, 32 GiB, 1638 GB/s, 800 GB/s",
            "v6e", FLAT, 31.24 * GIB, 2**19,
        ),
        Chip(
            # 1200 GB/s over six links, both directions counted. Two devices.
            "tpu_7x", 2307e12, 192 * GIB, 7380e9, 6, 100e9, 3,
            "Google Cloud, TPU7x: 2307 TFLOP/s, 192 GiB, 7380 GB/s, 1200 GB/s",
            "tpu7x", CUBES, 94.74 * GIB, 2**19,
        ),
        Chip(
            # The data sheets count sparse operations and both link directions.
            "h100", 989.5e12, 80e9, 3350e9, 18, 25e9, 0,
            "NVIDIA H100 data sheet, SXM: 1979 TFLOP/s with sparsity, 80 GB, "
            "3.35 TB/s, NVLink 900 GB/s in both directions",
        ),
        Chip(
            # The data sheet says 141 GB, and XLA (h200.txtpb) 141 GiB.
            "h200", 989.5e12, 141e9, 4800e9, 18, 25e9, 0,
            "NVIDIA H200 data sheet, SXM: 1979 TFLOP/s with sparsity, 141 GB, "
            "4.8 TB/s, NVLink 900 GB/s in both directions", "h200", HOSTS, 141.0 * GIB,
        ),
        Chip(
            "b200", 2250e12, 180e9, 8000e9, 18, 50e9, 0,
            "NVIDIA HGX B200 data sheet: 4.5 PFLOP/s with sparsity, 180 GB, 8 TB/s, "
            "NVLink 1.8 TB/s in both directions",
        ),
    )
}  # fmt: skip
# Those with a compiler, by its name of the chip.
GENERATIONS = {chip.generation: chip for chip in CHIPS.values() if chip.generation}
