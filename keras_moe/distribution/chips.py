"""Accelerators, by their makers' figures."""

import itertools
import math
from typing import NamedTuple

from keras_moe.checks import check_integer


class Chip(NamedTuple):
    """An accelerator of a pod or a node.

    Attributes:
        name: name of the chip.
        peak_flops: dense bfloat16 floating-point operations a second.
        memory: bytes of memory.
        memory_bandwidth: bytes a second of the memory.
        links: number of links to its neighbours.
        link_bandwidth: bytes a second that one link sends; it receives as many.
        torus: dimensions of the torus that the links form; 0 for a switch, which
            connects all chips directly.
        source: where the figures are published.

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

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a chip sends over all its links."""
        return self.links * self.link_bandwidth

    def all_to_all_bandwidth(self, num_devices: int, all_devices: int = 0) -> float:
        """Bytes a second that each of several chips sends if all send to all.

        In a line of n chips half of all data crosses the middle: n / 4 times a chip's
        data over one link, which leaves 4 / n of a link for each chip. A ring, which a
        torus has in each dimension, has two such cuts, hence 8 / n. The longest
        dimension decides. A part of a larger torus has lines only.

        Args:
            num_devices: number of chips, in the shape nearest to a cube.
            all_devices: number of chips in the whole torus; 0 for `num_devices`.
        """
        if self.torus == 0:
            return self.bandwidth
        side = max(torus_sides(num_devices, self.torus))
        cuts = 2 if all_devices in (0, num_devices) else 1
        return min(self.bandwidth, 4 * cuts * self.link_bandwidth / side)


def torus_sides(num_devices: int, dimensions: int) -> tuple[int, ...]:
    """The sides of the torus nearest to a cube."""
    check_integer("num_devices", num_devices)
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    tori = (
        (*sides, num_devices // math.prod(sides))
        for sides in itertools.combinations_with_replacement(divisors, dimensions - 1)
        if num_devices % math.prod(sides) == 0
    )
    # The smallest longest side, and among these the smallest second longest.
    return min((tuple(sorted(x)) for x in tori), key=lambda x: x[::-1])


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "tpu_v4", 275e12, 32 * 2**30, 1200e9, 6, 50e9, 3,
            "Jouppi et al., TPU v4, Table 4: 275 TFLOP/s, 32 GiB, 1200 GB/s, 6 links "
            "of 50 GB/s",
        ),
        Chip(
            # 1600 Gbit/s over four links.
            "tpu_v5e", 197e12, 16e9, 819e9, 4, 50e9, 2,
            "Google Cloud, TPU v5e: 197 TFLOP/s, 16 GB, 819 GB/s, 1600 Gbit/s",
        ),
        Chip(
            # 4800 Gbit/s over six links.
            "tpu_v5p", 459e12, 95e9, 2765e9, 6, 100e9, 3,
            "Google Cloud, TPU v5p: 459 TFLOP/s, 95 GB, 2765 GB/s, 4800 Gbit/s",
        ),
        Chip(
            # The data sheet counts sparse operations, and both directions.
            "h200", 989.5e12, 141e9, 4800e9, 18, 25e9, 0,
            "NVIDIA H200 data sheet, SXM: 1979 TFLOP/s with sparsity, 141 GB, "
            "4.8 TB/s, NVLink 900 GB/s in both directions",
        ),
    )
}  # fmt: skip
