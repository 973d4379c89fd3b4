"""Nothing that is loaded runs code: SECURITY.md, as tests."""

import ast
import json
import os
import shutil
import signal
import tarfile
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import safetensors.numpy

from keras_moe import data, models, training
from tests.forks import ROOT
from tests.small_models import SMALL

# One white pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c63f80f00010101001bb6ee560000000049454e44ae426082"
)
# Functions that run the code of what they read, by the last part of their names.
RUN_CODE = {"eval", "exec", "enable_unsafe_deserialization", "unsafe_load"}
RUN_CODE_MODULES = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve"}
# Keywords with the one value that keeps code from running.
SAFE = {"allow_pickle": False, "safe_mode": True, "weights_only": True}


def breaches(source: str) -> list[str]:
    """Returns a line for each place that would run loaded code."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [getattr(node, "module", None), *(x.name for x in node.names)]
            lines += [
                f"{node.lineno}: imports {module}"
                for module in modules
                if module and module.split(".")[0] in RUN_CODE_MODULES
            ]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        # A method such as `model.eval()` is another thing than the builtin.
        if name in RUN_CODE or name.endswith(".enable_unsafe_deserialization"):
            lines.append(f"{node.lineno}: calls {name}")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        for keyword in SAFE.keys() & keywords.keys():
            value = ast.unparse(keywords[keyword])
            if value != str(SAFE[keyword]):
                lines.append(f"{node.lineno}: {name}({keyword}={value})")
        keyword = {"np.load": "allow_pickle", "torch.load": "weights_only"}.get(name)
        if keyword and keyword not in keywords:
            lines.append(f"{node.lineno}: {name} without {keyword}")
    return lines


def test_the_package_calls_nothing_that_runs_loaded_code():
    files = sorted((ROOT / "keras_moe").rglob("*.py"))
    assert len(files) > 100
    for path in files:
        assert breaches(path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize(("file", "argument"), [
    ("config.json", "moe"),
    ("config.json", "dtype"),
    ("task.json", "preprocessor"),
    ("task.json", "head"),
])  # fmt: skip
def test_a_preset_runs_no_code(tmp_path, file, argument):
    sizes = {"image_shape": (8, 8, 1), "patch_size": 4, "hidden_dim": 8, "mlp_dim": 8}
    sizes |= {"num_layers": 1, "num_heads": 2}
    model = models.from_preset("vit_s32", num_classes=2, **sizes)
    model.save_to_preset(tmp_path / "preset")
    models.from_preset(tmp_path / "preset")  # whole, before it is changed

    witness = tmp_path / "witness"
    hostile = keras.layers.Lambda(
        lambda x, at=str(witness): open(at, "w").close() or x, name="hostile"
    )
    path = tmp_path / "preset" / file
    content = json.loads(path.read_text(encoding="utf-8"))
    content["config"][argument] = keras.saving.serialize_keras_object(hostile)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises((TypeError, ValueError)):
        models.from_preset(tmp_path / "preset")
    assert not witness.exists()


# Links and pipes


def records(folder):
    data.write_tfrecords(folder, "test", [(np.zeros((4, 4, 3), "uint8"), 0)], 2)


def tars(folder):
    with tarfile.open(folder / "test-0.tar", "w") as archive:
        for name in ("0.png", "0.txt"):
            archive.addfile(tarfile.TarInfo(name))


def texts(folder):
    (folder / "a.txt").write_text("text")


def captions(folder):
    (folder / "test" / "deep").mkdir(parents=True)
    (folder / "test" / "deep" / "a.png").write_bytes(b"")
    (folder / "test" / "captions.csv").write_text("image,caption\ndeep/a.png,one\n")
    (folder / "test" / "labels.json").write_text('{"deep/a.png": ["a", "b"]}')


def tokenizer(folder):
    made = models.TextTokenizer.trained(["a cat", "two cats"], 518, max_length=6)
    made.save_to_preset(folder)
    for name in ("vocabulary.json", "merges.txt"):
        shutil.copy(folder / "assets" / "tokenizer" / name, folder)
    (folder / "vocabulary.json").rename(folder / "vocab.json")


def preset(folder):
    models.ViTBackbone.from_config(SMALL).save_to_preset(folder)


def published(folder):
    np.savez(folder / "one.npz", a=np.zeros(3, "float32"))


def transformers(folder):
    (folder / "config.json").write_text('{"model_type": "vit", "architecture": "x"}')
    safetensors.numpy.save_file({"a": np.zeros(3)}, folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.parametrize(("make", "name", "read"), [
    (records, "dataset.json", lambda x: data.class_names(f"tfrecord:{x}")),
    (
        records,
        "test-00000-of-00001.tfrecord",
        lambda x: data.num_examples(f"tfrecord:{x}", "test"),
    ),
    (tars, "test-0.tar", lambda x: data.num_pairs(f"webdataset:{x}", "test")),
    (texts, "a.txt", lambda x: data.load_texts(f"text:{x}/*.txt", "all")),
    (captions, "test/captions.csv", lambda x: data.num_pairs(f"folder:{x}", "test")),
    (captions, "test/deep", lambda x: data.num_pairs(f"folder:{x}", "test")),
    (tokenizer, "assets/tokenizer/merges.txt", models.TextTokenizer.from_preset),
    (tokenizer, "merges.txt", models.TextTokenizer.clip),
    (preset, "config.json", models.from_preset),
    (preset, "model.weights.h5", models.from_preset),
    (published, "one.npz", models.describe),
    (transformers, "model.safetensors", models.describe),
])  # fmt: skip
def test_nothing_is_read_through_pipes_or_links_out(
    tmp_path, monkeypatch, kind, make, name, read
):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    folder = tmp_path / "in"
    folder.mkdir()
    make(folder)
    path = folder / name
    path.rename(tmp_path / path.name)
    # Links to pictures show them in further categories, and are left out.
    message = r"stay within|pipe or device|Expected pictures in"
    if kind == "pipe":
        os.mkfifo(path)
        # What lists files does not see a pipe.
        message += "|Expected|is not there"
    else:
        path.symlink_to(tmp_path / path.name)
    # Reading a pipe would wait for ever.
    previous = signal.signal(signal.SIGALRM, waited)
    signal.alarm(60)
    try:
        with pytest.raises((OSError, ValueError), match=message):
            read(folder)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer/tokenizer.json"])
def test_a_run_writes_no_tokenizer_through_a_link(tmp_path, name):
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside)
    model = SimpleNamespace(preprocessor=None)
    with pytest.raises(ValueError, match=r"stay within .*run; .*outside"):
        training.NextToken().prepare(model, None, run_folder=run)


def waited(*_):
    raise AssertionError("waits for a pipe")
