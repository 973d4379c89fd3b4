"""Sparsity-constrained transport: balanced plans with few nonzeros per expert or token.

Its solvers are a projection, Newton's method and Adam.

Axes: G groups, S group_size, E experts, C capacity, K selected experts; n the bound
side (experts or tokens), m the other side.
"""

import functools
from typing import Any

import keras
from keras import ops

from keras_moe._checks import check_integer, check_one_of, check_positive
from keras_moe._types import Size, Tensor
from keras_moe.ops._primitives import max_along, min_along, take_along_axis, top_values
from keras_moe.ops.transport import Transport, check_matrix, token_mass, with_marginals

SIDES = ("expert", "token")
SOLVERS = ("newton", "adam")
ITERATIONS = {"newton": 10, "adam": 20}
# Utilities below are forbidden. Far enough that no potential makes up for it.
FORBIDDEN = -1e4
# The curvature of Newton's steps is averaged over this many tokens: E or 2E unknowns
# need no more.
SAMPLE = 1024
# Width of the smoothing in units of the utility's spread: it shrinks from 1 to this in
# the steps on the sample, and by this factor in each of so many steps with all tokens.
SAMPLE_WIDTH = 0.1
FULL_STEPS = 7
FULL_SHRINK = 0.5


def sparse_transport(
    utility: Tensor,
    side: str = "expert",
    max_nonzeros: Size | None = None,
    solver: str = "newton",
    *,
    iterations: int | None = None,
    learning_rate: float = 0.01,
    mask: Tensor | None = None,
) -> Transport:
    """The transport plan of largest utility among those with few nonzeros.

    Maximises `sum(plan * utility) - sum(plan**2) / 2` over plans whose rows sum to 1
    and columns to S / E, with at most C nonzeros in a column (side `"expert"`) or K in
    a row (`"token"`): equation 9 of *Routers in Vision Mixture of Experts*. Its
    semi-dual is minimised over potentials of the other side, and the plan is each
    expert's (token's) projection at the minimum. So the marginals of `side` and the
    bound hold exactly, the other marginals nearly. Entries that are equal go to the
    lowest index.

    `"newton"` smooths the choice of nonzeros and takes Newton steps, most of them on a
    sample of the tokens, while the smoothing shrinks. `"adam"` is the published solver:
    steps of Adam, each with an exact projection, until the gradient's norm is 1e-3.

    Args:
        utility: float32 (G, S, E), about 1 or less in size; -inf forbids a pair.
        side: bound side, `"expert"` or `"token"`.
        max_nonzeros: bound C or K, an int or a scalar integer tensor; None for none.
        solver: `"newton"` or `"adam"`. A JAX model that is exported as a SavedModel
            needs Adam: TensorFlow lacks JAX's linear solver.
        iterations: steps of the solver; None takes 10 of Newton, 20 of Adam.
        learning_rate: learning rate of Adam.
        mask: boolean (G, S), False for tokens (padding) that are not transported.

    Returns: A `Transport`. Gradients flow through the last projection, as if potentials
    and nonzeros were constants.

    Reference: - [Liu et al., 2023](https://arxiv.org/abs/2209.15466)

    Example:

    >>> from keras_moe.ops.sparse_transport import sparse_transport
    >>> utility = np.array([[[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.5, 0.5]]])
    >>> transport = sparse_transport(utility.astype("float32"), max_nonzeros=2)
    >>> np.round(np.array(transport.plan), 2).tolist()  # two tokens per expert
    [[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]]
    """
    utility = ops.convert_to_tensor(utility)
    check_matrix("utility", utility, mask)
    check_one_of("side", side, SIDES)
    check_one_of("solver", solver, SOLVERS)
    check_positive("learning_rate", learning_rate)
    if iterations is None:
        iterations = ITERATIONS[solver]
    check_integer("iterations", iterations)
    if hasattr(max_nonzeros, "dtype"):
        max_nonzeros = ops.cast(max_nonzeros, "int32")
    elif max_nonzeros is not None:
        check_integer("max_nonzeros", max_nonzeros)
    mass = token_mass(utility, mask)
    allowed = (utility > FORBIDDEN) & (ops.expand_dims(mass, -1) > 0)
    share = ops.sum(mass, axis=1)[:, None, None] / utility.shape[-1]
    if side == "expert":
        # The bound side comes first, (G, E, S): sums over either axis are fast.
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
    plan = project(values, allowed, masses[0], max_nonzeros, guess)
    return with_marginals(ops.swapaxes(plan, 1, 2) if side == "expert" else plan)


