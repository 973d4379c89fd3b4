"""Sparsity-constrained transport: balanced plans with few nonzeros per expert or token.

Axes: G groups, S group_size, E experts, C capacity, K selected experts.
"""

from typing import Any

from keras import ops

from keras_moe.checks import check_integer, check_positive
from keras_moe.ops.empty import max_along, min_along
from keras_moe.ops.largest import largest
from keras_moe.ops.transport import Transport, token_mass, with_marginals

SIDES = ("expert", "token")
SOLVERS = ("newton", "adam")
ITERATIONS = {"newton": 10, "adam": 20}
# Utilities below are forbidden. Far enough that no potential makes up for it.
FORBIDDEN = -1e4
# Curvature is averaged over this many tokens: E or 2E numbers need no more.
SAMPLE = 1024
# Width of the smoothing in units of the utility's spread: from 1 to this in the steps
# on the sample, and on from there in so many steps with all tokens.
SAMPLE_WIDTH = 0.1
FULL_STEPS = 7
FULL_SHRINK = 0.5


def sparse_transport(
    utility: Any,
    side: str = "expert",
    max_nonzeros: Any = None,
    solver: str = "newton",
    iterations: int | None = None,
    learning_rate: float = 0.01,
    mask: Any = None,
) -> Transport:
    """The transport plan of largest utility among those with few nonzeros.

    Maximises `sum(plan * utility) - sum(plan**2) / 2` over plans whose rows sum to 1
    and columns to S / E, with at most C nonzeros in a column (side `"expert"`) or K
    in a row (`"token"`): equation 9 of *Routers in Vision Mixture of Experts*. As
    there, its semi-dual is minimised over potentials of the other side, and the
    plan is each expert's (token's) projection at the potentials found. So the
    marginals of `side` and the bound hold exactly, the other marginals nearly.
    Entries that are equal go to the lowest index.

    Two solvers minimise the semi-dual:

    - `"newton"` smooths the choice of nonzeros and takes Newton steps while the
      smoothing shrinks. Few steps suffice, for the smooth problem has few unknowns
      (one or two per expert); most run on a sample of the tokens.
    - `"adam"` is the published one: steps of Adam from zero, each of which needs an
      exact projection, until a gradient's norm is at most 1e-3.

    Args:
        utility: float32 (G, S, E), such as the softmax of a router's logits; about
            1 or less in size. A pair of utility -inf is forbidden: its plan is 0.
        side: who is bound, `"expert"` or `"token"`.
        max_nonzeros: C or K, an integer or a scalar integer tensor; None does
            not bound the nonzeros.
        solver: `"newton"` or `"adam"`. A JAX model that is exported as a SavedModel
            needs Adam: TensorFlow lacks JAX's linear solver.
        iterations: steps of the solver; None takes 10 of Newton, 20 of Adam.
        learning_rate: Adam's.
        mask: boolean (G, S), False for tokens (padding) that are not transported;
            None transports every token. Columns sum to a share of the others.

    Returns:
        A `Transport`. Gradients flow through the last projection, as if potentials
        and nonzeros were constants.

    Raises:
        ValueError: if an argument is out of range, or shapes do not fit.

    Reference:
        - [Liu et al., 2023](https://arxiv.org/abs/2209.15466)

    Example:

    >>> import numpy as np
    >>> from keras_moe.ops.sparse_transport import sparse_transport
    >>> utility = np.array([[[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.5, 0.5]]])
    >>> transport = sparse_transport(utility.astype("float32"), max_nonzeros=2)
    >>> np.round(np.array(transport.plan), 2).tolist()  # two tokens per expert
    [[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]]
    """
    utility = ops.convert_to_tensor(utility)
    max_nonzeros, iterations = _check(
        utility, side, max_nonzeros, solver, iterations, learning_rate, mask
    )
    mass = token_mass(utility, mask)
    allowed = (utility > FORBIDDEN) & (ops.expand_dims(mass, -1) > 0)
    share = ops.sum(mass, axis=1)[:, None, None] / utility.shape[-1]
    if side == "expert":
        # Whoever is bound comes first, (G, E, S): sums over either axis are fast.
        utility, allowed = (ops.swapaxes(x, 1, 2) for x in (utility, allowed))
        masses = share, ops.expand_dims(mass, 1)
    else:
        masses = ops.expand_dims(mass, -1), share
    values = ops.where(allowed, utility, FORBIDDEN)
    constant = ops.stop_gradient(values)
    potential, guess = potentials(
        constant, *masses, side, max_nonzeros, solver, iterations, learning_rate
    )
    values = values + ops.stop_gradient(potential)
    plan = _project(values, allowed, masses[0], max_nonzeros, guess)
    return with_marginals(ops.swapaxes(plan, 1, 2) if side == "expert" else plan)


