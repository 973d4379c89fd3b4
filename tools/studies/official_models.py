"""V-MoE and Soft MoE as google-research/vmoe trains them, in plain JAX.

Written from the papers' equations, with that code's initial values, epsilons, capacity,
auxiliary losses and optimizer, in float32. Tokens are dispatched by dense one-hot
tensors. Weights are a dict, by the paths that this library gives them.

Axes: B batch, N tokens, G groups, S group_size, E experts, C capacity or slots, K
selected experts, D hidden, H mlp.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

EPSILON = 1e-6
# Of the importance and of the load loss.
AUXILIARY_WEIGHT = 0.005

# A weight or its gradient by path; noise on the logits (G, S, E) by block.
Weights = dict[str, Any]
Noise = dict[int, Any]


class Settings(NamedTuple):
    """Sizes of a model, named as arguments of this library's.

    Without `num_selected_experts` it is a Soft MoE with `num_slots` slots per expert.
    """

    image_shape: tuple[int, int, int]
    patch_size: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    num_classes: int
    moe_layers: tuple[int, ...]
    num_experts: int
    num_selected_experts: int | None = None
    num_slots: int | None = None
    examples_per_group: int = 8
    capacity_factor: float = 1.05
    capacity_multiple_of: int = 4
    noise_std: float = 1.0
    class_token: bool = True
    query_key_norm: bool = False

    @property
    def num_tokens(self) -> int:
        height, width, _ = self.image_shape
        patches = (height // self.patch_size) * (width // self.patch_size)
        return patches + self.class_token

    @property
    def noise_deviation(self) -> float:
        return self.noise_std / self.num_experts

    def noise_shape(self, batch_size: int) -> tuple[int, int, int]:
        size = self.examples_per_group * self.num_tokens
        return batch_size // self.examples_per_group, size, self.num_experts


class Optimizer(NamedTuple):
    """Adam with clipped gradients, and decoupled weight decay of kernels."""

    weight_decay: float
    clipping: float = 1.0
    beta_1: float = 0.9
    beta_2: float = 0.999


def initial_weights(own: Settings, seed: int) -> Weights:
    """Random weights, drawn as the official code draws them."""
    make = jax.nn.initializers
    lecun, glorot = make.lecun_normal(), make.glorot_uniform()
    zeros, ones, small = make.zeros, make.ones, make.normal(1e-6)
    dim, width = own.hidden_dim, own.mlp_dim
    heads, head_dim = own.num_heads, own.hidden_dim // own.num_heads
    made = {}

    def add(path, initializer, *shape, tile=None):
        """A weight; `tile` experts start alike, since they share their random key."""
        key = jax.random.fold_in(jax.random.key(seed), len(made))
        value = initializer(key, shape)
        made[path] = value if tile is None else jnp.stack([value] * tile)

    def add_norm(path, size, bias=True):
        add(f"{path}/gamma", ones, size)
        if bias:
            add(f"{path}/beta", zeros, size)

    def add_mlp(path, between, tile=None):
        add(f"{path}/hidden{between}kernel", glorot, dim, width, tile=tile)
        add(f"{path}/hidden{between}bias", small, width, tile=tile)
        add(f"{path}/output{between}kernel", glorot, width, dim, tile=tile)
        add(f"{path}/output{between}bias", small, dim, tile=tile)

    size = own.patch_size
    add("patch_embedding/kernel", lecun, size, size, own.image_shape[-1], dim)
    add("patch_embedding/bias", zeros, dim)
    if own.class_token:
        add("class_token/token", zeros, 1, 1, dim)
    add("position_embedding/embedding", make.normal(0.02), 1, own.num_tokens, dim)
    for index in range(own.num_layers):
        block = f"block_{index}"
        add_norm(f"{block}/mixer_norm", dim)
        for name in ("query", "key", "value"):
            path = f"{block}/attention/{name}"
            add(f"{path}/kernel", glorot, dim, dim)
            made[f"{path}/kernel"] = made[f"{path}/kernel"].reshape(
                dim, heads, head_dim
            )
            add(f"{path}/bias", zeros, heads, head_dim)
            if own.query_key_norm and name != "value":
                add_norm(f"{path}_norm", head_dim, bias=False)
        path = f"{block}/attention/attention_output"
        add(f"{path}/kernel", glorot, dim, dim)
        made[f"{path}/kernel"] = made[f"{path}/kernel"].reshape(heads, head_dim, dim)
        add(f"{path}/bias", zeros, dim)
        add_norm(f"{block}/feed_forward_norm", dim)
        if index not in own.moe_layers:
            add_mlp(f"{block}/mlp", "/")
            continue
        add_mlp(f"{block}/moe/experts", "_", tile=own.num_experts)
        router = f"{block}/moe/router"
        if own.num_selected_experts is None:
            add(f"{router}/slots", lecun, dim, own.num_experts, own.num_slots)
            add(f"{router}/scale", ones)
        else:
            add(f"{router}/kernel", lecun, dim, own.num_experts)
    add_norm("final_norm", dim)
    add("predictions/kernel", zeros, dim, own.num_classes)
    add("predictions/bias", zeros, own.num_classes)
    return made


def noises(own: Settings, batch_size: int, seed: int) -> Iterator[Noise | None]:
    """The routers' noise of each step."""
    shape, key = own.noise_shape(batch_size), jax.random.key(seed)
    while True:
        if own.num_selected_experts is None or not own.noise_std:
            yield None
            continue
        key, *keys = jax.random.split(key, 1 + len(own.moe_layers))
        yield {
            index: own.noise_deviation * jax.random.normal(own_key, shape)
            for index, own_key in zip(own.moe_layers, keys)
        }


