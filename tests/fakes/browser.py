"""A headless Chromium, spoken to over its pipe (Chrome DevTools Protocol: JSON texts that end with a zero byte)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LIMIT_SECONDS = 60.0
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--disable-breakpad", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def chromium() -> str | None:
    """Its path; None where there is none."""
    return next((path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None)


class Browser:
    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._last_id = 0
        self._target: str | None = None
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result; what comes in between is kept in `events`."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]  # type: ignore[no-any-return]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + _LIMIT_SECONDS
        while b"\0" not in self._buffer:
            assert select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0], "chromium does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "chromium has gone"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)  # type: ignore[no-any-return]

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> Page:
        """Loads a file in place of the page opened before, and waits until its figures are drawn."""
        if self._target is not None:
            self.call("Target.closeTarget", targetId=self._target)
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"])
        for domain in ("Runtime", "Log", "Page", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        page.call("Page.navigate", url=path.resolve().as_uri())
        page.until("document.documentElement && document.documentElement.dataset.ready !== undefined")
        return page


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """Awaits promises. A thrown error fails the test."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, condition: str) -> None:
        """Polls inside the page at its frames."""
        end = time.monotonic() + _LIMIT_SECONDS
        while not self.evaluate(f"new Promise((done) => setTimeout(() => done(Boolean({condition})), 30))"):
            assert time.monotonic() < end, f"never true: {condition}"

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions, of this page so far."""
        self.evaluate("new Promise((done) => setTimeout(done, 50))")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            parameters = event["params"]
            match event["method"]:
                case "Runtime.exceptionThrown":
                    found.append(json.dumps(parameters["exceptionDetails"])[:500])
                case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                    found.append(json.dumps(parameters["args"])[:500])
                case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                    found.append(parameters["entry"]["text"][:500])
        return found

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        own = [event for event in self._browser.events if event.get("sessionId") == self._session and event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in own]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))["data"]))

    def print(self) -> bytes:
        """As PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        width, height = self.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        return {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}


@contextmanager
def browser() -> Iterator[Browser]:
    """A fresh one, ended with all its processes. Needs `chromium()`."""
    program = chromium()
    assert program is not None
    for_browser, to_browser = os.pipe()
    from_browser, by_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="headrace-chromium-", ignore_cleanup_errors=True) as profile:
        # the protocol's descriptors are 3 and 4; the shell puts them there whatever their numbers are here
        command = f'exec "$0" "$@" 3<&{for_browser} 4>&{by_browser}'
        process = subprocess.Popen(
            ["bash", "-c", command, program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"], pass_fds=(for_browser, by_browser),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(for_browser)
        os.close(by_browser)
        found = Browser(to_browser, from_browser)
        try:
            yield found
            found.call("Browser.close")
        finally:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            os.close(to_browser)
            os.close(from_browser)
