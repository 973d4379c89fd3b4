"""Interleaved times, and the ratios that are taken within rounds."""

from tools.benchmark import timing


def test_every_round_runs_every_candidate_once():
    calls, rounds = [], []
    candidates = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = timing.interleaved_times(
        candidates, 4, on_round=lambda: rounds.append(len(calls)), warm_ups=1
    )
    assert {x: len(values) for x, values in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert calls[:3] == ["a", "b", "c"]
    assert rounds == [6, 9, 12, 15]
    for start in (3, 6, 9, 12):
        assert sorted(calls[start : start + 3]) == ["a", "b", "c"]
    assert len({tuple(calls[start : start + 3]) for start in (3, 6, 9, 12)}) > 1


def test_a_slow_round_leaves_paired_ratios_alone():
    drift = [1.0, 1.0, 9.0, 9.0, 1.0]
    times = {"ours": [2 * x for x in drift], "theirs": drift}
    assert timing.paired_ratios(times, "theirs") == {
        "ours": (2.0, 2.0, 2.0),
        "theirs": (1.0, 1.0, 1.0),
    }
    assert timing.paired_ratios({"a": [3.0], "b": [2.0]}, "b")["a"] == (1.5, 1.5, 1.5)
