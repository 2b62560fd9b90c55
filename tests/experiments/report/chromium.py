"""A headless Chromium for the tests of the page, driven over its DevTools pipe: no port, no driver, no package."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# for one answer, and for a page to load; starting up takes the longest
SECONDS = 60.0
# no sandbox: it refuses to run as root, and the page is our own
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """Path of the browser; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser(contextlib.AbstractContextManager):
    """One page; ``events`` are all that it sent: requests, exceptions, messages of the console."""

    def __init__(self, executable: str, profile: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.last_id = 0
        self.session: str | None = None
        # Chromium reads commands from 3 and writes answers to 4; ours must not be in the way of these two
        pipes = (*os.pipe(), *os.pipe())
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in pipes]
        self.process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=lambda: (os.dup2(ends[0], 3), os.dup2(ends[3], 4)),
        )
        for fd in (*pipes, ends[0], ends[3]):
            os.close(fd)
        self.commands, self.answers = ends[1], ends[2]
        self.unread = b""
        try:
            self._attach()
        except BaseException:
            self._end()
            raise

    def __exit__(self, *error: object) -> None:
        self.session = None
        try:
            self.call("Browser.close")
            self.process.wait(timeout=20)
        finally:
            self._end()

    def _end(self) -> None:
        # one that hangs does not close itself
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)

    def _attach(self) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol and wait for its answer."""
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        text = memoryview(json.dumps(message).encode() + b"\0")
        while text:
            text = text[os.write(self.commands, text) :]
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self.last_id:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.unread:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self.answers], [], [], left)[0]
            assert ready, "the browser did not answer in time"
            piece = os.read(self.answers, 1 << 16)
            assert piece, "the browser closed its pipe"
            self.unread += piece
        text, self.unread = self.unread.split(b"\0", 1)
        answer = json.loads(text)
        if "method" in answer:
            self.events.append(answer)
        return answer

    def load(self, url: str) -> None:
        """Go to ``url`` and wait until it has loaded."""
        seen = len(self.events)
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + SECONDS
        while not any(event["method"] == "Page.loadEventFired" for event in self.events[seen:]):
            self._receive(deadline)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 10) -> None:
        """Wait until an expression in the page is true, frame by frame."""
        frames = f"""new Promise((done, fail) => {{
          const end = Date.now() + {1000 * seconds};
          const late = () => Date.now() > end ? fail("never true") : requestAnimationFrame(look);
          const look = () => ({condition}) ? done() : late();
          look();
        }})"""
        self.run(frames)

    def show(self, width: int, height: int = 900, scheme: str = "light", medium: str = "") -> None:
        """Set the size of the window in CSS pixels and what the media queries say."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def press(self, key: str, code: int) -> None:
        """Press and release a key, say ``("Enter", 13)``."""
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        """The whole page, top to bottom, as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def named(self, method: str) -> list[dict[str, Any]]:
        """The parameters of all events of one kind."""
        return [event["params"] for event in self.events if event["method"] == method]