def potentials(
    values, mass, target, side, max_nonzeros, solver, iterations, learning_rate=0.01
):
    """The potentials found, and where to look for the thresholds of the projection.

    `values` (G, n, m) with whoever is bound first, `mass` (G, n or 1, 1) their mass,
    `target` (G, 1, m or 1) that of the others; returns potentials (G, 1, m) and
    None or (threshold, offset, width), which broadcast to (G, n, 1).
    """
    if solver == "adam":
        return _adam(
            values, mass, target, max_nonzeros, iterations, learning_rate
        ), None
    if side == "token":
        return _newton_of_tokens(values, mass, target, max_nonzeros, iterations), None
    return _newton_of_experts(values, mass, target, max_nonzeros, iterations)


def semi_dual(potential, values, allowed, mass, target, max_nonzeros):
    """The objective that solvers minimise, (G,); a bound on the best plan's worth.

    As in `potentials`; `allowed` marks pairs that are not forbidden.
    """
    values = values + potential
    plan = _project(values, allowed, mass, max_nonzeros)
    worth = ops.sum(plan * (values - 0.5 * plan), axis=(1, 2))
    return worth - ops.sum(target * potential, axis=(1, 2))


# Solvers


def _adam(values, mass, target, max_nonzeros, iterations, learning_rate):
    allowed = (values > FORBIDDEN) & (target > 0)
    beta1, beta2 = 0.9, 0.999

    def unfinished(step, potential, mean, square, norm):
        return (step < iterations) & ops.any(norm > 1e-3)

    def update(step, potential, mean, square, norm):
        plan = _project(values + potential, allowed, mass, max_nonzeros)
        gradient = ops.sum(plan, axis=1, keepdims=True) - target
        rate = ops.cast(step + 1, "float32")
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * ops.square(gradient)
        change = (mean / (1 - beta1**rate)) / (
            ops.sqrt(square / (1 - beta2**rate)) + 1e-8
        )
        potential = ops.where(
            norm > 1e-3, potential - learning_rate * change, potential
        )
        latest = ops.sqrt(ops.sum(ops.square(gradient), axis=(1, 2), keepdims=True))
        return step + 1, potential, mean, square, ops.where(norm > 1e-3, latest, norm)

    zeros = ops.zeros_like(values[:, :1])
    norm = ops.full_like(zeros[:, :, :1], float("inf"))
    return ops.while_loop(unfinished, update, (0, zeros, zeros, zeros, norm))[1]


