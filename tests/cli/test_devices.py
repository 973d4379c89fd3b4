"""--devices and what goes with it."""

import keras
import pytest

from keras_moe.cli._devices import set_devices, start_processes
from keras_moe.cli.main import make_parser
from tests.refusals import refuses


@pytest.fixture(autouse=True)
def no_distribution():
    yield
    keras.distribution.set_distribution(None)


def parsed(text=""):
    return make_parser().parse_args(["train", "mumoe_digits", *text.split()])


@pytest.mark.every_backend
def test_one_device():
    args = parsed("--devices 1 --expert-parallel batch")
    if keras.backend.backend() != "jax":
        refuses("JAX", set_devices, args, "vmoe_digits", 8, {})
        return
    set_devices(args, "vmoe_digits", 8, {})
    assert keras.distribution.distribution().device_mesh.shape == (1,)
    with pytest.raises(ValueError, match="--devices=99999"):
        set_devices(parsed("--devices 99999"), "vmoe_digits", 8, {})
    args.devices = "all"
    assert set_devices(args, "vmoe_digits", 8, {"num_experts": 4}) is not None


def test_without_arguments_nothing_happens():
    start_processes(parsed())
    assert set_devices(parsed(), "vmoe_digits", 8, {}) is None
    assert keras.distribution.distribution() is None
