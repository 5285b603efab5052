"""Chromium without a window, driven through two pipes: opens pages, asks them questions, takes pictures.

It speaks the DevTools protocol (JSON messages, each ended by a zero byte), so nothing but the browser is needed. Every
wait has a limit.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["NAMES", "Chromium", "Page", "program"]

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S = 30.0
END_S = 10.0
EVERY_S = 0.1
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


def program() -> str | None:
    """The browser's command; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


class Chromium:
    """A browser with a profile of its own, from `with` to its end."""

    def __enter__(self) -> Self:
        found = program()
        if found is None:
            raise RuntimeError(f"there is no browser: install one of {', '.join(NAMES)}")
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        words = [found, *OPTIONS, f"--user-data-dir={self._profile}", "about:blank"]
        command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "browser", *words],
            pass_fds=(theirs_in, theirs_out),
            env=os.environ | {"TMPDIR": self._profile},  # what it leaves there goes with the profile
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._data = 0, b""
        self.said: list[dict[str, Any]] = []  # events of pages
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_S)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Return the answer to a command; RuntimeError where it is an error, TimeoutError where none comes."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        os.write(self._to, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            found = self._next(deadline, method)
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]
            self.said.append(found)

    def open(self, address: str, *, width: int = 1200, height: int = 900, is_dark: bool = False) -> Page:
        """Open a page in a new tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable", session)
        page = Page(self, session)
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, features=[scheme])
        self.call("Page.navigate", session, url=address)
        return page

    def problems(self) -> list[str]:
        """What pages have complained of so far: errors of scripts, and what the browser refused."""
        found: list[str] = []
        for one in self.said:
            params = one.get("params", {})
            if one.get("method") == "Runtime.exceptionThrown":
                detail = params["exceptionDetails"]
                found.append(str(detail.get("exception", {}).get("description") or detail.get("text")))
            elif one.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found

    def _next(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._data:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                raise TimeoutError(f"the browser has not answered {what} within {ANSWER_S:.0f} s")
            piece = os.read(self._from, 1 << 20)
            if not piece:
                raise RuntimeError(f"the browser has ended during {what}")
            self._data += piece
        message, _, self._data = self._data.partition(b"\0")
        return json.loads(message)


class Page:
    """One tab."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session

    def resize(self, width: int, height: int) -> None:
        about = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._browser.call("Emulation.setDeviceMetricsOverride", self._session, **about)

    def ask(self, script: str) -> Any:
        """Return the value of an expression, of a promise what it becomes."""
        about = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self._browser.call("Runtime.evaluate", self._session, **about)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, script: str, limit_s: float = 20.0) -> Any:
        """Wait until an expression is true, and return its value; TimeoutError after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # the page has not come so far
                if value := self.ask(script):
                    return value
            time.sleep(EVERY_S)
        raise TimeoutError(
            f"not within {limit_s:.0f} s: {script}; the page shows {self.ask('document.body?.innerText')!r}"
        )

    def picture(self, path: Path, *, height: int | None = None, quality: int = 80) -> None:
        """Write what is to be seen as WebP, or the page down to `height`."""
        about: dict[str, Any] = {"format": path.suffix[1:]}
        about |= {"quality": quality} if path.suffix != ".png" else {}
        if height is not None:
            width = self.ask("innerWidth")
            about |= {"captureBeyondViewport": True}
            about |= {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        found = self._browser.call("Page.captureScreenshot", self._session, **about)
        path.write_bytes(base64.b64decode(found["data"]))
