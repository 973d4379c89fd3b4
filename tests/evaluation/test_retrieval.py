"""Retrieval and contrastive accuracy against brute force."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.evaluation import contrastive_accuracy, retrieval


def pairs(images, texts, dim, seed, distinct=5):
    """Embeddings with many ties, of lengths that do not matter, and owners."""
    rng = np.random.default_rng(seed)
    images = rng.integers(1, distinct, size=(images, dim))
    texts = rng.integers(1, distinct, size=(texts, dim)) * 3.0
    extra = rng.integers(len(images), size=len(texts) - len(images))
    owner = rng.permutation(np.concatenate([np.arange(len(images)), extra]))
    return images.astype("float32"), texts.astype("float32"), owner


def brute_force(images, texts, is_own_text, is_own_image):
    """Ranks by a stable sort of the products of integers, which Python has exactly."""
    images, texts = (
        np.array(np.rint(2**26 * x / np.linalg.norm(x, axis=1)[:, None]), "int64")
        for x in (images.astype("float64"), texts.astype("float64"))
    )
    products = images.astype(object) @ texts.astype(object).T

    def ranks(rows, is_own):
        result = []
        for i, row in enumerate(rows):
            order = sorted(range(len(row)), key=lambda j: (-row[j], j))
            result.append(1 + next(r for r, j in enumerate(order) if is_own(i, j)))
        return result

    return (ranks(products, is_own_text), ranks(products.T, is_own_image))


@settings(max_examples=60, deadline=None)
@given(
    images=st.integers(2, 9), more=st.integers(0, 9), dim=st.integers(1, 4),
    kinds=st.none() | st.integers(1, 6), chunk_size=st.integers(1, 8),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_ranks_are_those_of_a_stable_sort(images, more, dim, kinds, chunk_size, seed):
    """Equal texts, of some kinds, belong to all their images."""
    x, y, owner = pairs(images, images + more, dim, seed)
    ids, text_ids = np.arange(len(owner)), None
    if kinds is not None:
        text_ids = np.random.default_rng(seed).integers(kinds, size=len(owner)) * 7 - 3
        _, first, ids = np.unique(text_ids, return_index=True, return_inverse=True)
        y = y[first[ids]]
    result = retrieval(x, y, owner, (1, 2), chunk_size=chunk_size, text_ids=text_ids)
    mine = [{*ids[owner == i].tolist()} for i in range(images)]
    image_ranks, text_ranks = brute_force(
        x, y, lambda i, j: ids[j] in mine[i], lambda j, i: ids[j] in mine[i]
    )
    assert result.image_ranks.tolist() == image_ranks
    assert result.text_ranks.tolist() == text_ranks
    assert result.image_to_text[1] == np.mean(np.array(image_ranks) <= 2)
    assert result.text_to_image[0] == np.mean(np.array(text_ranks) <= 1)


def test_chunks_change_nothing_at_float32(monkeypatch):
    rng = np.random.default_rng(0)
    texts = rng.normal(size=(130, 64)).astype("float32")
    # Images that several texts have exactly in common, in the memory order of columns.
    images = np.asfortranarray(np.repeat(texts[:30], 2, axis=0))
    owner = np.arange(130) % 60
    whole = retrieval(images, texts, owner)
    for chunk_size in (1, 7, 64):
        parts = retrieval(images, texts, owner, chunk_size=chunk_size)
        for name in ("image_ranks", "text_ranks"):
            np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    cosines = (texts / np.linalg.norm(texts, axis=1, keepdims=True)).astype("float64")
    order = np.argsort(-(cosines @ cosines[:30].T), axis=1, kind="stable")
    ranks = [1 + list(row).index(own // 2) for row, own in zip(order, owner)]
    # The first of two equal images is nearer.
    np.testing.assert_array_equal((whole.text_ranks + 1 - owner % 2) / 2, ranks)


def test_contrastive_accuracy_by_batch_and_ids():
    images = np.eye(5)
    # In batches of two: texts 0, 1 are swapped, text 2 is right, text 3 has image 2's.
    texts = np.eye(5)[[1, 0, 2, 2, 4]]
    result = contrastive_accuracy(images, texts, contrastive_batch_size=2)
    # Image 3 is equally far from both texts, and takes the first; text 3 image 2.
    assert result == (0.25, 0.25, 2, 4)
    assert result.figures()["accuracy"] == result.accuracy == 0.25
    ids = contrastive_accuracy(images, texts, 2, image_ids=[7, 7, -1, 3, 3])
    assert ids[:2] == (0.75, 0.75)
    ids = contrastive_accuracy(images, texts, 2, text_ids=[0, 1, 5, 5, 2])
    assert ids[:2] == (0.5, 0.5)
    ids = contrastive_accuracy(images, texts, 2, [7, 7, 2, 3, 3], [0, 1, 5, 5, 2])
    assert ids.accuracy == 1.0
