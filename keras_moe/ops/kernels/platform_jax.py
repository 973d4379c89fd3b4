"""The devices that JAX compiles for."""

import jax
import keras


def platform() -> str:
    """What the program is for."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        # The devices may be those of a topology that is compiled for.
        return distribution.device_mesh.backend_mesh.devices.flat[0].platform
    # A device or its platform, such as within `keras.device("cpu:0")`.
    device = jax.config.jax_default_device
    return getattr(device, "platform", device) or jax.default_backend()
