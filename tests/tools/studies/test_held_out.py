"""The baselines of held-out pictures, by hand."""

import numpy as np

from keras_moe.evaluation import retrieval
from tools.studies.held_out import kernel_ridge_embeddings, nearest_caption_embeddings


def pixels(*values):
    return np.array(values, "float32").reshape(-1, 1, 1, 1)


def test_words_of_the_nearest_image():
    image_vectors, text_vectors = nearest_caption_embeddings(
        pixels(0, 10, 20),
        ["Red ball", "red cube", "blue-green ball, blue"],
        pixels(9, 21),
        ["blue ball", "red cube", "?"],
    )
    similarity = image_vectors @ text_vectors.T
    # The first caption has two of the words ball, blue and green.
    expected = [[0, 1, 0], [2 / np.sqrt(6), 0, 0]]
    np.testing.assert_allclose(similarity, expected, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(text_vectors, axis=1), 1, rtol=1e-6)


def test_a_regression_on_two_images_by_hand():
    # Each caption is the one run "xy", with spaces, of its two letters: vectors that
    # have no run in common. The median of the distances 0, 0, 4, 4 is 2.
    image_vectors, text_vectors = kernel_ridge_embeddings(
        pixels(0, 4), ["ab", "cd"], pixels(1), ["cd", "ab"], width=2, penalty=0.5
    )
    near, far, other = np.exp([-1 / 4, -3 / 4, -1])
    weights = np.linalg.solve([[1.5, other], [other, 1.5]], [near, far])
    np.testing.assert_allclose(
        image_vectors @ text_vectors.T, [weights[::-1]], rtol=1e-5
    )
    embeddings = kernel_ridge_embeddings(
        pixels(0, 4), ["ab", "cd"], pixels(1, 3), ["ab", "wxyz"]
    )
    assert retrieval(*embeddings, ks=(1,)).image_to_text.tolist() == [0.5]
