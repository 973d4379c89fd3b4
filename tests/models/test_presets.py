import json
import os
import shutil
import stat
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest

from keras_moe import models
from keras_moe.models import VARIANTS, ViTBackbone, ViTImageClassifier, registry
from keras_moe.models.registry import builtin_presets
from tests.backends import every_backend_for
from tests.compare import assert_close, assert_same
from tests.forks import run_python
from tests.refusals import refuses
from tests.small_models import assert_same_outputs, images

pytestmark = pytest.mark.usefixtures("op_by_op")

OTHERS = sorted({"jax", "tensorflow", "torch"} - {keras.backend.backend()})
NAMES = sorted(builtin_presets())
IMAGES = images(3, 16, 16, 1)
# Presets of pairs have no classes; tests/models/test_pairs.py is theirs.
CLASSIFIERS = [x for x in NAMES if "Classifier" in builtin_presets()[x]["task"]]


def digits_model(**overrides):
    model = models.from_preset(
        "vmoe_digits", num_classes=10, **overrides, load_weights=False
    )
    # The head starts at zero: give it something to say.
    kernel = model.output_dense.kernel
    kernel.assign(np.random.default_rng(1).normal(size=kernel.shape))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("presets") / "digits"
    keras.utils.set_random_seed(0)
    model = digits_model()
    model.save_to_preset(folder)
    return folder, model.predict(IMAGES, verbose=0)


def test_the_zoo_is_complete():
    wanted = {f"{family}_{size}" for family in ("vit", "vmoe") for size in (
        "s32", "s16", "b32", "b16", "l32", "l16", "h14"
    )}  # fmt: skip
    assert wanted < set(models.list_presets())
    assert {"vmoe_s32_last2_e8", "vmoe_b16_every2_e8", "vmoe_digits"} < set(NAMES)
    for name, preset in builtin_presets().items():
        line = models.list_presets()[name]
        assert line
        assert "\n" not in line
        assert preset["source"]
    assert all(variant.source for variant in VARIANTS.values())


@pytest.mark.parametrize(("preset", "moe_layers", "experts"), [
    ("vit_b16", [], None),
    ("vmoe_b32", [1, 3, 5, 7, 9, 11], 32),
    ("vmoe_s32_last2_e8", [5, 7], 8),
    ("eee_s32_last2_e8", [5, 7], None),
])  # fmt: skip
def test_which_blocks_are_moe(preset, moe_layers, experts):
    parts = models.describe(preset).parts
    kinds = {part.name: part.kind for part in parts if part.name.startswith("block")}
    actual = [int(name[6:]) for name, kind in kinds.items() if kind.startswith("MoE")]
    assert actual == moe_layers
    if experts:
        assert kinds[f"block_{moe_layers[0]}"] == f"MoE {experts}, K=2"


@pytest.mark.parametrize("preset", CLASSIFIERS)
def test_heads_are_those_of_the_released_configs(preset):
    """google-research/vmoe, configs/vmoe_paper: common, pretrain_imagenet21k."""
    entry = builtin_presets()[preset]
    task, hidden_dim = entry["task_config"], entry["config"]["hidden_dim"]
    head = task.get("representation_dim"), task.get("head_bias")
    if preset == "vmoe_b16_every2_e8":
        assert head == (None, -10.0)
    elif preset == "eee_s32_last2_e8":
        assert head == (512, -10.0)
    elif entry["variant"].startswith("vmoe/"):
        assert head == (hidden_dim, "prior")
        costs = models.describe(preset, num_classes=10)
        bare = models.describe(preset)
        layers = hidden_dim * (hidden_dim + 1) + 10 * (hidden_dim + 1)
        assert costs.parameters == bare.parameters + layers
    else:
        assert head[0] is None


SMALL = {
    "hidden_dim": 16, "mlp_dim": 16, "num_heads": 2, "num_layers": 2,
    "num_experts": 2, "image_shape": (32, 32, 3),
}  # fmt: skip


def test_random_weights_are_said_once(saved, monkeypatch, recwarn):
    monkeypatch.setattr(
        "keras_moe.models.loading.blueprint._has_warned_of_random_weights", False
    )
    models.from_preset("vmoe_s32", load_weights=False, **SMALL)
    models.from_preset("vmoe_digits", num_classes=3)
    models.from_preset(saved[0])
    assert not recwarn.list
    with pytest.warns(UserWarning, match="'vmoe_s32' is an arch.*trained=True") as said:
        models.from_preset("vmoe_s32", **SMALL)
    assert said[0].filename == __file__
    models.ViTBackbone.from_preset("vmoe_s16", **SMALL)
    assert not recwarn.list


