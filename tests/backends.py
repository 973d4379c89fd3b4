"""Cases of which some run on every backend, and the others on PyTorch alone."""

import pytest


def every_backend_for(cases, *telling):
    """Cases for `parametrize`, marked where the last part of a name is in `telling`."""
    names = {case.split("/")[-1] for case in cases}
    assert names.issuperset(telling), f"no cases: {set(telling) - names}"
    mark = pytest.mark.every_backend
    return [
        pytest.param(case, marks=[mark] if case.split("/")[-1] in telling else [])
        for case in cases
    ]
