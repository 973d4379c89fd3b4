"""Views, flows and tags of tokens. Axes: B batch, N tokens, E and F experts, U tags."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_moe._checks import unfit
from keras_moe.analysis.routing import entropy, of_patches
from keras_moe.ops import Routing

# Words, with apostrophes and hyphens, and single punctuation marks.
_WORDS = re.compile(r"\w+(?:['\u2019-]\w+)*|[^\w\s]")
# SentencePiece's space.
_SPACE = "\u2581"
SPECIAL, PADDING, UNKNOWN = "special", "padding", "unknown"


class ExpertView(NamedTuple):
    """The patches of one expert.

    Attributes:
        position_shares: (rows, columns), fraction of images whose patch at that
            position went to this expert.
        images: indices of the images that use the expert most.
        patches: boolean (len(images), rows, columns), its patches in these images.
    """

    position_shares: np.ndarray
    images: np.ndarray
    patches: np.ndarray


def expert_views(
    routing: Routing, grid: tuple[int, int], images_per_expert: int = 8
) -> list[ExpertView]:
    """Finds the positions and images in which each expert works, one view per expert.

    Images are ranked by the sum of the expert's combine weights over their patches.

    Args:
        routing: `Routing` (B, N, E) of N patches, plus one for a class token in front.
        grid: number of patches down and across.
        images_per_expert: number of images to select per expert.

    Example:

    >>> from keras_moe.analysis import expert_views
    >>> from keras_moe.ops import Routing
    >>> weights = np.array([[[0.9, 0.0], [0.0, 0.6]], [[0.0, 0.7], [0.0, 0.8]]])
    >>> routing = Routing(*[weights] * 4, dispatched=weights > 0, combined=weights)
    >>> view = expert_views(routing, grid=(1, 2), images_per_expert=1)[1]
    >>> view.images.tolist(), view.position_shares.tolist()
    ([1], [[0.5, 1.0]])
    """
    dispatched = of_patches(routing.dispatched, grid) > 0
    weight = of_patches(routing.combined, grid).sum(axis=1)
    views = []
    for expert in range(weight.shape[-1]):
        order = np.argsort(-weight[:, expert], kind="stable")[:images_per_expert]
        patches = dispatched[..., expert].reshape(-1, *grid)
        views.append(ExpertView(patches.mean(axis=0), order, patches[order]))
    return views


class FlowStatistics(NamedTuple):
    """How the experts of one layer relate to those of the next."""

    # Mutual information of a token's experts in both layers, over the entropy of the
    # second: 1 if the first determines the second.
    information: float
    # Probability that two tokens of one expert share an expert in the next layer.
    kept_company: float
    # The same probability for any two tokens.
    company_by_chance: float


def main_experts(routing: Routing) -> np.ndarray:
    """Returns each token's expert of largest combine weight (B, N); E if unserved."""
    served = np.asarray(routing.dispatched) > 0
    # A served token may have weight 0.
    weights = np.where(served, np.asarray(routing.combined), -np.inf)
    return np.where(served.any(axis=-1), weights.argmax(axis=-1), served.shape[-1])


def token_flows(
    source: Routing, target: Routing, mask: ArrayLike | None = None
) -> np.ndarray:
    """Counts the tokens that move from each expert to each expert of another layer.

    In each layer a token counts for the expert with the largest combine weight.

    Args:
        source: `Routing` of arrays (B, N, E) of one layer.
        target: `Routing` of arrays (B, N, F) of a later layer, for the same tokens.
        mask: boolean (B, N), False for tokens to ignore.

    Returns: integers (E + 1, F + 1), unserved tokens in the last row and column.

    Reference: *LIMoE*, Figures 30 and 31.

    Example:

    >>> from keras_moe.analysis import token_flows
    >>> from keras_moe.ops import Routing
    >>> one = Routing(*[np.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]])] * 6)
    >>> two = Routing(*[np.array([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])] * 6)
    >>> token_flows(one, two).tolist()
    [[1, 1, 0], [0, 0, 0], [0, 1, 0]]
    """
    sources, targets = main_experts(source), main_experts(target)
    if sources.shape != targets.shape:
        shapes = f"shapes {sources.shape} and {targets.shape} without experts"
        raise unfit("records of the same tokens", shapes)
    rows = np.asarray(source.dispatched).shape[-1] + 1
    columns = np.asarray(target.dispatched).shape[-1] + 1
    pairs = sources * columns + targets
    pairs = pairs.ravel() if mask is None else pairs[np.asarray(mask, bool)]
    return np.bincount(pairs, minlength=rows * columns).reshape(rows, columns)