@pytest.mark.parametrize("preset", models.list_presets(trained=True))
def test_a_trained_preset_is_the_same_task_without_its_weights(preset):
    model, new = (models.from_preset(preset, load_weights=x) for x in (True, False))
    assert type(new) is type(model)
    config, expected = (
        {k: v for k, v in x.get_config().items() if "preprocessor" in k or "num_" in k}
        for x in (new, model)
    )
    assert config == expected
    if preset == "limoe_emoji":
        assert new.encode_text(["a cat"]).shape == (1, 64)
        sizes = {"image_shape": (16, 16, 3), "vocabulary_size": 99}
        other = models.from_preset(preset, load_weights=False, **sizes)
        assert other.preprocessor is None
        assert other.image_preprocessor.image_shape[0] == 16


def test_heads_of_presets_fit_what_is_overridden():
    model = models.from_preset("vmoe_s32", num_classes=3, **SMALL)
    assert model.representation_dim == 16
    costs = models.describe("vmoe_s32", num_classes=3, **SMALL)
    assert costs.parameters == model.count_params()
    head = {"num_experts": 2, "rank": 2}
    model = models.from_preset("vmoe_s32", num_classes=3, head=head, **SMALL)
    assert model.representation_dim is None
    costs = models.describe("vmoe_s32", num_classes=3, head=head, **SMALL)
    trained = sum(np.prod(weight.shape) for weight in model.trainable_weights)
    assert costs.parameters == trained


def test_loading_and_saving_is_quiet(saved, tmp_path, recwarn):
    model = models.from_preset(str(saved[0]))
    model.fit(IMAGES, np.zeros(3), verbose=0)
    model.save_to_preset(tmp_path / "again")
    models.from_preset(str(tmp_path / "again"))
    own = [w for w in recwarn if issubclass(w.category, UserWarning)]
    assert not [w for w in own if "optimizer" in str(w.message)]
    # The head alone: 64 x 10 weights and biases, no optimizer.
    assert os.path.getsize(tmp_path / "again" / "task.weights.h5") < 50_000


@pytest.mark.parametrize("other", OTHERS)
def test_saved_here_loads_on_every_backend(saved, other, tmp_path):
    folder, expected = saved
    np.save(tmp_path / "images.npy", IMAGES)
    # Its blocks have different numbers of experts.
    pruned = models.from_preset(str(folder)).with_kept_experts({"block_1": [0, 2, 5]})
    pruned.save_to_preset(tmp_path / "pruned")
    backbone = models.LIMoEBackbone(
        image_shape=(16, 16, 1), patch_size=8, vocabulary_size=9, max_length=2,
        hidden_dim=4, num_layers=1, num_heads=1, mlp_dim=4, projection_dim=3,
        moe={"moe_layers": [0], "num_experts": 2},
    )  # fmt: skip
    pairs = models.ContrastiveModel(backbone)
    pairs.save_to_preset(tmp_path / "pairs")
    program = f"""
import sys
if {other!r} == "tensorflow":
    import tensorflow
    # Running three small models takes less than tracing them.
    tensorflow.config.run_functions_eagerly(True)
else:
    # Keras imports it to look for its kinds of shapes: two seconds for nothing.
    sys.modules["tensorflow"] = None
import keras, numpy as np
from keras_moe import models
assert keras.backend.backend() == {other!r}
model = models.from_preset({str(folder)!r})
images = np.load({str(tmp_path / "images.npy")!r}, allow_pickle=False)
np.save({str(tmp_path / "logits.npy")!r}, model.predict(images, verbose=0))
pruned = models.from_preset({str(tmp_path / "pruned")!r})
np.save({str(tmp_path / "pruned.npy")!r}, pruned.predict(images, verbose=0))
pairs = models.from_preset({str(tmp_path / "pairs")!r})
texts = dict(token_ids=np.array([[1, 2]]), padding_mask=np.array([[True, True]]))
np.save({str(tmp_path / "pairs.npy")!r}, pairs.similarity(images, texts))
"""
    done = run_python("-c", program, KERAS_BACKEND=other)
    assert not done.returncode, done.stderr
    texts = {"token_ids": np.array([[1, 2]]), "padding_mask": np.array([[True, True]])}
    for name, wanted, atol in (
        ("logits", expected, 1e-5),
        ("pruned", pruned.predict(IMAGES, verbose=0), 1e-5),
        ("pairs", pairs.similarity(IMAGES, texts), 1e-4),
    ):
        actual = np.load(tmp_path / f"{name}.npy", allow_pickle=False)
        assert_close(actual, wanted, 1e-4, atol)


