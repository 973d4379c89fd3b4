"""Experts without a capacity on several devices of JAX: rows go to them and back.

Axes: P devices, R rows of a device, n devices among which the experts are split, E
experts, B rows that a device takes in a round, D hidden, H mlp.

Shapes must be static, but how many rows a device's experts get is data. So each
device takes `rows_per_round` at a time, a little more than the mean, in as many rounds
as the busiest device needs. Balanced experts need one; no row is ever dropped.

The rows of a device queue by expert, then by the device that they come from, then as
they stand there. Every device knows all queues from the group sizes of all, so that
rows land where they belong: sorted by expert.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from keras_moe._backends.jax import platform
from keras_moe.ops._row_blocks import FURTHER_ROUNDS, rows_per_round
from keras_moe.ops.kernels._block_loops import Weights
from keras_moe.ops.kernels._grouped_jax import mlp_backward, mlp_forward

# Rows that no expert has are never read. TPUs take long to fill the buffers of rows.
empty = getattr(lax, "empty", jnp.zeros)


class Split(NamedTuple):
    """The mesh, and its axes over which tokens, experts and hidden units are split."""

    mesh: jax.sharding.Mesh
    tokens: tuple[str, ...]
    experts: str | None
    model: str | None

    @property
    def num_blocks(self) -> int:
        """P: the number of devices over which the tokens are split."""
        return self._size(self.tokens)

    @property
    def ways(self) -> int:
        """n: the number of devices over which the experts are split."""
        return self._size([self.experts] if self.experts else [])

    def _size(self, axes):
        size = 1
        for axis in axes:
            size *= self.mesh.shape[axis]
        return size

    @property
    def replicas(self) -> tuple[str, ...]:
        """The axes of devices that have the same experts, and other tokens."""
        return tuple(axis for axis in self.tokens if axis != self.experts)

    def specs(self, weights: Weights) -> Weights:
        """How the weights are split."""
        hidden = PartitionSpec(self.experts, None, self.model)
        by_name = {
            "hidden_kernel": hidden,
            "gate_kernel": hidden,
            "output_kernel": PartitionSpec(self.experts, self.model),
            "output_bias": PartitionSpec(self.experts),
        }
        bias = PartitionSpec(self.experts, self.model)
        return Weights._make(
            None if x is None else by_name.get(name, bias)
            for name, x in zip(Weights._fields, weights)
        )


def split_of(layout: Any) -> Split | None:
    """The split of a Keras layout of kernels (E, D, H); None for another split."""
    experts, inputs, model = layout.axes
    mesh = layout.device_mesh.backend_mesh
    if inputs is not None or not isinstance(mesh, jax.sharding.Mesh):
        return None
    tokens = tuple(axis for axis in mesh.axis_names if axis != model)
    return Split(mesh, tokens, experts, model)


class Queues:
    """Who sends which rows to whom and when; `counts` (n, E) are all devices' rows."""

    def __init__(self, counts, size, axis):
        self.axis, self.size = axis, size
        ways, num_experts = counts.shape
        # [s, e]: where the rows of device s and expert e begin at s and in the queue.
        self.starts = jnp.cumsum(counts, axis=1) - counts
        of_experts = jnp.sum(counts, axis=0).reshape(ways, -1)
        before = jnp.cumsum(of_experts, axis=1) - of_experts
        self.places = before.reshape(num_experts) + jnp.cumsum(counts, axis=0) - counts
        self.counts = counts
        self.busiest = jnp.max(jnp.sum(of_experts, axis=1))

    def round(self, number):
        first = number * self.size
        low, high = (
            jnp.clip(x - self.places, 0, self.counts)
            for x in (first, first + self.size)
        )
        # Where nothing is sent, any place within the buffer will do.
        at = jnp.clip(self.places + low - first, 0, self.size)
        return Round(self.axis, self.starts + low, at, high - low)


