"""The baseline of retrieval by the nearest image, by hand."""

import numpy as np
import pytest

from keras_moe.evaluation import nearest_caption_embeddings, retrieval

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


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((images(0), ["a", "b"], images(0), ["a"]), "2 train_captions"),
        ((images(0), ["a"], images(0), []), "captions="),
        ((images(0), ["a"], np.zeros((1, 2, 1, 1)), ["a"]), "one shape"),
        ((images(0), ["a"], np.zeros((0, 1, 1, 1)), ["a"]), "images.shape"),
        ((np.zeros((1, 2)), ["a"], images(0), ["a"]), "train_images.shape"),
    ],
)
def test_wrong_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        nearest_caption_embeddings(*arguments)
