import json

import pytest

from keras_moe import models
from tests.pair_models import clip


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A dense preset of the digits' model."""
    folder = tmp_path_factory.mktemp("presets") / "dense"
    model = models.from_preset(
        "vmoe_digits", moe_layers=None, num_classes=10, load_weights=False
    )
    model.save_to_preset(folder)
    return folder


@pytest.fixture
def upcycle(done, dense):
    return lambda *arguments: done("upcycle", dense, *arguments)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_upcycling_makes_a_preset(upcycle, tmp_path):
    output = tmp_path / "sparse"
    text = upcycle(output, "--moe-layers", "[3]", "--json")
    sparse = models.from_preset(str(output))
    assert list(sparse.routing) == ["block_3"]
    report = json.loads((output / "upcycling.json").read_text())
    assert report == json.loads(text)
    assert report["parameters"] == sparse.count_params()


def test_levels_of_mumoe(upcycle, tmp_path):
    levels = ["--router", "mumoe", "--num-experts", "[3, 2]", "--moe-layers", "[3]"]
    upcycle(tmp_path / "mumoe", *levels)
    model = models.from_preset(str(tmp_path / "mumoe"))
    assert model.backbone.expert_types.ffn == 6


def test_one_tower_of_a_pair(done, mistake, tmp_path):
    clip({}).save_to_preset(tmp_path / "clip")
    arguments = ["--moe-layers", "[0]", "--num-experts", "2", "--towers"]
    paths = tmp_path / "clip", tmp_path / "sparse"
    done("upcycle", *paths, *arguments, "text")
    assert list(models.from_preset(str(paths[1])).routing) == ["text/block_0"]
    errors = mistake("upcycle", paths[0], tmp_path / "other", *arguments, "sound")
    assert "sound" in errors


def test_what_fails_leaves_the_older_preset(upcycle, mistake, dense, tmp_path):
    output = tmp_path / "sparse"
    layers = ("--moe-layers", "[3]", "--num-experts", "2")
    parameters = models.from_preset(
        str(dense), moe_layers=[3], num_experts=2, load_weights=False
    ).count_params()
    assert f"{parameters:,}" in upcycle(output, *layers)
    before = contents(output)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("keras_moe._files.write_json", full)
        assert "[Errno 28] No space" in mistake("upcycle", dense, output, *layers)
    assert contents(output) == before
    upcycle(output, *layers)
    assert contents(output).keys() == before.keys()
