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
    if keras.backend.backend() == "torch":
        _check_saved_model(format)
        routers = _routers(model)
        if format == "onnx":
            input_signature = _one_example(model, input_signature)
            _check_onnx(model, routers)
        if format == "torch" and dynamic_shapes is not None:
            _check_any_batch(routers)
    if keras.backend.backend() == "jax" and format == "tf_saved_model":
        _check_groups(_routers(model), input_signature)
    if input_signature is None and keras.backend.backend() != "tensorflow":
        # The other two formats have a fixed number of tokens.
        return _signature(model, batch=None)
    return input_signature


def _check_groups(routers, input_signature):
    """Refuses multi-image groups with a dynamic batch size on JAX."""
    if input_signature is not None:
        specs = keras.tree.flatten(input_signature)
        if all(None not in spec.shape for spec in specs):
            return
    for router in routers:
        if isinstance(router, SparseRouter) and not router.groups_per_example(False):
            raise ValueError(
                "Expected an input_signature of one size of batch, such as "
                "[keras.InputSpec((8, height, width, channels))], where groups are "
                "larger than an image, since JAX wants to know how many there are; "
                f"received: router={router.summary!r}, "
                f"input_signature={input_signature}. "
                "Load the model with evaluation='batch_invariant' to serve any batch."
            )


def _check_saved_model(format):
    # Keras needs this package to write one.
    if format == "tf_saved_model" and importlib.util.find_spec("torch_xla") is None:
        raise ValueError(
            "Expected format='torch' or 'onnx' on PyTorch, which writes no SavedModel "
            "without torch_xla; received: format='tf_saved_model'. Save the model with "
            "save_to_preset, and export it with KERAS_BACKEND=jax or tensorflow."
        )


def _routers(model):
    return [
        layer.feed_forward.router
        for layer in flatten_layers(model, include_self=False)
        if isinstance(layer, MoEEncoderBlock)
    ]


def _one_example(model, input_signature):
    """Returns the signature; defaults to one example."""
    if input_signature is None:
        return _signature(model, batch=1)
    shapes = [tuple(spec.shape) for spec in keras.tree.flatten(input_signature)]
    if any(None in shape for shape in shapes):
        raise ValueError(
            "Expected an input_signature of a fixed size for format='onnx' on PyTorch "
            f"(Keras has no other there); received: shapes={shapes}"
        )
    return input_signature


def _signature(model, batch):
    """Returns the inputs for a batch size, with texts of maximum length."""
    length = getattr(getattr(model, "backbone", model), "max_length", None)

    def spec(symbolic):
        sizes = (length if size is None else size for size in symbolic.shape[1:])
        return keras.InputSpec(
            shape=(batch, *sizes), dtype=symbolic.dtype, name=symbolic.name
        )

    return [keras.tree.map_structure(spec, model.input)]


def _check_onnx(model, routers):
    for router in routers:
        if not isinstance(router, SoftRouter):
            raise ValueError(
                "Expected a dense model or soft routing for format='onnx' on PyTorch, "
                "whose exporter cannot translate a stable sort or searchsorted; "
                f"received: router={router.summary!r}. Use format='torch', or "
                "format='tf_saved_model' on JAX or TensorFlow."
            )
    policy = model.dtype_policy
    if policy.compute_dtype != "float32":
        raise ValueError(
            "Expected dtype='float32' for format='onnx'; "
            f"received: dtype={policy.name!r}. Load the weights with dtype='float32'."
        )


def _check_any_batch(routers):
    for router in routers:
        each_by_itself = isinstance(router, (SoftRouter, ExpertCoefficients)) or (
            isinstance(router, TokenChoiceRouter) and router.groups_per_example(False)
        )
        if not each_by_itself:
            raise ValueError(
                "Expected a dense model, soft routing, or token choice without "
                "eval_capacity_factor and evaluation='official' for dynamic_shapes: "
                "PyTorch's exporter wants one capacity; received: "
                f"router={router.summary!r}. Export it for one size of batch, by "
                "input_signature."
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
