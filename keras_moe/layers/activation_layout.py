"""Layouts of activations inside a layer."""

from typing import Any

import keras


def with_layout(x: Any, path: str) -> Any:
    """`x` in the layout that the current distribution has for `path`, if any.

    Keras asks the layout map for the outputs of layers alone. A layout that does not
    divide the shape is not applied: one group cannot lie on eight devices.
    """
    distribution = keras.distribution.distribution()
    layout = None if distribution is None else distribution.get_tensor_layout(path)
    if layout is None:
        return x
    mesh = layout.device_mesh
    sizes = {None: 1, **dict(zip(mesh.axis_names, mesh.shape))}
    if any(size % sizes[axis] for size, axis in zip(x.shape, layout.axes)):
        return x
    return keras.distribution.distribute_tensor(x, layout)
