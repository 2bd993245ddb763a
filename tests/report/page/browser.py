"""A headless browser, controlled over a pipe by Chromium's DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import programs

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 60.0  # seconds; the machine may be busy
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")


def found() -> str | None:
    """Return the path of the browser, or None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


DRAWN = "document.body?.dataset.drawn"
AS_THREE_AND_FOUR = """\
import os, sys
ask, answer = (os.dup(int(word)) for word in sys.argv[1:3])
while min(ask, answer) < 5:
    ask, answer = os.dup(ask), os.dup(answer)
os.dup2(ask, 3)
os.dup2(answer, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from file descriptor 3 and writes answers to 4."""


class Tab:
    """A page in the browser, with the errors that occurred in it and the addresses that it requested."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._number = 0
        self._rest = b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    _session: str | None = None

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; record the events that arrive in between."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._heard(deadline)
            if answer.get("id") == self._number:
                return answer.get("result", answer)
            self._note(answer)

    def _heard(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            poll = select.poll()
            poll.register(self._back, select.POLLIN)
            left = max(deadline - time.monotonic(), 0)  # seconds
            assert poll.poll(1000 * left), "the browser does not answer"
            more = os.read(self._back, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, told: dict[str, Any]) -> None:
        method, what = told.get("method"), told.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = what["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.errors.append(what["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page; await it if it is a promise."""
        told = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        assert "error" not in told, told
        return told["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait for the expression to become true, perhaps only in the next page, and return its value."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            told = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
            if value := told.get("result", {}).get("value"):
                return value
            time.sleep(0.02)
        raise AssertionError(f"never true: {script}; {self.errors}")

    def open(self, page: Path, *, dark: bool = False, width: int = 1400, height: int = 900) -> float:
        """Open a page, and return the seconds until all its plots are drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.errors.clear()
        self.requests.clear()
        began = time.monotonic()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.until(f"location.href.startsWith({json.dumps(page.resolve().as_uri())}) && {DRAWN}")
        return time.monotonic() - began

    def picture(self, target: Path) -> None:
        """Write a screenshot of the whole page."""
        told = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(told["data"]))

    def paper(self, target: Path) -> None:
        """Write the printed page as PDF."""
        told = self.ask("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, preferCSSPageSize=True)
        target.write_bytes(base64.b64decode(told["data"]))


@contextmanager
def tab(program: str, profile: Path) -> Iterator[Tab]:
    """Start a browser, and end it afterwards."""
    ours, theirs = os.pipe(), os.pipe()
    chosen = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    words = [sys.executable, "-c", AS_THREE_AND_FOUR, str(ours[0]), str(theirs[1]), *chosen]
    nobody = programs.DEVNULL
    process = programs.start(words, pass_fds=(ours[0], theirs[1]), stdout=nobody, stderr=nobody)
    os.close(ours[0])
    os.close(theirs[1])
    try:
        yield Tab(ours[1], theirs[0])
    finally:
        process.terminate()
        process.wait(PATIENCE)
        os.close(ours[1])
        os.close(theirs[0])
