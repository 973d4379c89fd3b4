import itertools
import json

import numpy as np

from keras_moe.data import LabelHierarchy
from tests.refusals import refuses

CLASSES = ["animal", "beagle", "cat", "dog", "pet", "rock"]
PARENTS = {"beagle": ["dog"], "dog": ["animal", "pet"], "cat": ["animal", "pet"]}


def test_labels_are_closed_upward():
    hierarchy = LabelHierarchy(CLASSES, PARENTS)
    assert hierarchy.close([1]) == [0, 1, 3, 4]
    assert hierarchy.close([5, 2]) == [0, 2, 4, 5]
    assert hierarchy.close([]) == []
    # A row of the table is the closure of its class.
    table = hierarchy.table()
    assert table.shape == (6, 4)
    for index, row in enumerate(table):
        assert row[0] == index
        assert sorted(row[row >= 0]) == hierarchy.close([index])
    for wrong in (-1, 6):
        refuses(rf"received: labels=\[{wrong}\]", hierarchy.close, [wrong])


def test_a_hierarchy_is_its_file(tmp_path):
    hierarchy = LabelHierarchy(CLASSES, PARENTS)
    hierarchy.save(tmp_path / "classes.json")
    again = LabelHierarchy.load(tmp_path / "classes.json")
    assert again == hierarchy
    np.testing.assert_array_equal(again.table(), hierarchy.table())
    assert again != LabelHierarchy(CLASSES, {})
    assert LabelHierarchy(**json.loads(json.dumps(hierarchy.to_dict()))) == hierarchy
    names = [str(index) for index in range(3000)]
    parents = {a: [b] for a, b in itertools.pairwise(names)}
    assert LabelHierarchy(names, parents).close([0]) == list(range(3000))
