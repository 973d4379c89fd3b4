"""The words of captions' tokens, and their tags, such as parts of speech.

Axes: B captions, N tokens, U groups of tokens (tags).
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

# Words with their apostrophes and hyphens, and single marks.
_WORDS = re.compile(r"\w+(?:['\u2019-]\w+)*|[^\w\s]")
# What stands for a space in the pieces of SentencePiece.
_SPACE = "\u2581"
SPECIAL, PADDING, UNKNOWN = "special", "padding", "unknown"


class TokenTags(NamedTuple):
    """The tag of each token of captions, as `expert_usage` takes groups.

    Attributes:
        groups: integers (B, N), the place of each token's tag in `group_names`.
        group_names: the U tags that occur, sorted, and behind them those of `"special"`
            (start and end), `"padding"` and `"unknown"` that do.
    """

    groups: np.ndarray
    group_names: list[str]


def tag_tokens(
    tokenizer: Any, captions: Sequence[str], tag: Callable[[list[str]], Sequence[Any]]
) -> TokenTags:
    """Gives each token of captions the tag of its word, such as its part of speech.

    A word may have several tokens, which all have its tag; a token that covers several
    words has the first one's. Tokens whose text is not that of the caption, such as
    parts of a character, are of `"unknown"`, and so are those behind them.

    Args:
        tokenizer: `keras_moe.models.TextTokenizer`, the model's `preprocessor`.
        captions: B strings.
        tag: function from the words of one caption, with punctuation marks as words of
            their own, to a tag for each. With NLTK's part-of-speech tagger: `lambda
            words: [tag for _, tag in nltk.pos_tag(words, tagset="universal")]`.

    Returns:
        `TokenTags`, for `keras_moe.analysis.expert_usage(..., modality="text",
        **tags._asdict())`.

    Raises:
        ValueError: if a caption is no string, or its tags are not as many as its words.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, appendix G.1 and Figure 40.

    Example:

    >>> from keras_moe.analysis import tag_tokens
    >>> from keras_moe.models import TextTokenizer
    >>> tokenizer = TextTokenizer.trained(["a cat", "two cats"], 518, max_length=6)
    >>> kinds = {"a": "DET", "cat": "NOUN"}
    >>> tags = tag_tokens(tokenizer, ["a cat"], lambda words: [kinds[w] for w in words])
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
    # Names that a tagger has, too, are one group.
    found, last = {name for row in rows for name in row}, (SPECIAL, PADDING, UNKNOWN)
    names = [*sorted(found.difference(last)), *(name for name in last if name in found)]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [[numbers[name] for name in row] for row in rows]
    return TokenTags(np.array(groups, "int32"), names)


def _tags(caption, pieces, tag):
    """The tag of each piece of a caption."""
    words = _WORDS.findall(caption)
    tags = [str(name) for name in tag(words)]
    if len(tags) != len(words):
        raise ValueError(
            f"Expected a tag for each of the words {words}; received: {tags}"
        )
    # Taggers see words as they are written, and tokenizers may lower them.
    letters = [(c, name) for word, name in zip(words, tags) for c in word.lower()]
    result, place = [], 0
    for piece in pieces:
        text = "".join(piece.replace(_SPACE, " ").lower().split())
        covered = letters[place : place + max(len(text), 1)]
        if not covered or (text and text != "".join(c for c, _ in covered)):
            break
        result.append(covered[0][1])
        place += len(text)
    return result + [UNKNOWN] * (len(pieces) - len(result))
