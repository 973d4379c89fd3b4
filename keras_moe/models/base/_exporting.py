"""`export`, with checks of what each format supports on each backend."""

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from keras_moe._checks import check_path, unfit
from keras_moe._compat import flatten_layers
from keras_moe._errors import install
from keras_moe._files import new_partial, remove_partials, staged_folder
from keras_moe._types import KerasModel
from keras_moe.layers import MoEBlock
from keras_moe.routers import SparseRouter, SparsityConstrainedAffinity

if TYPE_CHECKING:

    class Mixin(KerasModel):
        """A class that stands before a model of KerasHub among the bases."""

        def save_to_preset(self, preset_dir: str, **kwargs: object) -> None: ...

else:
    Mixin = object

# Formats that are one file, and the ends of their names.
FILES = {"onnx": ".onnx", "torch": ".pt2", "litert": ".tflite"}
# The backends that write a format; by the name of a package, if they need one.
_WRITERS = {
    "tf_saved_model": {"jax": None, "tensorflow": None, "torch": "torch_xla"},
    "onnx": {"torch": None},
    "torch": {"torch": None},
    "litert": {"tensorflow": None, "torch": "litert_torch"},
}
# What TensorFlow writes for a SavedModel.
_SAVED_MODEL = ("saved_model.pb", "fingerprint.pb", "assets", "variables")


def export_signature(
    model: KerasModel,
    format: str,
    input_signature: object,
    dynamic_shapes: object = None,
) -> Any:
    """Checks that a format supports a model, and returns Keras's signature."""
    if input_signature is not None:
        input_signature = _checked_signature(model, input_signature)
    backend = keras.backend.backend()
    check_writer(format)
    layers = flatten_layers(model, include_self=False)
    blocks = [layer for layer in layers if isinstance(layer, MoEBlock)]
    routers = [block.feed_forward.router for block in blocks]
    _check_transport(routers, format)
    if backend == "torch" and format == "onnx":
        _check_onnx(model)
        _check_groups(routers, input_signature)
    if backend == "torch" and format == "torch" and dynamic_shapes is not None:
        _check_groups(routers, None)
    if backend == "jax" and format == "tf_saved_model":
        _check_groups(routers, input_signature)
    if input_signature is None and (backend != "tensorflow" or format == "litert"):
        # Only TensorFlow's own format has any number of tokens.
        return signature_of(model)
    return input_signature


def check_writer(format: str, names: Mapping[str, str] | None = None) -> None:
    """Refuses a format that another backend writes; `names` are those to show."""
    backend, writers = keras.backend.backend(), _WRITERS.get(format)
    if writers is None:
        # Keras writes it, or refuses its name.
        return
    missing = writers.get(backend, backend)
    if missing is None or (backend in writers and importlib.util.find_spec(missing)):
        return
    others = " or ".join(name for name, package in writers.items() if package is None)
    own = [name for name, x in _WRITERS.items() if x.get(backend, "") is None]
    names = names or {}
    format, own = names.get(format, format), [names.get(x, x) for x in own]
    raise ValueError(
        f"Expected KERAS_BACKEND={others} for format={format!r}, or one of {own}, which"
        f" {backend} writes; received: {format=}, KERAS_BACKEND={backend!r}"
    )


def signature_of(model: KerasModel, batch_size: int | None = None) -> list:
    """Returns the inputs of one or any batch size, with texts of maximum length."""
    backbone = getattr(model, "backbone", model)
    lengths = {"patches": getattr(backbone, "max_patches", None)}
    longest = getattr(backbone, "max_length", None)

    def spec(symbolic):
        length = lengths.get(symbolic.name) or longest
        sizes = (length if size is None else size for size in symbolic.shape[1:])
        return keras.InputSpec(
            shape=(batch_size, *sizes), dtype=symbolic.dtype, name=symbolic.name
        )

    return [keras.tree.map_structure(spec, model.input)]


def _checked_signature(model, signature):
    """Returns a signature as a list; refuses one that is not of the model's inputs."""
    several = [*signature] if isinstance(signature, (list, tuple)) else [signature]
    wanted, given = (keras.tree.flatten(x) for x in (model.input, several))
    names = [set(x) for x in (model.input, *several[:1]) if isinstance(x, dict)]
    fits = len(wanted) == len(given) and names in ([], names[:1] * 2)
    for symbolic, spec in zip(wanted, given):
        shape = getattr(spec, "shape", None)
        sizes = () if shape is None else tuple(shape)
        fits &= len(sizes) == len(symbolic.shape) and all(
            None in pair or pair[0] == pair[1]
            for pair in zip(sizes[1:], symbolic.shape[1:])
        )
    if not fits:
        shapes = keras.tree.map_structure(lambda x: tuple(x.shape), model.input)
        raise ValueError(
            "Expected an input_signature of keras.InputSpec for the model's inputs, "
            f"{shapes}; received: input_signature={signature}"
        )
    return several