def forward(
    weights: Weights, images: Any, own: Settings, noise: Noise | None = None
) -> tuple[Any, Any]:
    """Logits (B, classes), and the auxiliary loss of all blocks."""
    step = (own.patch_size, own.patch_size)
    x = jax.lax.conv_general_dilated(
        images,
        weights["patch_embedding/kernel"],
        step,
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x = (x + weights["patch_embedding/bias"]).reshape(len(images), -1, own.hidden_dim)
    if own.class_token:
        token = jnp.tile(weights["class_token/token"], (len(x), 1, 1))
        x = jnp.concatenate([token, x], axis=1)
    x = x + weights["position_embedding/embedding"]
    auxiliary = 0.0
    for index in range(own.num_layers):
        prefix = f"block_{index}/"
        w = {
            path.removeprefix(prefix): weight
            for path, weight in weights.items()
            if path.startswith(prefix)
        }
        x = x + attention(w, norm(w, "mixer_norm", x))
        y = norm(w, "feed_forward_norm", x)
        if index not in own.moe_layers:
            y = mlp(y, *(w[f"mlp/{name}"] for name in _MLP))
        elif own.num_selected_experts is None:
            y = soft_moe(w, y)
        else:
            y, loss = token_choice(w, y, own, None if noise is None else noise[index])
            auxiliary = auxiliary + loss
        x = x + y
    x = norm(weights, "final_norm", x)
    x = x[:, 0] if own.class_token else jnp.mean(x, axis=1)
    return x @ weights["predictions/kernel"] + weights["predictions/bias"], auxiliary


_MLP = ("hidden/kernel", "hidden/bias", "output/kernel", "output/bias")


def norm(w: Weights, path: str, x: Any) -> Any:
    """Layer normalisation; the variance is E[x^2] - E[x]^2, as in Flax."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(x * x, axis=-1, keepdims=True) - mean * mean
    x = (x - mean) * jax.lax.rsqrt(variance + EPSILON) * w[f"{path}/gamma"]
    return x + w.get(f"{path}/beta", 0.0)


def attention(w: Weights, x: Any) -> Any:
    """Multi-head self-attention; queries and keys are normalised if they have norms."""

    def projected(name):
        path = f"attention/{name}"
        y = jnp.einsum("bnd,dhk->bnhk", x, w[f"{path}/kernel"]) + w[f"{path}/bias"]
        return norm(w, f"{path}_norm", y) if f"{path}_norm/gamma" in w else y

    query, key, value = map(projected, ("query", "key", "value"))
    query = query / math.sqrt(query.shape[-1])
    attended = jax.nn.softmax(jnp.einsum("bnhk,bmhk->bhnm", query, key))
    x = jnp.einsum("bhnm,bmhk->bnhk", attended, value)
    path = "attention/attention_output"
    return jnp.einsum("bnhk,hkd->bnd", x, w[f"{path}/kernel"]) + w[f"{path}/bias"]


def mlp(x: Any, kernel: Any, bias: Any, output_kernel: Any, output_bias: Any) -> Any:
    """A layer of GELUs (the tanh form) and a linear one."""
    return jax.nn.gelu(x @ kernel + bias) @ output_kernel + output_bias


def experts(w: Weights, slots: Any) -> Any:
    """Each expert's MLP of its slots (G, E, C, D)."""
    own = (w[f"moe/experts/{name.replace('/', '_')}"] for name in _MLP)
    return jax.vmap(mlp, (1, 0, 0, 0, 0), 1)(slots, *own)


def token_choice(
    w: Weights, x: Any, own: Settings, noise: Any = None
) -> tuple[Any, Any]:
    """*Scaling Vision with Sparse Mixture of Experts*, section 2 and appendix A.

    Tokens choose by noisy gates, which are not normalised over their K experts, and
    come first by position, all first choices before the second.
    """
    size = own.examples_per_group * x.shape[1]
    tokens = x.reshape(-1, size, x.shape[-1])
    num_experts, selected = own.num_experts, own.num_selected_experts
    logits = tokens @ w["moe/router/kernel"]
    loss = importance_loss(jax.nn.softmax(logits))
    noisy = logits
    if noise is not None:
        noisy = logits + noise
        # The load is defined by the noise.
        loss = loss + load_loss(logits, noisy, own.noise_deviation, selected)
    gates = jax.nn.softmax(noisy)
    capacity = math.ceil(size * selected * own.capacity_factor / num_experts)
    capacity += -capacity % own.capacity_multiple_of
    _, chosen = jax.lax.top_k(gates, selected)
    chosen = jax.nn.one_hot(chosen, num_experts, dtype="int32")
    # (G, K S, E): the number of each choice among those of its expert.
    ordered = chosen.swapaxes(1, 2).reshape(len(tokens), -1, num_experts)
    places = jnp.cumsum(ordered, axis=1) * ordered - 1
    places = places.reshape(len(tokens), selected, size, num_experts)
    # No slot is at -1, nor behind the capacity: these choices are all zeros.
    dispatch = jax.nn.one_hot(jnp.max(places, axis=1), capacity)
    slots = jnp.einsum("gsec,gsd->gecd", dispatch, tokens)
    combine = gates[..., None] * dispatch
    y = jnp.einsum("gsec,gecd->gsd", combine, experts(w, slots))
    return y.reshape(x.shape), AUXILIARY_WEIGHT * jnp.mean(loss)


def importance_loss(gates: Any) -> Any:
    """Of each group: how unequal the experts' summed gates are."""
    return squared_variation(jnp.sum(gates, axis=1))


def load_loss(logits: Any, noisy: Any, deviation: float, selected: int) -> Any:
    """Of each group: how unequal the experts' expected loads are."""
    threshold = jax.lax.top_k(noisy, selected)[0][..., -1:]
    load = 1 - jax.scipy.stats.norm.cdf((threshold - logits) / deviation)
    return squared_variation(jnp.mean(load, axis=1))


def squared_variation(x: Any) -> Any:
    """The squared coefficient of variation over the last axis."""
    return jnp.var(x, axis=-1) / jnp.mean(x, axis=-1) ** 2


def soft_moe(w: Weights, x: Any) -> Any:
    """*From Sparse to Soft Mixtures of Experts*, algorithms 1 and 2."""

    def unit(x, axis):
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis, keepdims=True) + EPSILON)

    slots = w["moe/router/scale"] * unit(w["moe/router/slots"], 0)
    logits = jnp.einsum("bnd,dec->bnec", unit(x, -1), slots)
    dispatch, combine = jax.nn.softmax(logits, 1), jax.nn.softmax(logits, (2, 3))
    slots = jnp.einsum("bnec,bnd->becd", dispatch, x)
    return jnp.einsum("bnec,becd->bnd", combine, experts(w, slots))