def _newton_of_experts(values, mass, target, max_nonzeros, iterations):
    """Newton's method on the joint dual of the expert side, smoothed.

    Over a_s (potentials), o_e (offsets) and t_e >= 0, the dual minimises

        sum_e [b o_e + C t_e + sum_s (relu(U_se + a_s - o_e)^2 / 2 - t_e)_+] - sum_s a_s

    where b = S / E; (.)_+ becomes a softplus of width w. Given the 2E numbers o and
    t, each token's a_s is a problem of its own: a Newton step eliminates it, and a
    sample of the tokens tells the curvature of what remains.
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

    target_of_each = ops.broadcast_to(target, ops.shape(values[:, :1]))
    places = _sample_places(target_of_each > 0, num_tokens, 2)
    some = _sampled(values, places, 2)
    some_target = _sampled(target_of_each, places, 2)
    some_alive = _sampled(alive & (target_of_each > 0), places, 2)
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
        mixed = slope * x / size  # minus the second derivative in a and t
        curved = ops.where(x > 0, chosen, 0.0) + mixed * x / size
        return x * chosen, chosen, curved, mixed, slope

    def step(values, target, count, sampled, potential, offset, level, width):
        plan, chosen, curved, mixed, slope = smooth(
            values, potential, offset, level, width
        )
        # Newton's step of a_s alone ...
        stiffness = ops.sum(curved, axis=1, keepdims=True) + 1e-2
        alone = (ops.sum(plan, axis=1, keepdims=True) - target) / stiffness
        # ... and the gradient in o and t once it is taken.
        # (Sums of products: as matmuls, these thin ones are slower.)
        all_mass = ops.maximum(mass * num_experts, 1.0)
        of_offset = mass / all_mass - _sum(plan - alone * curved, 2) / count
        of_level = size * chosen - alone * mixed
        of_level = size * bound / all_mass - _sum(of_level, 2) / count
        gradient = ops.concatenate([of_offset, of_level], axis=1)

        if sampled is not None:
            _, _, some_curved, some_mixed, slope = smooth(
                some, _sampled(potential, places, 2), offset, level, width
            )
            some_stiffness = _sampled(stiffness, places, 2)
        else:
            some_curved, some_mixed, some_stiffness = curved, mixed, stiffness
        curvature = _curvature(some_curved, some_mixed, slope, some_stiffness)
        change = -ops.solve(curvature / some_count, gradient)
        of_offset, of_level = change[:, :num_experts], change[:, num_experts:]
        # Adding one number to all of a and o changes nothing.
        of_offset = of_offset - ops.mean(of_offset, axis=1, keepdims=True)
        longest = ops.maximum(
            max_along(ops.abs(of_offset), axis=1, keepdims=True),
            max_along(ops.abs(of_level), axis=1, keepdims=True),
        )
        scale = ops.minimum(4 * width / ops.maximum(longest, 1e-30), 1.0)
        of_offset, of_level = scale * of_offset, scale * of_level
        moved = _sum(of_offset * curved + of_level * mixed, 1)
        moved = moved / stiffness - alone
        potential = potential + ops.clip(moved / width, -4.0, 4.0) * width
        level = ops.maximum(level + of_level, -20.0 * width)
        return potential, offset + of_offset, level

    def sample_step(i, state):
        potential, offset, level, width = state
        state = step(
            some, some_target, some_count, None, potential, offset, level, width
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

    # All tokens: where the sums cross 1 by bisection, then a few steps.
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
        state = step(values, target, count, True, potential, offset, level, width)
        return *state, width * FULL_SHRINK

    # A loop, lest XLA recompute one step in each consumer of the next.
    state = potential, offset, level, SAMPLE_WIDTH * spread
    potential, offset, level, width = ops.fori_loop(0, FULL_STEPS, full_step, state)
    threshold = ops.sqrt(2 * size * ops.relu(level))
    return ops.where(alive, potential, 0.0), (offset + threshold, offset, width)


def _newton_of_tokens(values, mass, target, max_nonzeros, iterations):
    """Newton's method on the token side's semi-dual in E potentials.

    The gradient is the exact one. Its derivative counts the tokens about to exchange
    one expert for another: those whose K-th and next values are a width apart.
    """
    num_tokens, num_experts = ops.shape(values)[1:]
    real = ops.broadcast_to(mass, ops.shape(values[:, :, :1]))
    places = _sample_places(real > 0, num_tokens, 1)
    sample = _sampled(values, places, 1), _sampled(real, places, 1)
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
        plan = _project(values + potential, allowed, real, max_nonzeros)
        count = ops.maximum(_sum(real, 1), 1.0)
        gradient = _sum(plan, 1) / count - _sum(real, 1) / (count * num_experts)

        values, real = sample
        values = ops.where((values > FORBIDDEN) & (real > 0), values + potential, -1e9)
        plan = plan if tokens is sample else _project(
            values, (values > FORBIDDEN) & (real > 0), real, max_nonzeros
        )  # fmt: skip
        curvature = _laplacian(ops.cast(plan > 0, "float32"))
        if bounded:
            last = _threshold(values, max_nonzeros)
            after = _threshold(values, max_nonzeros + 1)
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


def _sample_places(real, num_tokens, axis):
    """Where the sample's tokens are, or None if it is all of them.

    `real` is (G, 1, S) or (G, S, 1), as the axis of the tokens says. Images lie in rows
    and columns, so a stride might see one column alone: multiples of the golden ratio
    fall evenly into every one. Padding comes last.
    """
    if isinstance(num_tokens, int) and num_tokens < 2 * SAMPLE:
        return None
    # 40503 / 2**16 is the golden ratio's fraction.
    score = ops.arange(num_tokens, dtype="int32") * 40503 % 65536
    score = ops.cast(score, "float32")
    score = ops.where(ops.squeeze(real, 3 - axis), score, score + 65536.0)
    size = SAMPLE if isinstance(num_tokens, int) else ops.minimum(SAMPLE, num_tokens)
    _, places = largest(-score, size, stable=False)
    return ops.expand_dims(places, 3 - axis)


def _sampled(values, places, axis):
    """The sample's part of values whose axis is that of the tokens."""
    if places is None:
        return values
    return ops.take_along_axis(values, places, axis=axis)


