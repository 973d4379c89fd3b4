import json

import pytest

from keras_moe.data import num_examples

pytest.importorskip("tensorflow")


@pytest.fixture
def run(program):
    return lambda *arguments: program("deduplicate", "--data", "digits", *arguments)


def test_the_command_writes_what_load_reads(run, tmp_path):
    output = tmp_path / "new" / "duplicates.json"
    arguments = ["--split", "all", "--max-distance", "-1", "--output", output]
    status, text, errors = run(*arguments)
    assert status == 0, errors
    # The test images are among all, in which no two have the same pixels.
    assert len(json.loads(output.read_text())["indices"]) == 450
    assert "450 of 1797 images of all are among the 450 of test" in text
    values = json.loads(run(*arguments, "--json").output)
    assert (values["duplicates"], values["images"]) == (450, 1797)
    assert values["output"] == str(output)
    assert num_examples("digits", "all", exclude=output) == 1797 - 450
    with pytest.raises(ValueError, match="received: split='all'"):
        num_examples("digits", "train", exclude=output)
