"""Encoders as the official JAX code forms them, in Flax.

Written from the papers' equations, with the operations and layouts of google-research's
vmoe: dense one-hot dispatch by einsums or by indices, experts over the devices by a
transposition between two sharding constraints. Weights are float32, the rest bfloat16.

Axes: B batch, N tokens, G groups, S group_size, E experts, C capacity, D hidden, H mlp.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

BFLOAT16 = jnp.bfloat16


class MLP(nn.Module):
    mlp_dim: int

    @nn.compact
    def __call__(self, x):
        hidden = nn.gelu(nn.Dense(self.mlp_dim, dtype=BFLOAT16)(x))
        return nn.Dense(x.shape[-1], dtype=BFLOAT16)(hidden)


class Block(nn.Module):
    """Pre-norm attention and a feed-forward, which returns its losses as well."""

    num_heads: int
    feed_forward: Callable
    query_key_norm: bool = False

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=BFLOAT16)(x)
        x = x + nn.MultiHeadDotProductAttention(
            self.num_heads,
            dtype=BFLOAT16,
            deterministic=True,
            normalize_qk=self.query_key_norm,
        )(y, y)
        y = nn.LayerNorm(dtype=BFLOAT16)(x)
        outputs = self.feed_forward()(y)
        y, loss = outputs if isinstance(outputs, tuple) else (outputs, 0.0)
        return x + y, loss


def sharded(x, axis="experts"):
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axis))


def to_experts(x):
    """(G, E, C, D), by groups over the devices, to (E, G C, D), by experts."""
    groups, experts, capacity, dim = x.shape
    x = sharded(x)
    if groups % experts == 0:
        x = x.reshape(experts, -1, experts, capacity, dim).swapaxes(0, 2)
    else:
        x = x.swapaxes(0, 1)
    x = sharded(x.reshape(-1, dim))
    return x.reshape(experts, groups * capacity, dim)


def from_experts(x, groups):
    """The way back of `to_experts`."""
    experts, rows, dim = x.shape
    capacity = rows // groups
    x = sharded(x.reshape(-1, dim))
    if groups % experts == 0:
        x = x.reshape(experts, -1, experts, capacity, dim).swapaxes(0, 2)
    else:
        x = x.reshape(experts, groups, capacity, dim).swapaxes(0, 1)
    return sharded(x.reshape(groups, experts, capacity, dim))


class Experts(nn.Module):
    num_experts: int
    mlp_dim: int

    @nn.compact
    def __call__(self, x):
        experts = nn.vmap(
            MLP, in_axes=0, out_axes=0, variable_axes={"params": 0},
            split_rngs={"params": True},
        )  # fmt: skip
        return experts(self.mlp_dim, name="experts")(x)


class TokenChoice(nn.Module):
    """*Scaling Vision with Sparse Mixture of Experts*, section 2 and appendix A."""

    num_experts: int
    mlp_dim: int
    group_size: int
    capacity: int
    num_selected: int = 2
    dispatcher: str = "einsum"

    @nn.compact
    def __call__(self, x):
        shape = x.shape
        x = x.reshape(-1, self.group_size, shape[-1])
        logits = nn.Dense(self.num_experts, use_bias=False)(x.astype("float32"))
        std = 1 / self.num_experts
        noise = jax.random.normal(self.make_rng("noise"), logits.shape)
        gates, noisy = nn.softmax(logits), nn.softmax(logits + std * noise)
        loss = importance_loss(gates) + load_loss(
            logits, logits + std * noise, std, self.num_selected
        )
        weights, experts = jax.lax.top_k(noisy, self.num_selected)
        # Choices of rank 0 first, by position.
        chosen = jax.nn.one_hot(experts, self.num_experts, dtype="int32")
        ordered = chosen.swapaxes(1, 2).reshape(len(x), -1, self.num_experts)
        places = jnp.cumsum(ordered, axis=1) * ordered - 1
        places = places.reshape(len(x), self.num_selected, -1, self.num_experts)
        places = jnp.max(places.swapaxes(1, 2), axis=-1)
        groups = len(x)
        run = Experts(self.num_experts, self.mlp_dim)
        if self.dispatcher == "einsum":
            slots = jax.nn.one_hot(places, self.capacity, dtype=BFLOAT16)
            chosen = chosen.astype(BFLOAT16)
            combine = jnp.einsum(
                "gsk,gske,gskc->gsec", weights.astype(BFLOAT16), chosen, slots
            )
            dispatch = combine > 0
            inputs = jnp.einsum("gsec,gsd->gecd", dispatch.astype(BFLOAT16), x)
            outputs = from_experts(run(to_experts(inputs)), groups)
            y = jnp.einsum("gsec,gecd->gsd", combine, outputs)
        else:
            y = by_indices(x, experts, places, weights, run, self.num_experts,
                           self.capacity)  # fmt: skip
        return y.reshape(shape), loss


def by_indices(x, experts, places, weights, run, num_experts, capacity):
    """Scatter to the slots, and gather from them, group by group."""

    @jax.vmap
    def dispatch(x, experts, places):
        slots = jnp.zeros((num_experts, capacity, x.shape[-1]), x.dtype)
        rows = jnp.repeat(x[:, None], experts.shape[1], axis=1)
        return slots.at[experts, places].add(rows, mode="drop")

    @jax.vmap
    def combine(slots, experts, places, weights):
        rows = slots.at[experts, places].get(mode="fill", fill_value=0)
        return jnp.einsum("skd,sk->sd", rows, weights.astype(rows.dtype))

    # Negative places would count from the end.
    places = jnp.where(places < 0, capacity, places)
    slots = to_experts(dispatch(x, experts, places))
    return combine(from_experts(run(slots), len(x)), experts, places, weights)


def importance_loss(gates):
    importance = jnp.sum(gates, axis=(1,))
    return jnp.mean(squared_variation(importance))


def load_loss(logits, noisy, std, num_selected):
    threshold = jax.lax.top_k(noisy, num_selected)[0][..., -1:]
    load = 1 - jax.scipy.stats.norm.cdf((threshold - logits) / std)
    return jnp.mean(squared_variation(jnp.mean(load, axis=1)))


def squared_variation(x):
    return (jnp.std(x, axis=-1) / jnp.mean(x, axis=-1)) ** 2


class SoftMoE(nn.Module):
    """*From Sparse to Soft Mixtures of Experts*, algorithm 1; a group is an image."""

    num_experts: int
    mlp_dim: int
    slots_per_expert: int = 1

    @nn.compact
    def __call__(self, x):
        shape = (x.shape[-1], self.num_experts, self.slots_per_expert)
        mu = self.param("mu", nn.initializers.lecun_normal(), shape)
        scale = self.param("scale", nn.initializers.ones, ())
        norm = functools.partial(jnp.linalg.norm, keepdims=True)
        y = x.astype("float32")
        y = y / (norm(y, axis=-1) + 1e-6)
        mu = mu / (norm(mu, axis=0) + 1e-6)
        logits = jnp.einsum("gsd,dec->gsec", y, scale * mu)
        dispatch = jax.nn.softmax(logits, axis=1).astype(BFLOAT16)
        combine = jax.nn.softmax(logits, axis=(2, 3)).astype(BFLOAT16)
        inputs = jnp.einsum("gsec,gsd->gecd", dispatch, x)
        outputs = Experts(self.num_experts, self.mlp_dim)(to_experts(inputs))
        return jnp.einsum("gsec,gecd->gsd", combine, from_experts(outputs, len(x)))


class Encoder(nn.Module):
    """Patches, a block for each feed-forward, a pool and a head."""

    patch_size: int
    dim: int
    num_heads: int
    feed_forwards: Sequence[Callable]
    class_token: bool = True
    query_key_norm: bool = False

    @nn.compact
    def __call__(self, images):
        size = (self.patch_size, self.patch_size)
        x = nn.Conv(self.dim, size, size, "VALID", dtype=BFLOAT16)(images)
        x = x.reshape(len(x), -1, self.dim)
        if self.class_token:
            token = self.param("token", nn.initializers.zeros, (1, 1, self.dim))
            token = jnp.broadcast_to(token, (len(x), 1, self.dim)).astype(x.dtype)
            x = jnp.concatenate([token, x], axis=1)
        positions = nn.initializers.normal(0.02)
        x = x + self.param("positions", positions, (1, *x.shape[1:])).astype(x.dtype)
        losses = 0.0
        for feed_forward in self.feed_forwards:
            block = Block(self.num_heads, feed_forward, self.query_key_norm)
            x, loss = block(x)
            losses = losses + loss
        x = nn.LayerNorm(dtype=BFLOAT16)(x)
        x = x[:, 0] if self.class_token else jnp.mean(x, axis=1)
        return nn.Dense(1000, dtype="float32")(x), losses


def mesh_of(devices: list) -> jax.sharding.Mesh:
    return jax.make_mesh((len(devices),), ("experts",), devices=devices,
                         axis_types=(jax.sharding.AxisType.Auto,))  # fmt: skip


def training(model: Any, optimizer: Any) -> tuple[Callable, Callable]:
    """The function that draws a state, and a step of it."""
    import optax

    def initial(images):
        keys = {"params": jax.random.key(0), "noise": jax.random.key(1)}
        params = model.init(keys, images)["params"]
        return params, optimizer.init(params)

    def step(state, images, labels, key):
        def loss_of(params):
            logits, losses = model.apply({"params": params}, images,
                                         rngs={"noise": key})  # fmt: skip
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.mean(loss) + 0.01 * losses

        params, moments = state
        gradients = jax.grad(loss_of)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    return initial, step


def running(model: Any, images: Any, labels: Any) -> Callable[[], Any]:
    """A step of plain gradient descent on one device, which runs on from the last."""
    import optax

    images, labels = map(jnp.asarray, (images, labels))
    initial, step = training(model, optax.sgd(1e-3))
    mesh = mesh_of(jax.devices()[:1])
    with jax.set_mesh(mesh):
        state = jax.jit(initial)(images)
        step = jax.jit(step, donate_argnums=0)

    def run():
        nonlocal state
        with jax.set_mesh(mesh):
            state = step(state, images, labels, jax.random.PRNGKey(0))
        return jax.tree.leaves(state)[0]

    return run


def lower(model: Any, devices: list, batch_size: int, image_shape: tuple) -> Any:
    """A lowered step of AdamW and clipping; groups and experts over the devices."""
    import optax

    mesh = mesh_of(devices)
    everywhere = jax.NamedSharding(mesh, PartitionSpec())
    split = jax.NamedSharding(mesh, PartitionSpec("experts"))
    # As this library's models are compiled, and the papers' were.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    initial, step = training(model, optimizer)

    def spec(shape, dtype, sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def of_weight(path, x):
        is_of_expert = any(getattr(k, "key", None) == "experts" for k in path)
        return spec(x.shape, x.dtype, split if is_of_expert else everywhere)

    with jax.set_mesh(mesh):
        images = spec((batch_size, *image_shape), "float32", split)
        labels = spec((batch_size,), "int32", split)
        key = spec((2,), "uint32", everywhere)
        state = jax.tree.map_with_path(of_weight, jax.eval_shape(initial, images))
        shardings = jax.tree.map(lambda x: x.sharding, state)
        function = jax.jit(step, donate_argnums=0, out_shardings=shardings)
        return function.lower(state, images, labels, key)