def loss(
    weights: Weights,
    images: Any,
    labels: Any,
    own: Settings,
    noise: Noise | None = None,
) -> Any:
    """Mean cross-entropy of labels (B, classes), and the auxiliary loss."""
    logits, auxiliary = forward(weights, images, own, noise)
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits), -1)) + auxiliary


def updated(
    state: tuple, gradients: Weights, rate: Any, epsilon: Any, own: Optimizer
) -> tuple:
    """(weights, means, squares, step) after a step, as optax's chain computes it."""
    weights, means, squares, step = state
    total = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients.values()))
    scale = jnp.minimum(1.0, own.clipping / total)
    step = step + 1
    new = ({}, {}, {})
    for path, weight in weights.items():
        gradient = scale * gradients[path]
        mean = own.beta_1 * means[path] + (1 - own.beta_1) * gradient
        square = own.beta_2 * squares[path] + (1 - own.beta_2) * gradient**2
        root = jnp.sqrt(square / (1 - own.beta_2**step))
        change = mean / (1 - own.beta_1**step) / (root + epsilon)
        if path.endswith("kernel"):
            change = change + own.weight_decay * weight
        for values, value in zip(new, (weight - rate * change, mean, square)):
            values[path] = value
    return (*new, step)


def keras_epsilons(epsilon: float, steps: int, own: Optimizer) -> np.ndarray:
    """What optax's epsilon would be in each step of Keras's Adam.

    Keras adds epsilon to the root of the second moment before that is corrected, so
    that it weighs 30 times as much in the first step, and as much at the end.
    """
    return epsilon / np.sqrt(1 - own.beta_2 ** np.arange(1, steps + 1))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _step(own, optimizer, state, images, labels, rate, epsilon, noise):
    value, gradients = jax.value_and_grad(loss)(state[0], images, labels, own, noise)
    return updated(state, gradients, rate, epsilon, optimizer), value


def train(
    own: Settings,
    optimizer: Optimizer,
    rates: Iterable[float],
    epsilons: Iterable[float],
    weights: Weights,
    batches: Iterable[tuple[Any, Any]],
    every_noise: Iterable[Noise | None],
) -> tuple[Weights, np.ndarray]:
    """The weights after as many steps as there are rates, and the loss of each."""
    weights = {path: jnp.array(value) for path, value in weights.items()}
    zeros = [{k: jnp.zeros_like(v) for k, v in weights.items()} for _ in range(2)]
    state, losses = (weights, *zeros, jnp.zeros((), "int32")), []
    # The rates come first: they end before the others do.
    for rate, epsilon, batch, noise in zip(rates, epsilons, batches, every_noise):
        arrays = map(np.asarray, (*batch, np.float32(rate), np.float32(epsilon)))
        state, value = _step(own, optimizer, state, *arrays, noise)
        losses.append(value)
    return state[0], np.asarray(losses)