def _check_groups(routers, input_signature):
    """Refuses multi-image groups with a dynamic batch size."""
    specs = keras.tree.flatten(input_signature)
    if specs != [None] and all(None not in spec.shape for spec in specs):
        return
    for router in routers:
        if isinstance(router, SparseRouter) and not router.groups_per_example(False):
            raise ValueError(
                "Expected an input_signature of one size of batch, such as "
                "[keras.InputSpec('float32', (8, height, width, channels))], or "
                "evaluation='batch_invariant'; received: "
                f"router={router.summary!r}, input_signature={input_signature}"
            )


def _check_transport(routers, format):
    """Refuses routers that stop when they have converged, or JAX's linear solver."""
    backend = keras.backend.backend()
    for router in routers:
        affinity = getattr(router, "affinity", None)
        if not isinstance(affinity, SparsityConstrainedAffinity):
            continue
        if backend == "torch" and format in ("torch", "onnx"):
            raise ValueError(
                f"Expected a router whose number of steps is fixed for {format=}, or "
                f"another backend; received: router={router.summary!r}"
            )
        if (
            backend == "jax"
            and format == "tf_saved_model"
            and affinity.solver != "adam"
        ):
            raise ValueError(
                "Expected SparsityConstrainedAffinity(solver='adam') on JAX, or "
                "KERAS_BACKEND=tensorflow, for format='tf_saved_model'; received: "
                f"solver={affinity.solver!r}"
            )


def _check_onnx(model):
    for name in ("onnx", "onnxscript"):
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"format='onnx' needs {name}: {install('onnx')}")
    if model.dtype_policy.compute_dtype != "float32":
        expected = "a model loaded with dtype='float32' for format='onnx'"
        raise unfit(expected, dtype=model.dtype_policy.name)


def _version_of_programs(format):
    if keras.backend.backend() != "jax" or format != "tf_saved_model":
        return contextlib.nullcontext()
    from keras_moe._backends.jax import readable_by_tensorflow

    return readable_by_tensorflow()


class Exportable(Mixin):
    """Mixin that overrides `keras.Model.export`."""

    # Of a lone output, in ONNX.
    output_name = "outputs"

    def export(
        self,
        filepath: str | os.PathLike,
        format: str = "tf_saved_model",
        verbose: bool | None = None,
        input_signature: object = None,
        **kwargs,
    ) -> None:
        """Exports the model for inference; see `keras.Model.export`."""
        if os.path.isdir(check_path("filepath", filepath)) and format in FILES:
            raise ValueError(
                f"Expected a file for format={format!r}; received a folder: "
                f"filepath={os.fspath(filepath)!r}"
            )
        shapes = kwargs.get("dynamic_shapes")
        signature = export_signature(self, format, input_signature, shapes)
        if format in ("torch", "litert") and Path(filepath).suffix != FILES[format]:
            expected = f"a file that ends with {FILES[format]} for {format=}"
            raise unfit(expected, filepath=os.fspath(filepath))
        with _replacing(filepath, format) as path, _version_of_programs(format):
            if keras.backend.backend() == "torch" and format == "onnx":
                # Keras's has a fixed batch size, and not the operations of routing.
                from keras_moe._backends.onnx import export_onnx

                export_onnx(self, path, signature, **kwargs)
            else:
                super().export(
                    path,
                    format=format,
                    verbose=False,
                    input_signature=signature,
                    **kwargs,
                )
        if verbose is None or verbose:
            print(f"Saved {format} program at '{filepath}'.")


@contextlib.contextmanager
def _replacing(filepath: str | os.PathLike, format: str) -> Iterator[str]:
    """Yields a path to write to; what is there then replaces `filepath`."""
    target = Path(filepath)
    if "://" in os.fspath(filepath) or format not in _WRITERS:
        yield os.fspath(filepath)
    elif format in FILES:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(target)
        folder, weights = new_partial(target), f"{target.name}.data"
        try:
            yield str(folder / target.name)
            if not (folder / weights).exists():
                (target.parent / weights).unlink(missing_ok=True)
            # The weights of a large ONNX program are a file next to it.
            for path in sorted(folder.iterdir(), reverse=True):
                os.replace(path, target.parent / path.name)
        finally:
            shutil.rmtree(folder)
    else:
        with staged_folder(
            target,
            "SavedModel",
            lambda folder: (folder / _SAVED_MODEL[0]).is_file(),
            lambda path: path.name in _SAVED_MODEL,
        ) as folder:
            yield str(folder)
