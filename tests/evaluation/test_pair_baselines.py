"""Baselines of retrieval, by hand."""

import numpy as np
import pytest

from keras_moe.evaluation import (
    kernel_ridge_embeddings,
    nearest_caption_embeddings,
    retrieval,
)

pytestmark = pytest.mark.backend_free


def images(*values):
    return np.array(values, "float32").reshape(-1, 1, 1, 1)


def test_words_of_the_nearest_image():
    image_vectors, text_vectors = nearest_caption_embeddings(
        images(0, 10, 20),
        ["Red ball", "red cube", "blue-green ball, blue"],
        images(9, 21),
        ["blue ball", "red cube", "?"],
    )
    similarity = image_vectors @ text_vectors.T
    # The first caption has two of the words ball, blue and green.
    expected = [[0, 1, 0], [2 / np.sqrt(6), 0, 0]]
    np.testing.assert_allclose(similarity, expected, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(text_vectors, axis=1), 1, rtol=1e-6)


def test_it_is_the_baseline_that_retrieval_reads():
    generator = np.random.default_rng(0)
    train = generator.uniform(size=(40, 2, 2, 3))
    captions = [f"thing {number}" for number in range(40)]
    noisy = train[:20] + generator.normal(scale=0.01, size=(20, 2, 2, 3))
    result = retrieval(
        *nearest_caption_embeddings(train, captions, noisy, captions[:20]), ks=(1,)
    )
    assert result.image_to_text.tolist() == result.text_to_image.tolist() == [1.0]


def test_a_regression_on_two_images_by_hand():
    # Each caption is the one run "xy", with spaces, of its two letters: vectors that
    # have no run in common. The median of the distances 0, 0, 4, 4 is 2.
    image_vectors, text_vectors = kernel_ridge_embeddings(
        images(0, 4), ["ab", "cd"], images(1), ["cd", "ab"], width=2, penalty=0.5
    )
    near, far, other = np.exp([-1 / 4, -3 / 4, -1])
    weights = np.linalg.solve([[1.5, other], [other, 1.5]], [near, far])
    np.testing.assert_allclose(
        image_vectors @ text_vectors.T, [weights[::-1]], rtol=1e-5
    )


def test_a_caption_of_unknown_letters_is_a_vector():
    embeddings = kernel_ridge_embeddings(
        images(0, 4), ["ab", "cd"], images(1, 3), ["ab", "wxyz"]
    )
    assert retrieval(*embeddings, ks=(1,)).image_to_text.tolist() == [0.5]


@pytest.mark.parametrize("options", [{"width": 0}, {"penalty": -1.0}])
def test_wrong_settings_of_the_regression(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}="):
        kernel_ridge_embeddings(images(0), ["a"], images(0), ["a"], **options)


@pytest.mark.parametrize(
    "baseline", [nearest_caption_embeddings, kernel_ridge_embeddings]
)
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((images(0), ["a", "b"], images(0), ["a"]), "2 train_captions"),
        ((images(0), ["a"], images(0), []), "captions="),
        ((images(0), [1], images(0), ["a"]), "strings as captions; received: 1"),
        ((images(0), ["a"], np.zeros((1, 2, 1, 1)), ["a"]), "one shape"),
        ((images(0), ["a"], np.zeros((0, 1, 1, 1)), ["a"]), "images.shape"),
        ((np.zeros((1, 2)), ["a"], images(0), ["a"]), "train_images.shape"),
    ],
)
def test_wrong_arguments(baseline, arguments, match):
    with pytest.raises(ValueError, match=match):
        baseline(*arguments)