class Round(NamedTuple):
    """Slices of rows that are sent: where they begin, and at the expert's device."""

    axis: str
    starts: jax.Array
    places: jax.Array
    sizes: jax.Array

    def _own(self, x):
        """What this device has for every expert (E,)."""
        return x[lax.axis_index(self.axis)]

    def _others(self, x):
        """What every device has for this device's experts (n x E / n,)."""
        ways = x.shape[0]
        return x.reshape(ways, ways, -1)[:, lax.axis_index(self.axis)].ravel()

    @property
    def group_sizes(self):
        """The rows (E / n,) of each of this device's experts."""
        return self._others(self.sizes).reshape(self.sizes.shape[0], -1).sum(axis=0)

    def to_experts(self, rows, number):
        """The rows (B, D) of this device's experts, sorted."""
        sent, received = self._own(self.sizes), self._others(self.sizes)
        starts, places = self._own(self.starts), self._own(self.places)
        buffer = empty((number, rows.shape[1]), rows.dtype)
        return exchange(rows, buffer, starts, sent, places, received, self.axis)

    def to_tokens(self, rows, outputs):
        """`outputs` (R, D) with this round's rows where they came from."""
        sent, received = self._others(self.sizes), self._own(self.sizes)
        starts, places = self._others(self.places), self._others(self.starts)
        return exchange(rows, outputs, starts, sent, places, received, self.axis)


def exchange(rows, outputs, starts, sizes, places, received, axis):
    """`lax.ragged_all_to_all`, which XLA does not have for CPUs."""
    if platform() != "cpu":
        return lax.ragged_all_to_all(
            rows, outputs, starts, sizes, places, received, axis_name=axis
        )
    # Buffers with room for all that one device may send to another.
    ways = lax.axis_size(axis)
    room = min(rows.shape[0], outputs.shape[0])
    starts, sizes, places = (x.reshape(ways, -1) for x in (starts, sizes, places))
    ends = jnp.cumsum(sizes, axis=1)
    place = jnp.arange(room, dtype="int32")
    index = jnp.sum(place[:, None] >= ends[:, None], axis=-1)
    is_sent = index < ends.shape[1]
    index = jnp.minimum(index, ends.shape[1] - 1)

    def along(x):
        return place + jnp.take_along_axis(x - ends + sizes, index, axis=1)

    sent = rows[jnp.where(is_sent, along(starts), 0)]
    targets = jnp.where(is_sent, along(places), outputs.shape[0])
    sent, targets = (lax.all_to_all(x, axis, 0, 0) for x in (sent, targets))
    return outputs.at[targets].set(sent, mode="drop")


def _sharded(split, function, inputs, outputs):
    """`function` on each device; specs are those of its inputs and outputs."""
    return jax.shard_map(
        function, mesh=split.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
    )


