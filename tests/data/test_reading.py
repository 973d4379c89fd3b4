"""Image files: training and inference see one picture, upright, in all its colours."""

import io

import numpy as np
import pytest
from PIL import Image

from keras_moe.data import load
from keras_moe.models import ImagePreprocessor

tf = pytest.importorskip("tensorflow")

# How a photo lies in its file, for each orientation of Exif but the first.
LYING = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE"]
LYING += ["ROTATE_90", "TRANSVERSE", "ROTATE_270"]
LYING = {way: Image.Transpose[name] for way, name in enumerate(LYING, 2)}
XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def picture():
    """Smooth colours without symmetry."""
    y, x = np.mgrid[0:24, 0:32] / 31
    rgb = np.stack([255 * x, 255 * y, 128 + 127 * np.sin(6 * x + 2 * y)], -1)
    return Image.fromarray(rgb.astype("uint8"))


def files():
    """Each file's name, its bytes, and the picture that it shows, if it is known."""
    image = picture()
    grey, palette = image.convert("L"), image.quantize(64)
    bits = grey.point(lambda x: 255 * (x > 99)).convert("1")
    half = image.copy()
    half.putalpha(Image.fromarray(np.repeat(np.uint8([[0, 255]]), 16, 1).repeat(24, 0)))
    many = {"save_all": True, "append_images": [grey.convert("RGB")]}
    close = {"quality": 95, "subsampling": 0}
    for name, shown, options in [
        *[(f"{suffix}.{suffix}", image, {}) for suffix in ("png", "bmp")],
        *[(f"palette.{suffix}", palette, {}) for suffix in ("png", "bmp", "gif")],
        *[(f"bits.{suffix}", bits, {}) for suffix in ("png", "bmp", "gif")],
        *[(f"grey.{suffix}", grey, {}) for suffix in ("png", "bmp", "jpg")],
        *[(f"alpha.{suffix}", half, {}) for suffix in ("png", "bmp")],
        ("alpha.webp", half, {"lossless": True, "exact": True}),
        ("see_through.gif", palette, {"transparency": 3}),
        ("frames.gif", palette, many),
        ("frames.webp", image, {"lossless": True, **many}),
        ("jpg.jpg", image, {"progressive": True, **close}),
        ("print.jpg", image.convert("CMYK"), close),
    ]:
        file = io.BytesIO()
        shown.save(file, {"jpg": "jpeg"}.get(name[-3:], name.split(".")[1]), **options)
        yield name, file.getvalue(), shown.convert("RGB")
        if name == "print.jpg":
            # Without Adobe's mark, colours are not inverted.
            whole = file.getvalue()
            at = whole.index(b"\xff\xee")
            yield "unmarked.jpg", whole[:at] + whole[at + 16 :], None
    for way, transpose in LYING.items():
        for suffix in ("jpeg", "png", "webp")[: 3 if way == 6 else 1]:
            file, exif = io.BytesIO(), Image.Exif()
            exif[0x010F], exif[0x0112] = "a camera", way
            options = {**close, "exif": exif, "lossless": True}
            image.transpose(transpose).save(file, suffix, **options)
            yield f"turned{way}.{suffix}", file.getvalue(), image
    file = io.BytesIO()
    image.transpose(LYING[6]).save(file, "jpeg", xmp=XMP, **close)
    yield "xmp.jpg", file.getvalue(), image


def test_training_and_inference_see_the_same_picture(tmp_path):
    shown = {}
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "b").mkdir()
    picture().save(tmp_path / "train" / "b" / "0.png")
    for name, content, image in files():
        path = tmp_path / "train" / "a" / name
        path.write_bytes(content)
        shown[path] = image
    preprocessor, source = ImagePreprocessor((24, 32, 3)), f"folder:{tmp_path}"
    whole = {"name": "random_resized_crop", "scale": (1.0, 1.0), "ratio": (4 / 3,) * 2}
    trained, cropped = (
        load(source, "train", (24, 32, 3), 64, augment, shuffle=False)
        for augment in (None, whole)
    )
    ((trained, _),), ((cropped, _),) = map(tuple, (trained, cropped))
    for path, seen, crop in zip(sorted(shown), trained, cropped):
        with Image.open(path) as image:
            served = preprocessor(image)
        # Two decoders of JPEG round otherwise.
        limit = 0.08 if path.suffix in (".jpg", ".jpeg") else 1e-5
        pictures = {"served": served, "cropped": crop}
        if shown[path] is not None:
            pictures["shown"] = preprocessor(np.asarray(shown[path]))
        for other, expected in pictures.items():
            message = f"{path.name} as {other}"
            np.testing.assert_allclose(seen, expected, atol=limit, err_msg=message)


def test_other_formats_are_refused_whatever_their_names(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        picture().save(tmp_path / name / "0.png", "TIFF" if name == "b" else "PNG")
    batches = load(f"folder:{tmp_path}", "train", (8, 8, 3), 1, shuffle=False)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"can be decoded.*b/0\.png"
    ):
        list(batches)
