"""Newton's method for sparsity-constrained transport, smoothed.

Axes: G groups, S group_size, E experts, C capacity, K selected experts.
"""

from typing import Any

from keras import ops

from keras_moe.ops.empty import max_along, min_along
from keras_moe.ops.sparse_projection import FORBIDDEN, nonzero_threshold, project
from keras_moe.ops.token_sample import sample_places, sampled

# Width of the smoothing in units of the utility's spread: it shrinks from 1 to this in
# the steps on the sample, and by this factor in each of so many steps with all tokens.
SAMPLE_WIDTH = 0.1
FULL_STEPS = 7
FULL_SHRINK = 0.5


def newton_of_experts(
    values: Any, mass: Any, target: Any, max_nonzeros: Any, iterations: int
) -> tuple[Any, tuple]:
    """Newton's method on the joint dual of the expert side, smoothed.

    Over a_s (potentials), o_e (offsets) and t_e >= 0, the dual minimises

        sum_e [b o_e + C t_e + sum_s (relu(U_se + a_s - o_e)^2 / 2 - t_e)_+] - sum_s a_s

    where b = S / E; (.)_+ becomes a softplus of width w. Given the 2E numbers o and
    t, each token's a_s is a problem by itself: a Newton step eliminates it, and the
    curvature of the rest is that of a sample of the tokens.
    """
    num_experts, num_tokens = ops.shape(values)[1:]
    real = target > 0
    alive = real & ops.any(values > FORBIDDEN, axis=1, keepdims=True)
    count = ops.maximum(mass * num_experts, 1.0)
    # A bound below b admits no plan: then solve for b.
    bound = count if max_nonzeros is None else ops.cast(max_nonzeros, "float32")
    bound = ops.minimum(ops.maximum(bound, mass), count)
    # The size of a nonzero, roughly. t is in units of it, so that w, t and U compare.
    size = ops.maximum(mass, 1 / num_experts) / ops.maximum(bound, 1 / num_experts)

    token_target = ops.broadcast_to(target, ops.shape(values[:, :1]))
    places = sample_places(token_target > 0, num_tokens, 2)
    some = sampled(values, places, 2)
    some_target = sampled(token_target, places, 2)
    some_alive = sampled(alive & (token_target > 0), places, 2)
    some_count = ops.maximum(ops.sum(some_target, axis=2, keepdims=True), 1.0)

    known = (some > FORBIDDEN) & some_alive
    number = ops.maximum(ops.sum(ops.cast(known, "float32"), 2, keepdims=True), 1.0)
    center = ops.sum(ops.where(known, some, 0.0), axis=2, keepdims=True) / number
    spread = ops.where(known, ops.square(some - center), 0.0)
    spread = ops.sum(spread, axis=(1, 2), keepdims=True)
    spread = ops.sqrt(spread / ops.sum(number, axis=1, keepdims=True))
    spread = ops.maximum(spread, 1e-5)

    def smooth(values, potential, offset, level, width):
        x = ops.relu(values + potential - offset)
        chosen = ops.sigmoid((x * x * (0.5 / size) - level) / width)
        slope = chosen * (1 - chosen) * (size / width)
        # Minus the second derivative in a and t.
        mixed = slope * x / size
        curved = ops.where(x > 0, chosen, 0.0) + mixed * x / size
        return x * chosen, chosen, curved, mixed, slope

    def step(values, target, count, on_sample, potential, offset, level, width):
        plan, chosen, curved, mixed, slope = smooth(
            values, potential, offset, level, width
        )
        # Newton's step of a_s alone.
        stiffness = ops.sum(curved, axis=1, keepdims=True) + 1e-2
        alone = (ops.sum(plan, axis=1, keepdims=True) - target) / stiffness
        # The gradient in o and t once it is taken, by sums of products: as matmuls,
        # these thin ones are slower.
        all_mass = ops.maximum(mass * num_experts, 1.0)
        offset_gradient = mass / all_mass - _sum(plan - alone * curved, 2) / count
        level_gradient = _sum(size * chosen - alone * mixed, 2) / count
        level_gradient = size * bound / all_mass - level_gradient
        gradient = ops.concatenate([offset_gradient, level_gradient], axis=1)

        if not on_sample:
            _, _, some_curved, some_mixed, slope = smooth(
                some, sampled(potential, places, 2), offset, level, width
            )
            some_stiffness = sampled(stiffness, places, 2)
        else:
            some_curved, some_mixed, some_stiffness = curved, mixed, stiffness
        curvature = _curvature(some_curved, some_mixed, slope, some_stiffness)
        change = -ops.solve(curvature / some_count, gradient)
        offset_step, level_step = change[:, :num_experts], change[:, num_experts:]
        # Adding one number to all of a and o changes nothing.
        offset_step = offset_step - ops.mean(offset_step, axis=1, keepdims=True)
        longest = ops.maximum(
            max_along(ops.abs(offset_step), axis=1, keepdims=True),
            max_along(ops.abs(level_step), axis=1, keepdims=True),
        )
        scale = ops.minimum(4 * width / ops.maximum(longest, 1e-30), 1.0)
        offset_step, level_step = scale * offset_step, scale * level_step
        moved = _sum(offset_step * curved + level_step * mixed, 1)
        moved = moved / stiffness - alone
        potential = potential + ops.clip(moved / width, -4.0, 4.0) * width
        level = ops.maximum(level + level_step, -20.0 * width)
        return potential, offset + offset_step, level

    def sample_step(i, state):
        potential, offset, level, width = state
        state = step(
            some, some_target, some_count, True, potential, offset, level, width
        )
        return *state, width * shrink

    shrink = SAMPLE_WIDTH ** (1 / max(iterations - 1, 1))
    width = spread
    potential = size - width * (
        ops.logsumexp((some - center) / width, axis=1, keepdims=True)
        - ops.log(bound / ops.where(mass > 0, mass, 1.0))
    )
    potential = ops.where(some_alive, potential, 0.0)
    level = ops.where(bound < count, 0.5 * size, -20.0 * width)
    level = level + ops.zeros_like(center)
    state = ops.fori_loop(0, iterations, sample_step, (potential, center, level, width))
    _, offset, level, _ = state

    # With all tokens, bisection to where the sums cross 1, and then a few steps.
    threshold = ops.sqrt(2 * size * ops.relu(level))
    top = ops.maximum(threshold, 1.0) + offset - values
    bottom = ops.maximum(threshold, 1 / num_experts) + offset - values
    top, bottom = min_along(top, 1, keepdims=True), min_along(bottom, 1, keepdims=True)

    def halve(i, state):
        bottom, top = state
        middle = 0.5 * (bottom + top)
        x = values + middle - offset
        x = ops.where(x > threshold, x, 0.0)
        over = ops.sum(ops.relu(x), axis=1, keepdims=True) > 1
        return ops.where(over, bottom, middle), ops.where(over, middle, top)

    bottom, top = ops.fori_loop(0, 10, halve, (bottom, top))
    potential = ops.where(alive, 0.5 * (bottom + top), 0.0)

    def full_step(i, state):
        potential, offset, level, width = state
        state = step(values, target, count, False, potential, offset, level, width)
        return *state, width * FULL_SHRINK

    # A loop, lest XLA recompute one step in each consumer of the next.
    state = potential, offset, level, SAMPLE_WIDTH * spread
    potential, offset, level, width = ops.fori_loop(0, FULL_STEPS, full_step, state)
    threshold = ops.sqrt(2 * size * ops.relu(level))
    return ops.where(alive, potential, 0.0), (offset + threshold, offset, width)


