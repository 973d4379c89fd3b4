"""Layouts of activations inside a layer."""

from typing import Any

import keras


def with_layout(x: Any, path: str) -> Any:
    """`x` in the layout that the current distribution has for `path`, if any.

    Keras asks the layout map for the outputs of layers alone. A layout that does not
    divide the shape is not applied: one group cannot lie on eight devices.

    Args:
        x: tensor.
        path: path of the activation, such as `"block_1/moe/experts/slots/output"`.

    Returns:
        `x` in the layout.

    Example:

    >>> from keras import ops
    >>> from keras_moe.layers.activation_layout import with_layout
    >>> tuple(with_layout(ops.ones((2, 3)), "experts/slots/output").shape)
    (2, 3)
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
