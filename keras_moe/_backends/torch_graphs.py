"""PyTorch: a model's call, or a step of its training, as one graph of `torch.compile`.

Dynamo reads Python line by line, and Keras's calls are long and full of what it cannot
read. Here it sees one function of tensors, the values of variables among them. What
this calls is run on tensors without values, which records the graph.
"""

from collections.abc import Callable
from typing import Any

import keras
import torch


def is_reading() -> bool:
    """Whether Dynamo reads what is called now, and not to export it."""
    compiler = torch.compiler
    return compiler.is_dynamo_compiling() and not compiler.is_exporting()


class Region:
    """A function of a model; if `trains`, it takes gradients, and has an optimizer.

    `recording(model, torch)` is the context in which Keras draws by another `torch`.
    """

    def __init__(
        self, model: Any, function: Callable, recording: Callable, trains: bool = False
    ):
        self._model, self._function, self._trains = model, function, trains
        self._recording = recording
        self.run = torch._dynamo.nonstrict_trace(self._run)

    def variables(self) -> list:
        """The variables that the function reads or changes, whose values `run` gets."""
        model = self._model
        own = [*model.variables, *model.metrics_variables]
        return own + model.optimizer.variables if self._trains else own

    def _run(self, values, args, kwargs):
        """The function's result, and the losses that the model's layers add."""
        model, variables, state = self._model, self.variables(), list(values)
        if self._trains:
            trained = {id(v) for v in model.trainable_variables}
            for place, variable in enumerate(variables):
                if id(variable) in trained:
                    state[place] = values[place].detach().requires_grad_()
        with_gradients = self._trains or torch.is_grad_enabled()
        scope = keras.StatelessScope(zip(variables, state), collect_losses=True)
        with (
            torch.set_grad_enabled(with_gradients),
            scope,
            self._recording(model, _Seeded()),
        ):
            outputs = self._function(*args, **kwargs)
            losses = model.losses
        with torch.no_grad():
            for variable, old, value in zip(variables, state, values):
                new = scope.get_current_value(variable)
                if new is not old:
                    value.copy_(new)
        return outputs, losses


def compiled(
    model: Any, function: Callable, recording: Callable, trains: bool = False
) -> Callable:
    """A function of tensors, which calls a model, as one compiled graph."""
    region, kept = Region(model, function, recording, trains), []
    program = torch.compile(
        lambda values, *args: region.run(values, args, {})[0], fullgraph=True
    )

    def run(*args):
        variables = kept or region.variables()
        if trains:
            # Those of training stay, and listing them takes time.
            kept[:] = variables
        with torch.no_grad():
            return program([variable.value for variable in variables], *args)

    return run


def make_step(
    model: Any,
    name: str,
    step: Callable,
    rates_of: Callable,
    recording: Callable,
    force: bool = False,
) -> Callable:
    """Makes a step of `fit`, `evaluate` or `predict` that is one compiled graph.

    `step` is a function of a batch and of the learning rates that `rates_of(model)`
    returns before each step: a schedule may choose by the number of the step.
    """
    made = getattr(model, name)
    if made is not None and not force:
        return made
    trains = name == "train_function"
    run = compiled(model, step, recording, trains)

    def compiled_step(batches):
        data = keras.utils.unpack_x_y_sample_weight(batches[0])
        while data[-1] is None:
            # Dynamo takes no None here.
            data = data[:-1]
        data = keras.tree.map_structure(_of_any_size, data)
        with torch.no_grad():
            return run(data, rates_of(model) if trains else [])

    setattr(model, name, compiled_step)
    return compiled_step


def _of_any_size(x):
    """A tensor whose first axis may have another size in the next batch."""
    tensor: Any = keras.ops.convert_to_tensor(x)
    if tensor.ndim:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


# Generators are no part of a graph, and Keras seeds a new one for each call. This op
# draws the same numbers from the seed.


class _Seeded:
    """`torch` for Keras's random numbers, whose generators are seeds."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def normal(self, mean, stddev, size, generator, **kwargs):
        like = torch.empty(size, **kwargs)
        return mean + stddev * torch.ops.keras_moe.draw(generator, like, "randn")

    def rand(self, size, generator, **kwargs):
        return torch.ops.keras_moe.draw(generator, torch.empty(size, **kwargs), "rand")

    def bernoulli(self, chances, generator):
        return torch.ops.keras_moe.draw(generator, chances, "bernoulli")


@torch.library.custom_op("keras_moe::draw", mutates_args=())
def _draw(seed: torch.Tensor, like: torch.Tensor, kind: str) -> torch.Tensor:
    generator = torch.Generator(device=like.device)
    generator.manual_seed(int(seed.sum()) & 0xFFFFFFFF)
    if kind == "bernoulli":
        return torch.bernoulli(like, generator=generator)
    options: Any = {"dtype": like.dtype, "device": like.device}
    return getattr(torch, kind)(like.shape, generator=generator, **options)


@_draw.register_fake
def _(seed, like, kind):
    return torch.empty_like(like)