def _curvature(curved, mixed, slope, stiffness):
    """The second derivatives in o and t, (G, 2E, 2E), with each a_s eliminated."""
    diagonal = _diagonal(ops.sum(curved, axis=2))
    off = _diagonal(ops.sum(mixed, axis=2))
    slopes = ops.sum(slope, axis=2)
    whole = ops.concatenate(
        [
            ops.concatenate([diagonal, off], axis=2),
            ops.concatenate([off, _diagonal(slopes)], axis=2),
        ],
        axis=1,
    )
    rows = ops.concatenate([curved, mixed], axis=1)
    whole = whole - ops.matmul(rows / stiffness, ops.swapaxes(rows, 1, 2))
    damping = ops.concatenate([ops.sum(curved, axis=2), slopes], axis=1)
    return whole + _diagonal(1e-2 * damping + 1e-6)


def newton_of_tokens(
    values: Any, mass: Any, target: Any, max_nonzeros: Any, iterations: int
) -> Any:
    """Newton's method on the token side's semi-dual in E potentials.

    The gradient is the exact one. Its derivative counts the tokens about to exchange
    one expert for another: those whose K-th and next values are a width apart.
    """
    num_tokens, num_experts = ops.shape(values)[1:]
    real = ops.broadcast_to(mass, ops.shape(values[:, :, :1]))
    places = sample_places(real > 0, num_tokens, 1)
    sample = sampled(values, places, 1), sampled(real, places, 1)
    allowed = (sample[0] > FORBIDDEN) & (sample[1] > 0)
    bounded = max_nonzeros is not None
    if isinstance(max_nonzeros, int):
        bounded = max_nonzeros < num_experts

    number = ops.maximum(_sum(ops.cast(allowed, "float32"), (1, 2)), 1.0)
    center = ops.where(allowed, sample[0], 0.0)
    center = _sum(center, 1) / ops.maximum(_sum(ops.cast(allowed, "float32"), 1), 1.0)
    spread = ops.where(allowed, ops.square(sample[0] - center), 0.0)
    spread = ops.maximum(ops.sqrt(_sum(spread, (1, 2)) / number), 1e-5)

    def step(tokens, potential, width):
        values, real = tokens
        allowed = (values > FORBIDDEN) & (real > 0)
        plan = project(values + potential, allowed, real, max_nonzeros)
        count = ops.maximum(_sum(real, 1), 1.0)
        gradient = _sum(plan, 1) / count - _sum(real, 1) / (count * num_experts)

        values, real = sample
        values = ops.where((values > FORBIDDEN) & (real > 0), values + potential, -1e9)
        plan = plan if tokens is sample else project(
            values, (values > FORBIDDEN) & (real > 0), real, max_nonzeros
        )  # fmt: skip
        curvature = _laplacian(ops.cast(plan > 0, "float32"))
        if bounded:
            last = nonzero_threshold(values, max_nonzeros)
            after = nonzero_threshold(values, max_nonzeros + 1)
            chosen = ops.sigmoid((values - 0.5 * (last + after)) / width)
            slope = chosen * (1 - chosen) / (width * ops.cast(max_nonzeros, "float32"))
            curvature = curvature + _laplacian(slope * real)
        curvature = curvature / ops.maximum(_sum(real, 1), 1.0)
        damping = 1e-2 * ops.sum(curvature * ops.eye(num_experts), axis=2) + 1e-6
        change = -ops.solve(
            curvature + _diagonal(damping), ops.swapaxes(gradient, 1, 2)
        )
        change = ops.swapaxes(change, 1, 2)
        change = change - ops.mean(change, axis=2, keepdims=True)
        longest = max_along(ops.abs(change), axis=2, keepdims=True)
        scale = ops.minimum(2 * width / ops.maximum(longest, 1e-30), 1.0)
        return potential + scale * change

    def sample_step(i, state):
        potential, width = state
        return step(sample, potential, width), width * shrink

    shrink = SAMPLE_WIDTH ** (1 / max(iterations - 1, 1))
    potential, _ = ops.fori_loop(
        0, iterations, sample_step, (ops.zeros_like(values[:, :1]), spread)
    )

    def full_step(i, state):
        potential, width = state
        return step((values, real), potential, width), width * FULL_SHRINK

    state = potential, SAMPLE_WIDTH * spread
    return ops.fori_loop(0, FULL_STEPS, full_step, state)[0]


def _laplacian(weights):
    """Sum over tokens of diag(w) - w w^T / sum(w), (G, E, E), of w (G, S, E)."""
    total = ops.maximum(ops.sum(weights, axis=2, keepdims=True), 1e-30)
    outer = ops.matmul(ops.swapaxes(weights / total, 1, 2), weights)
    return _diagonal(ops.sum(weights, axis=1)) - outer


def _sum(values, axis):
    return ops.sum(values, axis=axis, keepdims=True)


def _diagonal(entries):
    return ops.expand_dims(entries, 2) * ops.eye(entries.shape[1])
