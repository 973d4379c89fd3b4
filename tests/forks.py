"""Other processes: programs, and several that share what was imported before.

Importing takes most of the time of a process that does little. A program that has
imported all it needs, and has asked for no devices yet, forks the processes.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.xla_flags import quick

ROOT = Path(__file__).resolve().parents[1]
# Seconds after which what waits for ever is ended. A busy machine may take minutes.
PATIENCE = 600


def use_jax_on_cpu(devices: int = 1, **environment: str) -> None:
    """Sets the environment of a program that has not imported Keras yet."""
    os.environ.update(
        KERAS_BACKEND="jax",
        JAX_PLATFORMS="cpu",
        CUDA_VISIBLE_DEVICES="",
        TF_CPP_MIN_LOG_LEVEL="3",
        XLA_FLAGS=quick(xla_force_host_platform_device_count=devices),
        **environment,
    )


def start_forked(work: Callable, *arguments: object) -> int:
    """Starts a process that calls `work`, and returns its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def free_port() -> int:
    """A port of 127.0.0.1 that nothing else takes before a program listens to it.

    It is below those that systems give to connections, and differs between processes.
    """
    for number in range(1000):
        port = 20_000 + (os.getpid() * 7 + number) % 10_000
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError("no port is free")


def run_forked(work: Callable[[int], None], count: int) -> None:
    """Runs `work(number)` in `count` processes, and ends all when one fails."""
    children = [start_forked(work, number) for number in range(count)]
    left = set(children)
    while left:
        child, status = os.wait()
        left.discard(child)
        if status:
            # Whoever is left waits for its partner.
            for other in left:
                os.kill(other, signal.SIGKILL)
            raise SystemExit(f"Process {children.index(child)} ended with {status}")


def run_python(
    *arguments: object, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess:
    """Runs a program of this Python to its end, and captures what it prints."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )


def run_script(script: Path, *arguments: object) -> None:
    """Runs a program that forks. After `PATIENCE`, all say where they are and end."""
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(script), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        print(process.communicate(timeout=60)[0])
        raise
    finally:
        # Whatever is left of them.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