def potentials(
    values: Tensor,
    mass: Tensor,
    target: Tensor,
    side: str,
    max_nonzeros: Size | None,
    solver: str,
    iterations: int,
    learning_rate: float = 0.01,
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """Minimises the semi-dual."""
    if solver == "adam":
        arguments = (max_nonzeros, iterations, learning_rate)
        return adam(values, mass, target, *arguments), None
    if side == "token":
        return newton_of_tokens(values, mass, max_nonzeros, iterations), None
    return ExpertDual(values, mass, target, max_nonzeros).solve(iterations)


def project(
    values: Tensor,
    allowed: Tensor,
    mass: Tensor,
    max_nonzeros: Size | None,
    guess: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """Projects on plans of the given mass along the last axis, with few nonzeros."""
    # The result is the projection on the simplex of the largest `max_nonzeros` allowed
    # entries. It has the gradient of a projection whose nonzeros are constant. `values`
    # and `allowed` are (G, n, m), `mass` is (G, n or 1, 1). `guess` has guesses of the
    # threshold and of the offset, and the width in which they are right.
    constant = ops.stop_gradient(values)
    threshold, offset, width = guess if guess is not None else (None, None, None)
    kept = allowed
    if max_nonzeros is not None:
        constant = ops.where(allowed, constant, -float("inf"))
        threshold = nonzero_threshold(constant, max_nonzeros, threshold, width)
        kept = _above(constant, threshold, max_nonzeros) & allowed
    offset, active = _offset(constant, kept, mass, offset)
    number = ops.sum(ops.cast(active, "float32"), axis=-1, keepdims=True)
    excess = ops.where(active, values - offset, 0.0)
    over = (ops.sum(excess, axis=-1, keepdims=True) - mass) / ops.maximum(number, 1.0)
    return ops.where(active, ops.relu(excess - over), 0.0)


def nonzero_threshold(
    values: Tensor,
    number: Size,
    guess: Tensor | None = None,
    width: Tensor | None = None,
) -> Tensor:
    """A threshold with at most `number` values of a row above it, fewer for ties."""
    if guess is None and isinstance(number, int) and number <= 4:
        # The largest of the rest, `number` times: a search is slow for many rows.
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
        # The minimum of these: on JAX, slicing costs many times the search.
        return min_along(
            top_values(values, number, stable=False)[0], axis=-1, keepdims=True
        )
    return _bisect(values, number, guess, width)


def _bisect(values, number, guess, width):
    """The threshold by bisection from a guess that is nearly right."""
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
        # In growing steps.
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
    """The values above the threshold, and the first at it that fill up the number."""
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
    """The offset below the kept values at which the rest has the given mass."""
    most = max_along(ops.where(kept, values, -float("inf")), axis=-1, keepdims=True)
    most = ops.where(most > -float("inf"), most, 0.0)
    number = ops.maximum(_count(kept), 1)
    lowest = most - mass
    highest = most - mass / ops.cast(number, "float32")
    if guess is None:
        guess = ops.sum(ops.where(kept, values - most, 0.0), axis=-1, keepdims=True)
        guess = most + (guess - mass) / ops.cast(number, "float32")
    offset = ops.minimum(ops.maximum(guess, lowest), highest)

    # Newton's method, exact once the active values no longer change.
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


def _on_sample(step, state, iterations):
    """The state and the width after the steps on a sample of the tokens."""
    return _steps(step, state, iterations, SAMPLE_WIDTH ** (1 / max(iterations - 1, 1)))


def _on_all(step, state, spread):
    """The state and the width after the steps on all tokens."""
    return _steps(step, (*state, SAMPLE_WIDTH * spread), FULL_STEPS, FULL_SHRINK)


def _steps(step, state, count, shrink):
    """`state = step(*state, width)` so many times, while the width shrinks."""

    def body(i, state):
        *state, width = state
        return *step(*state, width), width * shrink

    # A loop, lest XLA recompute one step in each consumer of the next.
    return ops.fori_loop(0, count, body, state)


# Over potentials a_s, offsets o_e and levels t_e >= 0, with b = S / E,
#     sum_e [b o_e + C t_e + sum_s (relu(U_se + a_s - o_e)^2 / 2 - t_e)_+] - sum_s a_s
# where (.)_+ becomes a softplus of width w. Given the 2E numbers o and t, each token's
# a_s is a problem by itself: a Newton step eliminates it, and the curvature of the rest
# is that of a sample of the tokens.
class ExpertDual:
    """The smoothed dual of values U (G, E, S), mass b (G, 1, 1), target (G, 1, S)."""

    def __init__(self, values, mass, target, max_nonzeros):
        num_experts, num_tokens = ops.shape(values)[1:]
        self.values, self.mass, self.target = values, mass, target
        self.num_experts = num_experts
        real = target > 0
        self.alive = real & ops.any(values > FORBIDDEN, axis=1, keepdims=True)
        self.count = ops.maximum(mass * num_experts, 1.0)
        # A bound below b admits no plan: then solve for b.
        bound = self.count
        if max_nonzeros is not None:
            bound = ops.cast(max_nonzeros, "float32")
        self.bound = ops.minimum(ops.maximum(bound, mass), self.count)
        # The size of a nonzero, roughly. t is in units of it, so that w, t and U
        # compare.
        size = ops.maximum(mass, 1 / num_experts)
        self.size = size / ops.maximum(self.bound, 1 / num_experts)

        token_target = ops.broadcast_to(target, ops.shape(values[:, :1]))
        self.index = _sample_index(token_target > 0, num_tokens, 2)
        self.some = _sampled(values, self.index, 2)
        self.some_target = _sampled(token_target, self.index, 2)
        self.some_alive = _sampled(self.alive & (token_target > 0), self.index, 2)
        self.some_count = ops.maximum(_sum(self.some_target, 2), 1.0)

        known = (self.some > FORBIDDEN) & self.some_alive
        number = ops.maximum(_sum(ops.cast(known, "float32"), 2), 1.0)
        self.center = _sum(ops.where(known, self.some, 0.0), 2) / number
        spread = ops.where(known, ops.square(self.some - self.center), 0.0)
        spread = ops.sqrt(_sum(spread, (1, 2)) / _sum(number, 1))
        self.spread = ops.maximum(spread, 1e-5)

    def solve(self, iterations):
        """The potentials, and guesses for `project`."""
        step = functools.partial(self._step, on_sample=True)
        _, offset, level, _ = _on_sample(step, self._start(), iterations)
        state = self._all_potentials(offset, level), offset, level
        step = functools.partial(self._step, on_sample=False)
        potential, offset, level, width = _on_all(step, state, self.spread)
        threshold = ops.sqrt(2 * self.size * ops.relu(level))
        potential = ops.where(self.alive, potential, 0.0)
        return potential, (offset + threshold, offset, width)

    def _start(self):
        width = self.spread
        potential = self.size - width * (
            ops.logsumexp((self.some - self.center) / width, axis=1, keepdims=True)
            - ops.log(self.bound / ops.where(self.mass > 0, self.mass, 1.0))
        )
        potential = ops.where(self.some_alive, potential, 0.0)
        level = ops.where(self.bound < self.count, 0.5 * self.size, -20.0 * width)
        return potential, self.center, level + ops.zeros_like(self.center), width

    def _all_potentials(self, offset, level):
        """The potentials of all tokens, by bisection to where the sums cross 1."""
        threshold = ops.sqrt(2 * self.size * ops.relu(level))
        top = ops.maximum(threshold, 1.0) + offset - self.values
        bottom = ops.maximum(threshold, 1 / self.num_experts) + offset - self.values
        top = min_along(top, 1, keepdims=True)
        bottom = min_along(bottom, 1, keepdims=True)

        def halve(i, state):
            bottom, top = state
            middle = 0.5 * (bottom + top)
            x = self.values + middle - offset
            x = ops.where(x > threshold, x, 0.0)
            over = ops.sum(ops.relu(x), axis=1, keepdims=True) > 1
            return ops.where(over, bottom, middle), ops.where(over, middle, top)

        bottom, top = ops.fori_loop(0, 10, halve, (bottom, top))
        return ops.where(self.alive, 0.5 * (bottom + top), 0.0)

    def _smooth(self, values, potential, offset, level, width):
        """The plan, the share of each pair, and second derivatives in a and t."""
        x = ops.relu(values + potential - offset)
        chosen = ops.sigmoid((x * x * (0.5 / self.size) - level) / width)
        slope = chosen * (1 - chosen) * (self.size / width)
        # Minus the second derivative in a and t.
        mixed = slope * x / self.size
        curved = ops.where(x > 0, chosen, 0.0) + mixed * x / self.size
        return x * chosen, chosen, curved, mixed, slope

    def _step(self, potential, offset, level, width, on_sample):
        """One Newton step, on the sample's potentials or on those of all tokens."""
        values, target, count = self.values, self.target, self.count
        if on_sample:
            values, target, count = self.some, self.some_target, self.some_count
        plan, chosen, curved, mixed, slope = self._smooth(
            values, potential, offset, level, width
        )
        # Newton's step of a_s alone.
        stiffness = _sum(curved, 1) + 1e-2
        alone = (_sum(plan, 1) - target) / stiffness
        # The gradient in o and t once it is taken, by sums of products: as matmuls,
        # these thin ones are slower.
        offset_gradient = (
            self.mass / self.count - _sum(plan - alone * curved, 2) / count
        )
        level_gradient = _sum(self.size * chosen - alone * mixed, 2) / count
        level_gradient = self.size * self.bound / self.count - level_gradient
        gradient = ops.concatenate([offset_gradient, level_gradient], axis=1)

        some = curved, mixed, slope, stiffness
        if not on_sample:
            some_potential = _sampled(potential, self.index, 2)
            *_, some_curved, some_mixed, some_slope = self._smooth(
                self.some, some_potential, offset, level, width
            )
            some_stiffness = _sampled(stiffness, self.index, 2)
            some = some_curved, some_mixed, some_slope, some_stiffness
        change = -_solve(_curvature(*some) / self.some_count, gradient)
        offset_step = change[:, : self.num_experts]
        level_step = change[:, self.num_experts :]
        # Adding one number to all of a and o changes nothing.
        offset_step = offset_step - ops.mean(offset_step, axis=1, keepdims=True)
        longest = ops.maximum(
            max_along(ops.abs(offset_step), axis=1, keepdims=True),
            max_along(ops.abs(level_step), axis=1, keepdims=True),
        )
        scale = ops.minimum(4 * width / ops.maximum(longest, 1e-30), 1.0)
        offset_step, level_step = scale * offset_step, scale * level_step
        moved = _sum(offset_step * curved + level_step * mixed, 1) / stiffness - alone
        potential = potential + ops.clip(moved / width, -4.0, 4.0) * width
        level = ops.maximum(level + level_step, -20.0 * width)
        return potential, offset + offset_step, level


def _solve(matrices, columns):
    """Solves symmetric positive definite systems."""
    if keras.backend.backend() != "jax":
        # Other backends' Cholesky factors raise an error for NaN.
        return ops.solve(matrices, columns)
    from keras_moe._backends.jax import solve

    return solve(matrices, columns)


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
    values: Tensor, mass: Tensor, max_nonzeros: Size | None, iterations: int
) -> Tensor:
    """Newton's method on the token side's semi-dual, the potentials (G, 1, E)."""
    # The gradient is the exact one. Its derivative counts the tokens about to exchange
    # one expert for another: those whose K-th and next values are a width apart.
    num_tokens, num_experts = ops.shape(values)[1:]
    real = ops.broadcast_to(mass, ops.shape(values[:, :, :1]))
    index = _sample_index(real > 0, num_tokens, 1)
    everyone = values, real
    sample = _sampled(values, index, 1), _sampled(real, index, 1)

    def step(tokens, potential, width):
        values, real = tokens
        allowed = (values > FORBIDDEN) & (real > 0)
        plan = project(values + potential, allowed, real, max_nonzeros)
        count = ops.maximum(_sum(real, 1), 1.0)
        gradient = _sum(plan, 1) / count - _sum(real, 1) / (count * num_experts)
        if tokens is not sample:
            plan = None
        curvature = _curvature_of_tokens(*sample, plan, potential, width, max_nonzeros)
        damping = 1e-2 * ops.sum(curvature * ops.eye(num_experts), axis=2) + 1e-6
        change = -_solve(curvature + _diagonal(damping), ops.swapaxes(gradient, 1, 2))
        change = ops.swapaxes(change, 1, 2)
        change = change - ops.mean(change, axis=2, keepdims=True)
        longest = max_along(ops.abs(change), axis=2, keepdims=True)
        scale = ops.minimum(2 * width / ops.maximum(longest, 1e-30), 1.0)
        return (potential + scale * change,)

    spread = _spread(*sample)
    state = ops.zeros_like(values[:, :1]), spread
    potential, _ = _on_sample(functools.partial(step, sample), state, iterations)
    return _on_all(functools.partial(step, everyone), (potential,), spread)[0]


def _spread(values, real):
    """The standard deviation of the allowed values (G, S, E) of each expert."""
    allowed = (values > FORBIDDEN) & (real > 0)
    known = ops.cast(allowed, "float32")
    center = ops.where(allowed, values, 0.0)
    center = _sum(center, 1) / ops.maximum(_sum(known, 1), 1.0)
    squares = ops.where(allowed, ops.square(values - center), 0.0)
    number = ops.maximum(_sum(known, (1, 2)), 1.0)
    return ops.maximum(ops.sqrt(_sum(squares, (1, 2)) / number), 1e-5)


def _curvature_of_tokens(values, real, plan, potential, width, max_nonzeros):
    """The derivative of the gradient, (G, E, E); `plan` is the sample's, if known."""
    num_experts = ops.shape(values)[2]
    allowed = (values > FORBIDDEN) & (real > 0)
    values = ops.where(allowed, values + potential, -1e9)
    if plan is None:
        plan = project(values, (values > FORBIDDEN) & (real > 0), real, max_nonzeros)
    curvature = _laplacian(ops.cast(plan > 0, "float32"))
    bounded = max_nonzeros is not None
    if isinstance(max_nonzeros, int):
        bounded = max_nonzeros < num_experts
    if bounded:
        last = nonzero_threshold(values, max_nonzeros)
        after = nonzero_threshold(values, max_nonzeros + 1)
        chosen = ops.sigmoid((values - 0.5 * (last + after)) / width)
        slope = chosen * (1 - chosen) / (width * ops.cast(max_nonzeros, "float32"))
        curvature = curvature + _laplacian(slope * real)
    return curvature / ops.maximum(_sum(real, 1), 1.0)


def _laplacian(weights):
    """Sum over tokens of diag(w) - w w^T / sum(w), (G, E, E), of w (G, S, E)."""
    total = ops.maximum(ops.sum(weights, axis=2, keepdims=True), 1e-30)
    outer = ops.matmul(ops.swapaxes(weights / total, 1, 2), weights)
    return _diagonal(ops.sum(weights, axis=1)) - outer


def _sample_index(real, num_tokens, axis):
    """The index of the sample's tokens, or None if all tokens are in it."""
    if isinstance(num_tokens, int) and num_tokens < 2 * SAMPLE:
        return None
    # Multiples of the golden ratio, whose fraction is 40503 / 2**16, fall evenly into
    # an image's columns, unlike strides.
    score = ops.arange(num_tokens, dtype="int32") * 40503 % 65536
    score = ops.cast(score, "float32")
    score = ops.where(ops.squeeze(real, 3 - axis), score, score + 65536.0)
    size = SAMPLE if isinstance(num_tokens, int) else ops.minimum(SAMPLE, num_tokens)
    _, index = top_values(-score, size, stable=False)
    return ops.expand_dims(index, 3 - axis)


def _sampled(values, index, axis):
    return values if index is None else take_along_axis(values, index, axis=axis)


def _sum(values, axis):
    return ops.sum(values, axis=axis, keepdims=True)


def _diagonal(entries):
    return ops.expand_dims(entries, 2) * ops.eye(entries.shape[1])


def adam(
    values: Tensor,
    mass: Tensor,
    target: Tensor,
    max_nonzeros: Size | None,
    iterations: int,
    learning_rate: float,
) -> Tensor:
    """Minimises the semi-dual from zero until its gradient's norm is at most 1e-3."""
    allowed = (values > FORBIDDEN) & (target > 0)
    beta1, beta2 = 0.9, 0.999

    def unfinished(step, potential, mean, square, norm):
        return (step < iterations) & ops.any(norm > 1e-3)

    def update(step, potential, mean, square, norm):
        plan = project(values + potential, allowed, mass, max_nonzeros)
        gradient = ops.sum(plan, axis=1, keepdims=True) - target
        rate: Any = ops.cast(step + 1, "float32")
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
