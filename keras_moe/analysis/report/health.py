"""Findings on the health of routers, in plain words."""

import numpy as np

from keras_moe.analysis.report.counts import LayerCounts
from keras_moe.analysis.report.section import Verdict
from keras_moe.analysis.routing import DEAD, MAX_DEAD, MAX_SHARE, MIN_ENTROPY

# Parts of dropped choices from which on they are worth a notice, or a problem.
DROPS = (0.01, 0.1)


def health_verdicts(layers: list[LayerCounts]) -> list[Verdict]:
    """Findings on layers that are unhealthy, or one that says that none is."""
    verdicts = []
    for counts in layers:
        if counts.broken:
            share = counts.broken / (counts.broken + counts.tokens)
            text = f"{share:.0%}" if share >= 0.01 else "less than 1%"
            verdicts.append(
                Verdict(
                    "problem",
                    f"{counts.block.key}: {text} of tokens have gates that are not "
                    "finite. The report leaves them out.",
                )
            )
        if counts.tokens and counts.work.sum() > 0:
            verdicts += _of_layer(counts)
        elif counts.tokens:
            verdicts.append(
                Verdict("problem", f"{counts.block.key}: no expert serves a token.")
            )
        elif not counts.broken:
            verdicts.append(
                Verdict("notice", f"{counts.block.key}: the data has no token for it.")
            )
    verdicts.sort(key=lambda verdict: verdict.level != "problem")
    if verdicts:
        return verdicts
    lowest = min(counts.entropy for counts in layers)
    return [
        Verdict(
            "good",
            "All experts of all layers work, and no layer has collapsed: the entropy "
            f"of loads is at least {lowest:.2f} of 1.",
        )
    ]


def _of_layer(counts):
    key, shares = counts.block.key, counts.shares
    is_present = counts.block.is_present
    number = int(is_present.sum())
    verdicts = []
    idle = np.flatnonzero((counts.work == 0) & is_present)
    # Those with work, but hardly any.
    dead = np.flatnonzero((shares < DEAD / number) & (counts.work > 0))
    level = "problem" if len(idle) + len(dead) > MAX_DEAD * number else "notice"
    one_by_one = counts.block.is_sparse
    if len(idle):
        verb = "gets" if len(idle) == 1 else "get"
        amount = "no token" if one_by_one else "no weight"
        verdicts.append(
            Verdict(
                level,
                f"{key}: {len(idle)} of {number} experts {verb} {amount} "
                f"({_experts(idle)}).",
            )
        )
    if len(dead):
        verb = "does" if len(dead) == 1 else "do"
        verdicts.append(
            Verdict(
                level,
                f"{key}: {len(dead)} of {number} experts {verb} less than a hundredth "
                f"of an equal share ({_experts(dead)}).",
            )
        )
    largest = int(shares.argmax())
    if number > 2 and shares[largest] > MAX_SHARE:
        verdicts.append(
            Verdict(
                "problem",
                f"{key} has collapsed: expert {largest} does {shares[largest]:.0%} of "
                "the work.",
            )
        )
    elif number > 1 and counts.entropy < MIN_ENTROPY:
        verdicts.append(
            Verdict(
                "problem",
                f"{key} has collapsed: the entropy of its loads is "
                f"{counts.entropy:.2f} of 1.",
            )
        )
    if counts.block.kind == "token_choice" and counts.dropped > DROPS[0]:
        level = "problem" if counts.dropped > DROPS[1] else "notice"
        verdicts.append(
            Verdict(
                level,
                f"{key}: {counts.dropped:.1%} of the tokens' choices are dropped by "
                "the capacity.",
            )
        )
    unserved = counts.unserved / counts.tokens
    if counts.block.kind == "expert_choice" and unserved > DROPS[1]:
        verdicts.append(
            Verdict("notice", f"{key}: no expert takes {unserved:.1%} of the tokens.")
        )
    return verdicts


def _experts(numbers):
    """The first experts of many by number."""
    texts = [str(number) for number in numbers[:8]]
    if len(numbers) > len(texts):
        texts.append(f"and {len(numbers) - len(texts)} more")
    return f"expert{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"
