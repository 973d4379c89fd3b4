import json

import pytest

from keras_moe.data import num_examples
from tests.refusals import refuses

pytest.importorskip("tensorflow")


def test_the_command_writes_what_load_reads(done, tmp_path):
    output = tmp_path / "new" / "duplicates.json"
    arguments = ["deduplicate", "--data", "digits", "--split", "all"]
    arguments += ["--max-distance", "-1", "--output", output]
    text = done(*arguments)
    # The test images are among all, in which no two have the same pixels.
    assert len(json.loads(output.read_text())["indices"]) == 450
    assert "450 of 1797 images of all are among the 450 of test" in text
    values = json.loads(done(*arguments, "--json"))
    assert (values["duplicates"], values["images"]) == (450, 1797)
    assert values["output"] == str(output)
    assert num_examples("digits", "all", exclude=output) == 1797 - 450
    refuses("received: split='all'", num_examples, "digits", "train", exclude=output)
