import json
import runpy
from pathlib import Path

import pytest

from keras_moe.data import num_examples

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.backend_free

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return runpy.run_path(str(ROOT / "tools" / "deduplicate.py"))["main"]


def test_the_command_writes_what_load_reads(run, tmp_path, capsys):
    output = tmp_path / "new" / "duplicates.json"
    arguments = ["--data", "digits", "--split", "all", "--max-distance", "-1"]
    assert run([*arguments, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    # The test images are among all, in which no two have the same pixels.
    assert len(found["indices"]) == 450
    assert (
        "450 of 1797 images of all are among the 450 of test" in capsys.readouterr().out
    )
    assert num_examples("digits", "all", exclude=output) == 1797 - 450
    with pytest.raises(ValueError, match="received: split='all'"):
        num_examples("digits", "train", exclude=output)


@pytest.mark.parametrize("distance", [-5, 65])
def test_a_distance_out_of_range_is_refused(run, capsys, distance):
    with pytest.raises(SystemExit):
        run(["--data", "digits", "--max-distance", str(distance)])
    assert f"received: --max-distance {distance}" in capsys.readouterr().err


def test_bad_input(run, capsys):
    assert run(["--data", "digits", "--split", "dev"]) == 1
    assert "error: Expected one of" in capsys.readouterr().err
