"""--devices and what goes with it."""

import argparse
import importlib
from pathlib import Path

import keras
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    yield importlib.import_module("devices")
    keras.distribution.set_distribution(None)


def parsed(tool, text=""):
    parser = argparse.ArgumentParser()
    tool.add_device_arguments(parser)
    return parser.parse_args(text.split())


def test_one_device(tool):
    args = parsed(tool, "--devices 1 --expert-parallel batch")
    if keras.backend.backend() != "jax":
        with pytest.raises(ValueError, match="JAX"):
            tool.set_devices(args, "vmoe_digits", 8)
        return
    tool.set_devices(args, "vmoe_digits", 8)
    assert keras.distribution.distribution().device_mesh.shape == (1,)
    with pytest.raises(ValueError, match="--devices 99999"):
        tool.set_devices(parsed(tool, "--devices 99999"), "vmoe_digits", 8)
    args.devices = "all"
    assert tool.set_devices(args, "vmoe_digits", 8, num_experts=4) is not None


@pytest.mark.backend_free
def test_without_arguments_nothing_happens(tool):
    tool.start_processes(parsed(tool))
    assert tool.set_devices(parsed(tool), "vmoe_digits", 8) is None
    assert keras.distribution.distribution() is None


@pytest.mark.backend_free
def test_what_does_not_go_together_is_refused(tool):
    with pytest.raises(ValueError, match="together"):
        tool.start_processes(parsed(tool, "--process-id 0"))
    with pytest.raises(ValueError, match="with --expert-parallel"):
        tool.set_devices(parsed(tool, "--model-parallel 2"), "vmoe_digits", 8)
    with pytest.raises(SystemExit):
        parsed(tool, "--devices 0")
