"""The time of processors: this program's own, and what others took beside it."""

import multiprocessing
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
# A larger share of the machine's time in other programs makes a row noisy.
NOISY = 0.05


class CpuTimes(NamedTuple):
    """A reading of clocks; the difference of two tells what ran between them.

    Attributes:
        busy: seconds of all cores in any program, or None where the system has no
            such count.
        own: seconds of this process and of its children.
        wall: seconds that have passed.
        cores: number of cores that `busy` counts.
    """

    busy: float | None
    own: float
    wall: float
    cores: int


def cpu_seconds() -> float:
    """Seconds of all threads of this process, and of its children.

    Children that run count where they are workers of `multiprocessing`, and where the
    system has /proc.
    """
    times = os.times()
    seconds = time.process_time() + times.children_user + times.children_system
    for worker in multiprocessing.active_children():
        stat = Path(f"/proc/{worker.pid}/stat")
        if stat.exists():
            # The name in parentheses may have spaces; user and system are 14 and 15.
            user, system = stat.read_text().rpartition(")")[2].split()[11:13]
            seconds += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return seconds


def read_cpu_times(stat: Path = STAT) -> CpuTimes:
    """Reads the clocks.

    Args:
        stat: file in the format of Linux's /proc/stat.
    """
    own = cpu_seconds()
    busy, cores = None, os.cpu_count() or 1
    if stat.exists():
        text = stat.read_text()
        # user nice system idle iowait irq softirq steal; steal is another machine's.
        user, nice, system, _, _, irq, softirq, steal = (
            int(ticks) for ticks in text.split(maxsplit=9)[1:9]
        )
        ticks = user + nice + system + irq + softirq + steal
        busy = ticks / os.sysconf("SC_CLK_TCK")
        cores = len(re.findall(r"^cpu\d", text, re.M)) or cores
    return CpuTimes(busy, own, time.perf_counter(), cores)


def foreign_share(before: CpuTimes, after: CpuTimes) -> float | None:
    """The share of all cores' time that was not this process's, or None if unknown.

    Args:
        before: reading at the beginning.
        after: reading at the end.
    """
    if before.busy is None or after.busy is None:
        return None
    foreign = (after.busy - before.busy) - (after.own - before.own)
    whole = (after.wall - before.wall) * after.cores
    # The machine's clock ticks in hundredths of a second.
    return max(foreign, 0.0) / whole if whole else 0.0