def flow_statistics(flows: ArrayLike) -> FlowStatistics:
    """Measures `token_flows` (E + 1, F + 1); zeros if there are fewer than two."""
    flows = np.asarray(flows, "float64")
    sources, targets = flows.sum(axis=1), flows.sum(axis=0)
    total = max(flows.sum(), 1.0)
    # I(source; target) / H(target), with H(target | source) = H(both) - H(source).
    unknown = entropy(targets / total)
    left = entropy(flows.ravel() / total) - entropy(sources / total)
    information = (unknown - left) / unknown if unknown > 1e-12 else 0.0
    return FlowStatistics(
        float(np.clip(information, 0.0, 1.0)),
        _pairs(flows) / (_pairs(sources) or 1.0),
        _pairs(targets) / (_pairs(flows.sum()) or 1.0),
    )


def _pairs(counts):
    return float(np.sum(counts * (counts - 1)))


class TokenTags(NamedTuple):
    """A tag for each caption token, as groups for `expert_usage`.

    Attributes:
        groups: integers (B, N), indices into `group_names`.
        group_names: the U tags that occur, sorted, then those of `"special"` (start and
            end), `"padding"` and `"unknown"` that occur.
    """

    groups: np.ndarray
    group_names: list[str]


def tag_tokens(
    tokenizer: Any,
    captions: Sequence[str],
    tag: Callable[[list[str]], Sequence[object]],
) -> TokenTags:
    """Gives each caption token the tag of its word, such as its part of speech.

    A token that spans several words gets the first word's tag. Tokens whose text
    differs from the caption, and those after them, are `"unknown"`.

    Args:
        tokenizer: `keras_moe.models.TextTokenizer`, the model's `preprocessor`.
        captions: B strings.
        tag: function from a caption's words and punctuation to their tags, such as
            `lambda words: [tag for _, tag in nltk.pos_tag(words, tagset="universal")]`.

    Returns: `TokenTags`, for `expert_usage(..., modality="text", **tags._asdict())`.

    Reference: *Multimodal Contrastive Learning with LIMoE*, appendix G.1 and Figure 40.

    Example:

    >>> from keras_moe.analysis import tag_tokens
    >>> from keras_moe.models import TextTokenizer
    >>> tokenizer = TextTokenizer.trained(["a cat", "two cats"], 518, max_length=6)
    >>> speech = {"a": "DET", "cat": "NOUN"}
    >>> tags = tag_tokens(tokenizer, ["a cat"], lambda ws: [speech[w] for w in ws])
    >>> tags.group_names
    ['DET', 'NOUN', 'special', 'padding']
    >>> tags.groups[0][:2].tolist()  # the start, and "a"
    [2, 0]
    """
    captions = [captions] if isinstance(captions, str) else captions
    texts = tokenizer(captions)
    ids, mask = (np.asarray(texts[name]) for name in ("token_ids", "padding_mask"))
    special = {tokenizer.start_id, tokenizer.end_id} - {None}
    rows = []
    for caption, row, pieces, counts in zip(captions, ids, tokenizer.tokens(ids), mask):
        is_text = counts & ~np.isin(row, [*special])
        own = iter(_tags(caption, [x for x, kept in zip(pieces, is_text) if kept], tag))
        rows.append(
            [
                next(own) if has_text else SPECIAL if kept else PADDING
                for has_text, kept in zip(is_text, counts)
            ]
        )
    # If the tagger uses one of these names, too, both are one group.
    found, last = {name for row in rows for name in row}, (SPECIAL, PADDING, UNKNOWN)
    names = [*sorted(found.difference(last)), *(name for name in last if name in found)]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [[numbers[name] for name in row] for row in rows]
    return TokenTags(np.array(groups, "int32"), names)


def _tags(caption, pieces, tag):
    """The tag of each piece of a caption."""
    words = _WORDS.findall(caption)
    tags = [str(name) for name in tag(words)]
    # Taggers get the caption's case, but tokenizers may lower it.
    tagged = zip(words, tags, strict=True)
    letters = [(c, name) for word, name in tagged for c in word.lower()]
    result, start = [], 0
    for piece in pieces:
        text = "".join(piece.replace(_SPACE, " ").lower().split())
        covered = letters[start : start + max(len(text), 1)]
        if not covered or (text and text != "".join(c for c, _ in covered)):
            break
        result.append(covered[0][1])
        start += len(text)
    return result + [UNKNOWN] * (len(pieces) - len(result))
