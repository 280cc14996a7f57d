"""A browser without a screen: chromium, spoken to over a pipe in the DevTools protocol."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patience import wait_until

CHROMIUM = shutil.which("chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--disable-dev-shm-usage")


class Page:
    """One tab; what its console says of errors is in ``errors``, and what it has asked for in ``requests``."""

    def __init__(self, to: int, back: int, seconds: float) -> None:
        self._to, self._back, self._seconds = to, back, seconds
        self._number, self._read, self._session = 0, b"", None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        # Whether a page without a screen has the focus is chance, and one that has not is not told of any.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Its answer; events before it are looked at."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._notice(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            if not select.select([self._back], [], [], self._seconds)[0]:
                raise TimeoutError("chromium does not answer")
            self._read += os.read(self._back, 1 << 20)
        line, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(line))

    def _notice(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")

    def show(self, address: str, width: int) -> None:
        """Load a page, and wait until it is complete."""
        self.resize(width)
        self.call("Page.navigate", url="about:blank")  # the page may be the one that is shown
        self.until("location.href == 'about:blank'")
        self.call("Page.navigate", url=address)
        self.until(f"location.href.split('#')[0] == {json.dumps(address)} && document.readyState == 'complete'")

    def resize(self, width: int) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def run(self, script: str) -> Any:
        """The value of an expression in JavaScript."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def until(self, script: str) -> None:
        wait_until(lambda: self.run(script), self._seconds, f"never true: {script}", 0.05)


@contextlib.contextmanager
def opened(profile: Path, seconds: float) -> Iterator[Page]:
    """A tab of a chromium of its own, whose third and fourth descriptors are the pipe."""
    assert CHROMIUM is not None
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]  # 3 and 4, where these are free: not for the pipes
    (read, to), (back, write) = os.pipe(), os.pipe()
    command = f"exec {CHROMIUM} {' '.join(FLAGS)} --user-data-dir={profile} 3<&{read} 4>&{write} {read}<&- {write}>&-"
    with subprocess.Popen(
        ["bash", "-c", command], stderr=subprocess.DEVNULL, pass_fds=(read, write), start_new_session=True
    ) as process:
        for descriptor in (read, write, *taken):
            os.close(descriptor)
        try:
            yield Page(to, back, seconds)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # also those who would go on to write to the profile
            os.close(to)
            os.close(back)