@pytest.mark.parametrize("overrides", [
    {"num_experts": 4},
    {"moe_layers": [0, 2]},
    {"num_layers": 2, "moe_layers": [1]},
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Skipping nested container")
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_weights_that_do_not_fit_are_refused(saved, tmp_path, overrides):
    message = rf"load_weights=False.*preset='{saved[0]}'"
    refuses(message, models.from_preset, str(saved[0]), **overrides)
    fresh = models.from_preset(str(saved[0]), load_weights=False, **overrides)
    assert fresh.count_params() > 0
    with pytest.raises(ValueError, match=r"received|shape|layers"):
        keras_hub.models.Backbone.from_preset(str(saved[0]), **overrides)
    backbone = models.from_preset(str(saved[0]), task="backbone")
    backbone.save_weights(tmp_path / "all.weights.h5")
    other = models.from_preset("vmoe_digits", **overrides, load_weights=False)
    refuses(r"received|shape|layers", other.load_weights, tmp_path / "all.weights.h5")


def test_the_dtype_policy_is_saved(tmp_path):
    policy = "mixed_bfloat16"
    model = digits_model(dtype=policy)
    model.save_to_preset(tmp_path / "half")
    for kwargs in ({"num_classes": 3}, {"task": "backbone"}, {"priority": "sum_gates"}):
        loaded = models.from_preset(str(tmp_path / "half"), **kwargs)
        assert loaded.dtype_policy.name == policy
    loaded = models.from_preset(str(tmp_path / "half"))
    assert loaded.dtype_policy.name == policy
    assert_same_outputs(loaded, model, IMAGES)
    loaded = models.from_preset(str(tmp_path / "half"), dtype="float32")
    assert loaded.dtype_policy.name == "float32"


def test_what_a_caller_changes_stays_with_the_caller():
    mine, new = {"router_z": 0.5}, {"load_weights": False, "task": "backbone"}
    backbone = models.from_preset("vmoe_digits", auxiliary_losses=mine, **new)
    mine["router_z"] = 7.0
    backbone.get_config()["moe"]["auxiliary_losses"]["router_z"] = 8.0
    registry.presets()["vmoe_digits"]["config"]["image_shape"].clear()
    assert backbone.moe.auxiliary_losses == {"router_z": 0.5}
    assert models.from_preset("vmoe_digits", **new).moe.auxiliary_losses == "auto"


def test_an_interrupted_save_leaves_the_old_preset_whole(tmp_path, monkeypatch):
    folder = tmp_path / "preset"
    model, other = digits_model(), digits_model()
    model.save_to_preset(folder)

    def half_written(self, path, *args, **kwargs):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ViTBackbone, "save_weights", half_written)
        with pytest.raises(KeyboardInterrupt):
            other.save_to_preset(folder)
    assert os.listdir(tmp_path) == ["preset"]
    assert_same_outputs(models.from_preset(str(folder)), model, IMAGES)


def test_a_save_killed_between_its_renames_loses_nothing(tmp_path):
    folder, previous = tmp_path / "preset", tmp_path / ".preset.previous"
    model = digits_model()
    model.save_to_preset(folder)
    os.rename(folder, previous)
    assert_same_outputs(models.from_preset(str(folder)), model, IMAGES)
    # Reading changes nothing: a writer may be at work.
    assert os.listdir(tmp_path) == [previous.name]
    other = digits_model()
    other.save_to_preset(folder)
    assert os.listdir(tmp_path) == ["preset"]
    assert_same_outputs(models.from_preset(str(folder)), other, IMAGES)


def test_saving_replaces_the_preset_and_keeps_other_files(tmp_path):
    folder = tmp_path / "preset"
    digits_model().save_to_preset(folder)
    (folder / "README.md").write_text("mine")
    folder.chmod(0o700)
    backbone = models.from_preset("vmoe_digits", task="backbone", load_weights=False)
    backbone.save_weights(folder / "epoch_3.weights.h5")
    backbone.save_to_preset(folder)
    assert (folder / "README.md").read_text() == "mine"
    assert (folder / "epoch_3.weights.h5").exists()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # The old task would not fit the new backbone.
    assert not (folder / "task.json").exists()
    assert isinstance(models.from_preset(str(folder)), ViTBackbone)


def test_saving_over_something_else_and_other_backbones_are_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    backbone = models.from_preset("vmoe_digits", load_weights=False)
    refuses("older preset", backbone.save_to_preset, tmp_path)
    refuses(r"thesis\.txt is a file", backbone.save_to_preset, tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    bert = keras_hub.models.BertBackbone(5, 1, 1, 4, 4, max_sequence_length=4)
    bert.save_to_preset(tmp_path / "bert")
    for source in (bert, str(tmp_path / "bert")):
        refuses(r"BertBackbone.*SigLIP.*models\.convert;", models.from_preset, source)


# The first models of a process: Keras changes their classes when it builds them.
IN_THREADS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from keras_moe import models

sys.setswitchinterval(1e-5)
sizes = {"image_shape": (8, 8, 3), "patch_size": 4, "hidden_dim": 12, "mlp_dim": 8}
start = threading.Barrier(8)

def build(name):
    start.wait()
    if name:
        models.from_preset(name, num_classes=3, num_layers=2, **sizes)
    else:
        backbone = models.ViTBackbone(num_layers=1, num_heads=2, **sizes)
        models.ViTImageClassifier(backbone, 3)

with ThreadPoolExecutor(8) as pool:
    list(pool.map(build, ("vit_s32", None, "mixer_s16", None) * 2))
"""


def test_a_saved_task_comes_back_by_every_door(saved):
    folder, expected = saved
    hub = keras_hub.models
    for load in (
        models.from_preset,
        ViTImageClassifier.from_preset,
        hub.ImageClassifier.from_preset,
    ):
        model = load(str(folder))
        assert isinstance(model, ViTImageClassifier)
        assert_same(model.predict(IMAGES, verbose=0), expected)
    for backbone in (
        models.from_preset(str(folder), task="backbone"),
        hub.Backbone.from_preset(str(folder)),
        models.from_preset("vmoe_digits", task="backbone", load_weights=False),
    ):
        assert isinstance(backbone, ViTBackbone)
    assert "vmoe_b32" in ViTBackbone.presets
    assert "vmoe_b32" in ViTImageClassifier.presets


@pytest.mark.parametrize(
    "preset", every_backend_for(["vmoe_digits", "clip_emoji"], "vmoe_digits")
)
def test_a_model_without_weights_is_the_same_model(preset):
    abstract, model = models.abstract(preset), models.from_preset(preset)
    assert type(abstract) is type(model)
    assert abstract.describe() == model.describe()._replace(name=abstract.name)
    shapes = [(x.path, x.shape, x.dtype) for x in model.trainable_variables]
    assert shapes == [(x.path, x.shape, x.dtype) for x in abstract.trainable_variables]
    outputs = abstract(model.input)
    assert keras.tree.map_structure(lambda x: x.shape, outputs) == (
        keras.tree.map_structure(lambda x: x.shape, model(model.input))
    )
    refuses("Expected a model with weights", abstract.get_weights)
    inputs = keras.tree.map_structure(
        lambda x: np.ones([n or 2 for n in x.shape], x.dtype), model.input
    )
    refuses("Expected a model with weights", abstract.predict, inputs, verbose=0)


FILES = ("config.json", "model.weights.h5", "task.json", "task.weights.h5")


@pytest.mark.parametrize(("name", "content", "message"), [
    *((name, None, name) for name in FILES),
    *((name, "half", f"{name}.*(truncated|damaged)") for name in FILES),
    ("config.json", b"[1, 2]", "config.json"),
    ("config.json", b'{"registered_name": "elsewhere>Body"}', "elsewhere>Body"),
    ("model.weights.h5", b"PK\x03\x04 not HDF5", "model.weights.h5"),
])  # fmt: skip
def test_missing_cut_and_foreign_files_are_named(
    saved, tmp_path, name, content, message
):
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    whole = (folder / name).read_bytes()
    (folder / name).unlink()
    if isinstance(content, bytes) and b"elsewhere" in content:
        content = json.dumps({**json.loads(whole), **json.loads(content)}).encode()
    if content is not None:
        content = whole[: len(whole) // 2] if content == "half" else content
        (folder / name).write_bytes(content)
    refuses(message, models.from_preset, str(folder))


WITHOUT_TENSORFLOW = """
import sys

import numpy as np

from keras_moe import models

model = models.from_preset(
    "vmoe_digits", num_classes=10, num_layers=2, load_weights=False
)
model.run_eagerly = True
model.predict(np.zeros((1, *model.input_shape[1:])), verbose=0)
assert "tensorflow" not in sys.modules

# KerasHub's own layers load it when they need it.
import keras_hub

tokenizer = keras_hub.tokenizers.BytePairTokenizer(
    vocabulary={"b": 0, "u": 1, "t": 2, "bu": 3, "but": 4}, merges=["b u", "bu t"]
)
assert np.array(tokenizer("but")).tolist() == [4]
"""


def test_models_are_built_in_several_threads_and_without_tensorflow():
    done = run_python("-c", IN_THREADS + WITHOUT_TENSORFLOW, KERAS_BACKEND="torch")
    assert not done.returncode, done.stderr
