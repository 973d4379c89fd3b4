"""Questions to the network, whose answers may never come."""

import threading
from collections.abc import Callable
from typing import Any

# An answer takes a second; a name server or a proxy that is down takes minutes.
PATIENCE = 60


def answer_of(function: Callable[[], Any], question: str) -> Any:
    """Returns or raises the result of a function, if it comes in time.

    Libraries that look a name up on the network have no time-outs of their own, or
    multiply them by attempts. A function that is late goes on in a thread, whose
    result is lost.
    """
    done: dict[str, Any] = {}

    def run():
        try:
            done["value"] = function()
        except BaseException as error:
            done["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        raise TimeoutError(
            f"Expected an answer within {PATIENCE} s; received: none to {question}. Is "
            "there a network, and a proxy that answers?"
        )
    if "error" in done:
        raise done["error"]
    return done["value"]


def check_reachable(url: str, purpose: str) -> None:
    """Asks a server for an address once, before many attempts are made."""
    import requests

    try:
        answer_of(lambda: requests.head(url), f"a request of {url} for {purpose}")
    except requests.RequestException as error:
        raise OSError(
            f"Expected to reach {url} for {purpose}; received: {error}"
        ) from error