def _queues(split, rows, group_sizes):
    size = rows_per_round(rows.shape[0], split.ways)
    counts = lax.all_gather(group_sizes, split.experts)
    queues = Queues(counts, size, split.experts)
    # All devices do as many rounds, since collectives wait for all.
    busiest = queues.busiest
    if split.replicas:
        busiest = lax.pmax(busiest, split.replicas)
    return queues, -(-busiest // size)


def _further_rounds(rounds, run, *state):
    """`run(number, *state)` for the rounds after the first."""
    with jax.named_scope(FURTHER_ROUNDS):
        return lax.while_loop(
            lambda x: x[0] < rounds,
            lambda x: (x[0] + 1, *run(*x)),
            (jnp.int32(1), *state),
        )[1:]


def _own_bias(split, weights):
    """Adds the output bias on one of the devices whose outputs are summed."""
    if split.model is None or weights.output_bias is None:
        return weights
    is_first = lax.axis_index(split.model) == 0
    bias = jnp.where(is_first, weights.output_bias, 0)
    return weights._replace(output_bias=bias)


def _summed(split, x):
    return x if split.model is None else lax.psum(x, split.model)


def _forward(split, activation, rows, group_sizes, weights, keep):
    """The outputs (P, R, D), and what the experts' devices keep of the first round."""

    def on_device(rows, group_sizes, weights):
        (rows,), (group_sizes,) = rows, group_sizes
        weights = _own_bias(split, weights)
        if split.ways == 1:
            outputs, kept = mlp_forward(rows, group_sizes, weights, activation, keep)
            return _summed(split, outputs)[None], tuple(x[None] for x in kept)
        queues, rounds = _queues(split, rows, group_sizes)

        def run(number, outputs, keep=False):
            each = queues.round(number)
            own = each.to_experts(rows, queues.size)
            results, kept = mlp_forward(
                own, each.group_sizes, weights, activation, keep
            )
            return each.to_tokens(results, outputs), *((own, *kept) if keep else ())

        outputs, *kept = run(0, empty(rows.shape, rows.dtype), keep)
        (outputs,) = _further_rounds(rounds, run, outputs)
        return _summed(split, outputs)[None], tuple(x[None] for x in kept)

    by_device = PartitionSpec(split.tokens)
    kept = ()
    if keep:
        hidden = PartitionSpec(split.tokens, None, split.model)
        kept = (hidden,) * (1 if weights.gate_kernel is None else 2)
        kept = kept if split.ways == 1 else (by_device, *kept)
    inputs = by_device, by_device, split.specs(weights)
    run = _sharded(split, on_device, inputs, (by_device, kept))
    return run(rows, group_sizes, weights)


def _backward(split, activation, rows, group_sizes, weights, kept, upstream):
    def on_device(rows, group_sizes, weights, kept, upstream):
        (rows,), (group_sizes,), (upstream,) = rows, group_sizes, upstream
        kept = tuple(x[0] for x in kept)
        if split.ways == 1:
            dx, dw = mlp_backward(
                rows, group_sizes, weights, kept, upstream, activation
            )
            return sums(dx, dw)
        queues, rounds = _queues(split, rows, group_sizes)

        def gradients(number, dx, own=None, *kept):
            each = queues.round(number)
            sizes = each.group_sizes
            if own is None:
                own = each.to_experts(rows, queues.size)
                _, kept = mlp_forward(own, sizes, weights, activation, True)
            dy = each.to_experts(upstream, queues.size)
            own_dx, dw = mlp_backward(own, sizes, weights, kept, dy, activation)
            return each.to_tokens(own_dx, dx), dw

        def add(number, dx, dw):
            dx, more = gradients(number, dx)
            return dx, jax.tree.map(jnp.add, dw, more)

        # The forward pass kept the first round alone.
        dx, dw = gradients(0, empty(rows.shape, rows.dtype), *kept)
        return sums(*_further_rounds(rounds, add, dx, dw))

    def sums(dx, dw):
        if split.replicas:
            dw = lax.psum(dw, split.replicas)
        return _summed(split, dx)[None], dw

    by_device = PartitionSpec(split.tokens)
    kept_specs = [PartitionSpec(split.tokens, None, split.model)] * len(kept)
    if split.ways > 1:
        kept_specs[0] = by_device
    specs = split.specs(weights)
    inputs = by_device, by_device, specs, tuple(kept_specs), by_device
    run = _sharded(split, on_device, inputs, (by_device, specs))
    return run(rows, group_sizes, weights, kept, upstream)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mlp(split, activation, rows, group_sizes, weights):
    return _forward(split, activation, rows, group_sizes, weights, False)[0]


def _forward_and_residuals(split, activation, rows, group_sizes, weights):
    outputs, kept = _forward(split, activation, rows, group_sizes, weights, True)
    return outputs, (rows, group_sizes, weights, kept)


def _gradients(split, activation, residuals, upstream):
    rows, sizes, weights, kept = residuals
    dx, dw = _backward(split, activation, rows, sizes, weights, kept, upstream)
    return dx, None, dw


_mlp.defvjp(_forward_and_residuals, _gradients)


def grouped_mlp(rows, group_sizes, weights, activation, split):
    """`_grouped_jax.grouped_mlp` of each device's rows (P, R, D), sizes (P, E)."""
    return _mlp(split, activation, rows, group_sizes, weights)
