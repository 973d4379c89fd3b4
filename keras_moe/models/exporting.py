"""`export`, with checks of what each format supports on each backend."""

import importlib.util
import os
from typing import Any

import keras

from keras_moe.compat import flatten_layers
from keras_moe.layers import ExpertCoefficients, MoEEncoderBlock
from keras_moe.routers import SoftRouter, SparseRouter, TokenChoiceRouter


def export_signature(
    model: keras.Model, format: str, input_signature: Any, dynamic_shapes: Any = None
) -> Any:
    """Checks that a format supports a model, and returns Keras's signature."""
    backend = keras.backend.backend()
    layers = flatten_layers(model, include_self=False)
    blocks = [layer for layer in layers if isinstance(layer, MoEEncoderBlock)]
    routers = [block.feed_forward.router for block in blocks]
    if backend == "torch" and format == "onnx":
        if input_signature is None:
            input_signature = _signature(model, batch=1)
        _check_onnx(model, routers, input_signature)
    if backend == "torch" and format == "torch" and dynamic_shapes is not None:
        _check_any_batch(routers)
    if backend == "torch" and format == "tf_saved_model" and not _has_torch_xla():
        raise ValueError(
            "Expected format='torch' or 'onnx' on PyTorch; received: "
            "format='tf_saved_model'. Save the model with save_to_preset, and export "
            "it with KERAS_BACKEND=jax or tensorflow."
        )
    if backend == "jax" and format == "tf_saved_model":
        _check_groups(routers, input_signature)
    if input_signature is None and backend != "tensorflow":
        # The other two formats have a fixed number of tokens.
        return _signature(model, batch=None)
    return input_signature


def _has_torch_xla():
    return importlib.util.find_spec("torch_xla") is not None


def _signature(model, batch):
    """Returns the inputs for a batch size, with texts of maximum length."""
    length = getattr(getattr(model, "backbone", model), "max_length", None)

    def spec(symbolic):
        sizes = (length if size is None else size for size in symbolic.shape[1:])
        return keras.InputSpec(
            shape=(batch, *sizes), dtype=symbolic.dtype, name=symbolic.name
        )

    return [keras.tree.map_structure(spec, model.input)]


def _check_groups(routers, input_signature):
    """Refuses multi-image groups with a dynamic batch size on JAX."""
    specs = keras.tree.flatten(input_signature)
    if specs != [None] and all(None not in spec.shape for spec in specs):
        return
    for router in routers:
        if isinstance(router, SparseRouter) and not router.groups_per_example(False):
            raise ValueError(
                "Expected an input_signature of one size of batch, such as "
                "[keras.InputSpec((8, height, width, channels))], or a model loaded "
                "with evaluation='batch_invariant', since JAX needs to know the number "
                f"of groups; received: router={router.summary!r}, "
                f"input_signature={input_signature}"
            )


def _check_onnx(model, routers, input_signature):
    """Refuses what PyTorch's exporter cannot translate."""
    shapes = [tuple(spec.shape) for spec in keras.tree.flatten(input_signature)]
    if any(None in shape for shape in shapes):
        raise ValueError(
            "Expected an input_signature of a fixed size for format='onnx' on PyTorch; "
            f"received: shapes={shapes}"
        )
    for router in routers:
        if not isinstance(router, SoftRouter):
            raise ValueError(
                "Expected a dense model or soft routing for format='onnx' on PyTorch; "
                f"received: router={router.summary!r}. Use format='torch', or "
                "format='tf_saved_model' on JAX or TensorFlow."
            )
    if model.dtype_policy.compute_dtype != "float32":
        raise ValueError(
            "Expected a model loaded with dtype='float32' for format='onnx'; "
            f"received: dtype={model.dtype_policy.name!r}"
        )


def _check_any_batch(routers):
    for router in routers:
        any_batch = isinstance(router, (SoftRouter, ExpertCoefficients)) or (
            isinstance(router, TokenChoiceRouter) and router.groups_per_example(False)
        )
        if not any_batch:
            raise ValueError(
                "Expected a dense model, soft routing, or token choice without "
                "eval_capacity_factor and evaluation='official' for dynamic_shapes; "
                f"received: router={router.summary!r}. Export it for one size of "
                "batch, by input_signature."
            )


class Exportable:
    """Mixin that overrides `keras.Model.export`."""

    def export(
        self,
        filepath: str | os.PathLike,
        format: str = "tf_saved_model",
        verbose: bool | None = None,
        input_signature: Any = None,
        **kwargs,
    ) -> None:
        """Exports the model for inference; see `keras.Model.export`."""
        shapes = kwargs.get("dynamic_shapes")
        signature = export_signature(self, format, input_signature, shapes)
        super().export(
            filepath,
            format=format,
            verbose=verbose,
            input_signature=signature,
            **kwargs,
        )
