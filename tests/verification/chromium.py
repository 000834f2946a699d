"""A headless Chromium, driven through its own pipes: no driver, no network, no package.

The DevTools protocol over `--remote-debugging-pipe`: JSON messages that end with a zero byte, read
by the browser from its descriptor 3 and written to its descriptor 4.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """Give the path of a Chromium that starts, or None where there is none on PATH."""
    found = (path for name in NAMES if (path := shutil.which(name)))
    return next((path for path in found if _starts(path)), None)


def _starts(path: str) -> bool:
    """Tell a browser from a stub that asks to install one."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


class Page:
    """One page in a browser of its own, which ends with the `with` block."""

    def __init__(self, chromium: str, *, profile: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._command = [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._last_id = 0
        self._unread = b""
        self._session = ""

    def __enter__(self) -> Self:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "-", *self._command],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._attach()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._out)  # the browser ends with its pipe
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def open(self, path: Path, *, width: int, height: int, is_phone: bool = False) -> None:
        """Load a file at a window size in CSS pixels; wait until it is complete."""
        self.events.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for(f"location.href == {json.dumps(path.resolve().as_uri())}")
        self.wait_for("document.readyState === 'complete'")

    def prefer(self, scheme: str) -> None:
        """Prefer light or dark pages."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """Give the value of a JavaScript expression; a promise's, once it is kept."""
        how = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=expression, **how)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command; give its result. Events that come meanwhile go to `events`."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last_id:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            is_ready, _, _ = select.select([self._in], [], [], _TIMEOUT_S)
            assert is_ready, "Chromium does not answer"
            chunk = os.read(self._in, 1 << 16)
            assert chunk, "Chromium has ended"
            self._unread += chunk
        message, _, self._unread = self._unread.partition(b"\0")
        read: dict[str, Any] = json.loads(message)
        return read
