"""ONNX programs from PyTorch, for any batch size.

PyTorch's exporter translates one operation after another. `TRANSLATIONS` adds those
that routing needs and it lacks.
"""

from typing import Any

import torch
from keras import tree
from onnxscript import opset18

_INT32, _INT64 = 6, 7  # onnx.TensorProto
# Its types are those of constants, not of what a program computes.
op: Any = opset18
# PyTorch fixes dimensions of size 0 or 1 while it traces.
_EXAMPLE_BATCH = 2


def export_onnx(
    model: Any, filepath: str, signature: Any, opset_version: int | None = None
) -> None:
    """Writes a model's inference; a batch size of None in `signature` is dynamic."""
    # Keras flattens a dict by name, and PyTorch as it stands.
    signature = [
        dict(sorted(x.items())) if isinstance(x, dict) else x for x in signature
    ]
    names = [x.name for x in tree.flatten(model.input)]

    def example(spec):
        size, *rest = spec.shape
        shape = (size or _EXAMPLE_BATCH, *rest)
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype or "float32"))

    any_size = [id(x) for x in tree.flatten(signature) if x.shape[0] is None]

    def dynamic(batch, specs):
        return tuple(
            tree.map_structure(lambda x: {0: batch} if id(x) in specs else {}, inputs)
            for inputs in signature
        )

    # Keras's functional models return a dict sorted by name.
    is_dict = isinstance(model.output, dict)
    outputs = sorted(model.output) if is_dict else [model.output_name]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            program = torch.export.export(
                model,
                tuple(tree.map_structure(example, x) for x in signature),
                dynamic_shapes=(dynamic(torch.export.Dim("batch"), any_size),),
                strict=False,
            )
            onnx: Any = torch.onnx.export(
                program,
                dynamo=True,
                custom_translation_table=TRANSLATIONS,
                input_names=names,
                output_names=outputs,
                # The name of the axis, which all inputs share.
                dynamic_shapes=dynamic("batch", any_size[:1]),
                opset_version=opset_version,
                verbose=False,
            )
    finally:
        model.train(training)
    # Weights over 2 GB are a file next to the program.
    onnx.save(filepath)


def _searchsorted(
    sorted_sequence,
    self,
    out_int32: bool = False,
    right: bool = False,
    side=None,
    sorter=None,
):
    values = op.Unsqueeze(op.Cast(self, to=_INT64), op.Constant(value_ints=[-1]))
    edges = op.Cast(sorted_sequence, to=_INT64)
    is_right = right or side == "right"
    before = op.LessOrEqual(edges, values) if is_right else op.Less(edges, values)
    counts = op.ReduceSum(
        op.Cast(before, to=_INT64), op.Constant(value_ints=[-1]), keepdims=0
    )
    return op.Cast(counts, to=_INT32) if out_int32 else counts


def _sort(self, stable=None, dim: int = -1, descending: bool = False):
    # TopK takes ties in order, as a stable sort does.
    size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
    return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)


def _squeeze(self, dim: int):
    # PyTorch leaves other dimensions than 1 as they are.
    size = self.shape[dim]
    if size != 1:
        return op.Identity(self)
    return op.Squeeze(self, op.Constant(value_ints=[dim]))


TRANSLATIONS = {
    torch.ops.aten.searchsorted.Tensor: _searchsorted,
    torch.ops.aten.sort.stable: _sort,
    torch.ops.aten.squeeze.dim: _squeeze,
}
