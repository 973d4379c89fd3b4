"""The loss of language models. Axes: B batch, N tokens, D hidden, V vocabulary."""

import functools

from keras import ops

from keras_moe._processes import batch_devices
from keras_moe._types import Tensor
from keras_moe.ops._primitives import custom_gradient


def token_log_likelihoods(
    tokens: Tensor, kernel: Tensor, targets: Tensor, chunk_size: int | None = None
) -> Tensor:
    """Log-likelihoods of target ids, without logits for the whole sequence.

    The logits of `chunk_size` positions exist at a time; the gradient recomputes them.

    Args:
        tokens: (B, N, D).
        kernel: (D, V), from tokens to logits.
        targets: integers (B, N); negative ones are ignored.
        chunk_size: positions per chunk; None for those of about 512 tokens on each
            device, and at least 128.

    Returns: float32 (B, N), 0 for ignored targets.

    Example:

    >>> from keras_moe.losses import token_log_likelihoods
    >>> tokens, kernel = np.ones((1, 2, 1), "float32"), np.zeros((1, 4), "float32")
    >>> values = token_log_likelihoods(tokens, kernel, np.array([[3, -1]]))
    >>> [round(float(value), 3) for value in values[0]]  # the logarithm of 1 / 4
    [-1.386, 0.0]
    """
    tokens, targets = ops.convert_to_tensor(tokens), ops.cast(targets, "int32")
    kernel = ops.cast(kernel, tokens.dtype)
    length = tokens.shape[1]
    if chunk_size is None:
        chunk_size = _chunk_size(tokens.shape[0], length)
    # TensorFlow may not know the length while it traces.
    if length is None or length <= chunk_size:
        return logit_log_likelihoods(ops.matmul(tokens, kernel), targets)
    padding = -length % chunk_size
    tokens = ops.pad(tokens, [[0, 0], [0, padding], [0, 0]])
    targets = ops.pad(targets, [[0, 0], [0, padding]], constant_values=-1)
    # Ids as floats, since JAX's gradients have no place for integers.
    targets = ops.cast(targets, "float32")
    values = custom_gradient(
        functools.partial(_forward, chunk_size=chunk_size),
        functools.partial(_backward, chunk_size=chunk_size),
        tokens,
        kernel,
        targets,
    )
    return values[:, :length]


def _chunk_size(batch, length):
    """Chunks of one size, of about 512 tokens on each device."""
    # With fewer, reading the kernel and its gradient takes most of the time.
    size = max(128, 512 // max(1, batch // batch_devices())) if batch else 128
    if not length:
        return size
    # Equal parts of the text, in multiples of 8, so that little is padded.
    longest = -(-length // -(-length // size))
    return longest + -longest % 8


def _forward(tokens, kernel, targets, chunk_size):
    """The log-likelihoods, chunk by chunk in a loop; autodiff would keep all logits."""
    chunks = (_chunks(tokens, chunk_size), _chunks(targets, chunk_size))

    def add_chunk(i, values):
        x, ids = (ops.take(chunk, i, axis=0) for chunk in chunks)
        return _write(values, i, logit_log_likelihoods(ops.matmul(x, kernel), ids))

    values = ops.zeros_like(chunks[1])
    values = ops.fori_loop(0, values.shape[0], add_chunk, values)
    return _joined(values), (tokens, kernel, targets)


def _backward(residuals, upstream, chunk_size):
    """With the logits z = x W, the gradient in z is (one_hot(target) - softmax(z))."""
    tokens, kernel, targets = residuals
    vocabulary_size = kernel.shape[1]
    chunks = tuple(_chunks(x, chunk_size) for x in (tokens, targets, upstream))

    def add_chunk(i, gradients):
        changes, total = gradients
        x, ids, upstream = (ops.take(chunk, i, axis=0) for chunk in chunks)
        logits = ops.cast(ops.matmul(x, kernel), "float32")
        ids = ops.cast(ids, "int32")
        own = ops.cast(ids[..., None] == ops.arange(vocabulary_size), "float32")
        weights = ops.where(ids >= 0, upstream, 0.0)
        change = weights[..., None] * (own - ops.softmax(logits, axis=-1))
        change = ops.cast(change, x.dtype)
        changes = _write(changes, i, ops.matmul(change, ops.transpose(kernel)))
        own_total = ops.einsum("bnd,bnv->dv", x, change)
        return changes, total + ops.cast(own_total, "float32")

    gradients = ops.zeros_like(chunks[0]), ops.zeros(kernel.shape, "float32")
    number = chunks[0].shape[0]
    changes, total = ops.fori_loop(0, number, add_chunk, gradients)
    return _joined(changes), ops.cast(total, kernel.dtype), None


def _write(chunks, i, chunk):
    begin = (i, *([0] * len(chunk.shape)))
    return ops.slice_update(chunks, begin, ops.expand_dims(chunk, 0))


def _chunks(x, size):
    """(B, N, ...) as (N / size, B, size, ...)."""
    batch, length, *rest = ops.shape(x)
    return ops.moveaxis(ops.reshape(x, (batch, length // size, size, *rest)), 1, 0)


def _joined(chunks):
    """Inverts `_chunks`."""
    number, _, size, *rest = chunks.shape
    x = ops.moveaxis(chunks, 0, 1)
    return ops.reshape(x, (ops.shape(x)[0], number * size, *rest))


def logit_log_likelihoods(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-likelihoods (B, N) of target ids under logits (B, N, V); 0 below id 0."""
    logits, targets = ops.cast(logits, "float32"), ops.cast(targets, "int32")
    known = ops.expand_dims(ops.maximum(targets, 0), -1)
    own = ops.squeeze(ops.take_along_axis(logits, known, axis=-1), -1)
    values = own - ops.logsumexp(logits, axis=-1)
    return ops.where(targets >= 0, values, 0.0)


def next_tokens(token_ids: Tensor, documents: Tensor) -> Tensor:
    """The target of each position: the next id of its document, or -1 at its end.

    Args:
        token_ids: integers (B, N).
        documents: integers or booleans (B, N), the number of each token's document; 0
            is padding.

    Returns: int32 (B, N).

    Example:

    >>> from keras_moe.losses import next_tokens
    >>> targets = next_tokens(np.array([[5, 6, 7, 0]]), np.array([[1, 1, 2, 0]]))
    >>> np.array(targets).tolist()
    [[6, -1, -1, -1]]
    """
    documents = ops.cast(documents, "int32")
    following = ops.cast(token_ids, "int32")[:, 1:]
    same = ops.logical_and(documents[:, 1:] == documents[:, :-1], documents[:, 1:] != 0)
    targets = ops.where(same, following, -1)
    return ops.pad(targets, [[0, 0], [0, 1]], constant_values=-1)