def _sum(values, axis):
    return ops.sum(values, axis=axis, keepdims=True)


def _curvature(curved, mixed, slope, stiffness):
    """The second derivatives in o and t, (G, 2E, 2E), with each a_s eliminated."""
    diagonal = _diagonal(ops.sum(curved, axis=2))
    off = _diagonal(ops.sum(mixed, axis=2))
    of_level = ops.sum(slope, axis=2)
    whole = ops.concatenate(
        [
            ops.concatenate([diagonal, off], axis=2),
            ops.concatenate([off, _diagonal(of_level)], axis=2),
        ],
        axis=1,
    )
    rows = ops.concatenate([curved, mixed], axis=1)
    whole = whole - ops.matmul(rows / stiffness, ops.swapaxes(rows, 1, 2))
    damping = ops.concatenate([ops.sum(curved, axis=2), of_level], axis=1)
    return whole + _diagonal(1e-2 * damping + 1e-6)


def _diagonal(entries):
    return ops.expand_dims(entries, 2) * ops.eye(entries.shape[1])


# The projection


def _project(values, allowed, mass, max_nonzeros, guess=None):
    """Projects on plans of the given mass along the last axis, with few nonzeros.

    The projection on the simplex of the largest `max_nonzeros` allowed entries. Has
    the gradient of a projection whose nonzeros are given.
    """
    constant = ops.stop_gradient(values)
    threshold, offset, width = guess if guess is not None else (None, None, None)
    kept = allowed
    if max_nonzeros is not None:
        constant = ops.where(allowed, constant, -float("inf"))
        threshold = _threshold(constant, max_nonzeros, threshold, width)
        kept = _above(constant, threshold, max_nonzeros) & allowed
    offset, active = _offset(constant, kept, mass, offset)
    number = ops.sum(ops.cast(active, "float32"), axis=-1, keepdims=True)
    excess = ops.where(active, values - offset, 0.0)
    over = (ops.sum(excess, axis=-1, keepdims=True) - mass) / ops.maximum(number, 1.0)
    return ops.where(active, ops.relu(excess - over), 0.0)


def _threshold(values, number, guess=None, width=None):
    """A number such that at most `number` values of a row are above it.

    And exactly so many, or with equal values there to fill up.
    """
    if guess is None and isinstance(number, int) and number <= 4:
        # So many rounds of the largest of the rest; a search is slow for many rows.
        threshold = max_along(values, axis=-1, keepdims=True)
        for _ in range(number - 1):
            below = values < threshold
            rest = ops.where(below, values, -float("inf"))
            rest = max_along(rest, axis=-1, keepdims=True)
            threshold = ops.where(_count(~below) < number, rest, threshold)
        return threshold
    if guess is None:
        size = values.shape[-1]
        if isinstance(number, int) and size is not None:
            number = min(number, size)
        else:
            number = ops.minimum(number, ops.shape(values)[-1])
        # Their minimum: on JAX, slicing costs many times the search.
        return min_along(
            largest(values, number, stable=False)[0], axis=-1, keepdims=True
        )

    # Bisection from the guess, in growing steps: the guess is nearly right.
    finite = ops.where(values > -float("inf"), values, float("inf"))
    low = min_along(finite, axis=-1, keepdims=True) - 1.0
    high = max_along(values, axis=-1, keepdims=True)
    empty = high < low
    low, high = ops.where(empty, 0.0, low), ops.where(empty, 0.0, high)
    all_fit = _count(values > low) <= number
    high = ops.where(all_fit, low, high)

    def unfinished(low, high, middle, above, stride):
        return ops.any((above != number) & (low < middle) & (middle < high))

    def halve(low, high, middle, above, stride):
        count = _count(values > middle)
        fits = count <= number
        low, high = ops.where(fits, low, middle), ops.where(fits, middle, high)
        above = ops.where(fits, count, above)
        half = low + 0.5 * (high - low)
        middle = ops.minimum(ops.maximum(half, middle - stride), middle + stride)
        return low, high, middle, above, 8 * stride

    middle = ops.minimum(ops.maximum(guess + ops.zeros_like(low), low), high)
    middle = ops.where((low < middle) & (middle < high), middle, 0.5 * (low + high))
    state = low, high, middle, _count(values > high), width
    return ops.while_loop(unfinished, halve, state)[1]


