"""A headless Chromium, which tests of pages talk to through two pipes."""

import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Seconds within which a page is there.
PATIENCE = 300
# Elements that reach over the side of the window, but for what is scrolled by itself.
OVERFLOWS = """
(() => {
  const scrolls = e => e && e !== document.body && e !== document.documentElement
    && (["auto", "scroll", "hidden"].includes(getComputedStyle(e).overflowX)
        || scrolls(e.parentElement));
  const wide = [...document.body.querySelectorAll("*")].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width && (box.right > innerWidth + 1 || box.left < -1)
      && !scrolls(e.parentElement);
  });
  const names = wide.slice(0, 5).map(e => e.tagName + "." + e.className + ": "
    + e.textContent.trim().slice(0, 40));
  if (document.documentElement.scrollWidth > innerWidth) names.push("the page");
  return names;
})()
"""

# Chromium reads from file 3 and writes to file 4.
_WITH_PIPES = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def _high(file):
    """The same file by a number that Chromium does not expect."""
    high = fcntl.fcntl(file, fcntl.F_DUPFD, 10)
    os.close(file)
    return high


class Page:
    """A page by the DevTools protocol, with addresses it asked for, and errors."""

    def __init__(self, process: subprocess.Popen, commands: int, replies: int):
        self._process, self._commands, self._replies = process, commands, replies
        self._numbers, self._waiting = itertools.count(1), b""
        self._loaded = False
        self.requests, self.errors = [], []
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict:
        """Calls a method of the protocol, and waits for its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def open(
        self, path: Path, width: int, dark: bool = False, script: bool = True
    ) -> None:
        """Opens a file in a window of a width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=False, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self._loaded, self._own = False, path.as_uri()
        self.call("Page.navigate", url=self._own)
        while not self._loaded:
            self._read()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        options = {"returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def _read(self):
        """The next message, whose event is taken note of."""
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._waiting:
            ready, _, _ = select.select([self._replies], [], [], PATIENCE)
            part = os.read(self._replies, 1 << 20) if ready else b""
            if not part or time.monotonic() > deadline:
                raise TimeoutError(
                    f"Chromium says nothing; exit code {self._process.poll()}"
                )
            self._waiting += part
        message, _, self._waiting = self._waiting.partition(b"\0")
        message = json.loads(message)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event, params):
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith("data:") and url.partition("#")[0] != self._own:
                self.requests.append(url)
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled":
            if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
        elif event == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])


@contextmanager
def opened_browser() -> Iterator[Page]:
    """A page of a new browser; without one it skips, or fails where CI=true."""
    browser = os.environ.get("KERAS_MOE_BROWSER")
    browser = browser or next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        reason = "Chromium is not installed; KERAS_MOE_BROWSER names another place"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    to_browser, commands = os.pipe()
    replies, from_browser = os.pipe()
    to_browser, from_browser = map(_high, (to_browser, from_browser))
    with tempfile.TemporaryDirectory() as profile:
        options = ["headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"]
        options += ["remote-debugging-pipe", f"user-data-dir={profile}"]
        command = [sys.executable, "-S", "-c", _WITH_PIPES]
        command += [str(to_browser), str(from_browser), browser]
        process = subprocess.Popen(
            [*command, *(f"--{option}" for option in options)],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(process, commands, replies)
        finally:
            process.kill()
            process.wait()
            os.close(commands)
            os.close(replies)
            # Children of the browser may still write to its profile.
            time.sleep(0.2)
