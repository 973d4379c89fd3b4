"""Schedules with a cooldown: by hand, at their joints, and as branches."""

import math

import numpy as np
import pytest

from keras_moe.training import WarmupCooldown, warmup_schedule


def rates(schedule, steps):
    return [float(schedule(step)) for step in steps]


def test_reciprocal_square_root_by_hand():
    schedule = warmup_schedule(
        "rsqrt", 0.6, 200, warmup_steps=20, timescale=10, cooldown_steps=100
    )
    # 20 + 10 (n^2 - 1) steps make the rate an n-th: 50 a half, 100 a third.
    expected = {0: 0.0, 1: 0.03, 19: 0.57, 20: 0.6, 30: 0.6 / math.sqrt(2), 50: 0.3}
    # The cooldown falls on a line from 0.2.
    expected |= {100: 0.2, 101: 0.198, 150: 0.1, 199: 0.002, 200: 0.0, 300: 0.0}
    np.testing.assert_allclose(
        rates(schedule, expected), list(expected.values()), atol=1e-7
    )
    again = type(schedule).from_config(schedule.get_config())
    np.testing.assert_array_equal(
        rates(again, range(0, 220, 7)), rates(schedule, range(0, 220, 7))
    )


def test_constant_by_hand():
    schedule = warmup_schedule(
        "constant", 0.6, 100, warmup_steps=10, cooldown_steps=20, final=0.2
    )
    expected = {0: 0.0, 5: 0.3, 10: 0.6, 79: 0.6, 80: 0.6, 90: 0.4, 100: 0.2, 130: 0.2}
    np.testing.assert_allclose(
        rates(schedule, expected), list(expected.values()), atol=1e-7
    )
    steady = warmup_schedule("constant", 0.6, 100)
    np.testing.assert_allclose(rates(steady, (0, 50, 100, 200)), 0.6, rtol=1e-6)


@pytest.mark.parametrize("decay", ["rsqrt", "constant", "linear", "cosine"])
def test_nothing_jumps_where_parts_meet(decay):
    cooldown = {"cooldown_steps": 40} if decay in ("rsqrt", "constant") else {}
    schedule = warmup_schedule(decay, 1.0, 100, 20, timescale=10, **cooldown)
    actual = np.array(rates(schedule, range(105)))
    assert actual.max() == pytest.approx(1.0)
    # No step is longer than the steepest slope: that of the warm-up or, right after it,
    # of the square root, 1 / (2 timescale).
    assert np.abs(np.diff(actual)).max() <= 0.05 + 1e-6
    assert actual[100:] == pytest.approx(0.0, abs=1e-6)


def test_long_runs_keep_their_digits():
    # 4M steps are exact in float32.
    schedule = WarmupCooldown(1e-3, 4_000_000, 10_000, 10_000, 50_000)
    expected = 1e-3 / math.sqrt(1 + (3_949_999 - 10_000) / 10_000)
    assert float(schedule(3_949_999)) == pytest.approx(expected, rel=1e-5)
    assert float(schedule(3_999_999)) == pytest.approx(
        1e-3 / math.sqrt(395) / 50_000, rel=1e-3
    )