def _above(values, threshold, number):
    """Which values are above the threshold, or at it and the first to fill up."""
    above = values > threshold
    equal = values == threshold
    missing = number - _count(above)
    index = ops.arange(ops.shape(values)[-1], dtype="int32")
    size = ops.shape(values)[-1]

    def unfinished(low, high):
        return ops.any(high - low > 1)

    def halve(low, high):
        middle = (low + high) // 2
        enough = _count(equal & (index < middle)) >= missing
        return ops.where(enough, low, middle), ops.where(enough, middle, high)

    # Ties are rare: without any that must be split, there is nothing to loop over.
    split = (missing > 0) & (_count(equal) > missing)
    low = ops.zeros_like(missing)
    _, high = ops.while_loop(unfinished, halve, (low, ops.where(split, size, low)))
    all_equal = (missing > 0) & ~split
    return above | (equal & (all_equal | (index < high)))


def _offset(values, kept, mass, guess=None):
    """What to take off the kept values so that what remains has the given mass."""
    most = max_along(ops.where(kept, values, -float("inf")), axis=-1, keepdims=True)
    most = ops.where(most > -float("inf"), most, 0.0)
    number = ops.maximum(_count(kept), 1)
    lowest = most - mass
    highest = most - mass / ops.cast(number, "float32")
    if guess is None:
        guess = ops.sum(ops.where(kept, values - most, 0.0), axis=-1, keepdims=True)
        guess = most + (guess - mass) / ops.cast(number, "float32")
    offset = ops.minimum(ops.maximum(guess, lowest), highest)

    # Newton's method, exact once it stops to change who is active.
    def unfinished(step, offset, number, before):
        return ops.any(number != before) & (step < 50)

    def improve(step, offset, number, before):
        active = kept & (values > offset)
        before, number = number, _count(active)
        over = ops.sum(ops.where(active, values - offset, 0.0), axis=-1, keepdims=True)
        over = (over - mass) / ops.maximum(ops.cast(number, "float32"), 1.0)
        return step + 1, offset + over, number, before

    number = number + ops.zeros_like(number)
    _, offset, _, _ = ops.while_loop(
        unfinished, improve, (0, offset, number, ops.zeros_like(number) - 1)
    )
    return offset, kept & (values > offset)


def _count(chosen):
    return ops.sum(ops.cast(chosen, "int32"), axis=-1, keepdims=True)


def _check(utility, side, max_nonzeros, solver, iterations, learning_rate, mask):
    shape = tuple(utility.shape)
    if len(shape) != 3:
        raise ValueError(
            "Expected a utility of shape (groups, tokens, experts); "
            f"received: utility.shape={shape}"
        )
    for name, value, known in (("side", side, SIDES), ("solver", solver, SOLVERS)):
        if value not in known:
            raise ValueError(
                f"Expected {name} to be one of {known}; received: {name}={value!r}"
            )
    if max_nonzeros is not None and not hasattr(max_nonzeros, "dtype"):
        max_nonzeros = check_integer("max_nonzeros", max_nonzeros)
    elif max_nonzeros is not None:
        max_nonzeros = ops.cast(max_nonzeros, "int32")
    if iterations is None:
        iterations = ITERATIONS[solver]
    iterations = check_integer("iterations", iterations)
    check_positive("learning_rate", learning_rate)
    if mask is not None and tuple(mask.shape) != shape[:2]:
        raise ValueError(
            f"Expected a mask of shape (groups, tokens)={shape[:2]}; "
            f"received: mask.shape={tuple(mask.shape)}"
        )
    return max_nonzeros, iterations
