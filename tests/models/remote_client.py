"""A process of a stranger, which has imported nothing before: `online` or `offline`.

Arguments: which, and a folder with `photos` and our preset in `preset`. What happened
goes to `online.json` or `offline.json` there, and arrays to `arrays.npz`.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import time
from pathlib import Path

from keras_moe.cli.main import main
from tests.hub_server import BROKEN, TOKEN

WHICH, FOLDER = sys.argv[1], Path(sys.argv[2])
# With the preset that the recipe names.
FINETUNE = (
    "train", "finetune", "--data", f"folder:{FOLDER / 'photos'}",
    "--output", FOLDER / WHICH,
    "--recipe-set", "data.batch_size=8", "schedule.epochs=1",
)  # fmt: skip
happened = {}


def command(name, *arguments):
    """Runs a command of `keras-moe`."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = main(list(map(str, arguments)))
    happened[name] = [status, output.getvalue(), errors.getvalue()]


def attempt(name, call, *arguments):
    """Notes the error of a call, its kind and seconds."""
    start = time.monotonic()
    try:
        call(*arguments)
        kinds, text = [], "no error"
    except Exception as error:
        kinds, text = [x.__name__ for x in type(error).__mro__], str(error)
    happened[name] = [kinds, text, time.monotonic() - start]


def online():
    command("describe", "describe", "hf://timm/vit")

    import keras
    import numpy as np

    from keras_moe import models

    arrays = {}
    images = np.load(FOLDER / "images.npy")
    model = models.from_preset("hf://timm/vit")
    arrays["timm"] = model.predict(images, verbose=0)
    clip = models.from_preset("hf://laion/clip")
    happened["clip tokens"] = np.asarray(clip.preprocessor(["a"])["token_ids"])[
        0
    ].tolist()
    gpt2 = models.from_preset("hf://openai-community/gpt2")
    tokens = gpt2.preprocessor.tokenizer.tokenize("hello world")
    happened["gpt2 tokens"] = np.asarray(tokens).tolist()
    attempt("keras hub", models.from_preset, "hf://keras/vit")
    ours = models.from_preset("hf://ours/digits")
    for name, one in {"clip": clip, "gpt2": gpt2, "ours": ours}.items():
        for weight in one.weights:
            arrays[f"{name}/{weight.path}"] = keras.ops.convert_to_numpy(weight)

    for name in ("no/body", "a/b/c", "ours/gated", "ours/down", "ours/none"):
        attempt(name, models.from_preset, f"hf://{name}")
    attempt("no token", models.upload, "hf://me/mine", FOLDER / "preset")
    os.environ["HF_TOKEN"] = "hf_stranger"
    attempt("stranger", models.from_preset, "hf://ours/gated")
    os.environ["HF_TOKEN"] = TOKEN
    attempt("member", models.from_preset, "hf://ours/gated")
    attempt("no/body of member", models.from_preset, "hf://no/body")

    attempt("broken", models.from_preset, "hf://ours/broken")
    cache = Path(os.environ["HF_HOME"]) / "hub" / "models--ours--broken"
    happened["kept"] = [x.name for x in cache.glob("snapshots/*/*")]
    for path in (FOLDER / "repositories" / "ours" / "broken").glob(f"*{BROKEN}"):
        path.unlink()
    attempt("whole again", models.from_preset, "hf://ours/broken")

    models.upload("hf://me/mine", FOLDER / "preset")
    mine = models.from_preset("hf://me/mine")
    for weight in mine.weights:
        arrays[f"mine/{weight.path}"] = keras.ops.convert_to_numpy(weight)
    np.savez(FOLDER / "arrays.npz", **arrays)

    command("finetune", *FINETUNE)


def offline():
    command("finetune", *FINETUNE)
    command("describe", "describe", "hf://no/body")

    from huggingface_hub import constants

    from keras_moe import models, training

    for source in (
        "hf://no/body",
        "kaggle://a/b/keras/c",
        "kaggle://a/b/keras/c/1",
        "vit_base_patch16_224_imagenet",
        "gs://bucket/preset",
        "gs://vmoe_checkpoints/vmoe_s32",
        "gs://vit_models/augreg/ViT.npz",
        "http://127.0.0.2:9/model.safetensors",
    ):
        attempt(source, models.from_preset, source)
    attempt("tokenizer hf://a/b", models.TextTokenizer.from_preset, "hf://a/b")
    for uri in ("hf://me/mine", "kaggle://me/mine/keras/one"):
        attempt(f"upload {uri}", models.upload, uri, FOLDER / "preset")
    attempt("gs://bucket/run", training.find_checkpoint, "gs://bucket/run")
    # Downloaded before, so no network is needed.
    attempt("cached", models.from_preset, "hf://timm/vit")
    cache = Path(os.environ["KERAS_HOME"]) / "models" / "gs_bucket_my_preset"
    shutil.copytree(FOLDER / "preset", cache)
    attempt("cached gs", models.from_preset, "gs://bucket/my-preset")
    constants.HF_HUB_OFFLINE = True
    attempt("cached alone", models.from_preset, "hf://timm/vit")
    attempt("not cached", models.from_preset, "hf://no/body")


{"online": online, "offline": offline}[WHICH]()
(FOLDER / f"{WHICH}.json").write_text(json.dumps(happened))
