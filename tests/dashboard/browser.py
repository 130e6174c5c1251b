"""A real browser, driven by its own debugging protocol over two pipes: no package, no port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Navigated(AssertionError):
    """The page went to another address while it was asked something."""


class Browser:
    """One page. `run` evaluates an expression in it, `until` waits for one to become true."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs_in, theirs_out)]  # clear of 3 and 4, which it expects

        def arrange() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, preexec_fn=arrange, pass_fds=(3, 4), stderr=subprocess.DEVNULL)
        for end in (*ends, theirs_in, theirs_out):
            os.close(end)
        self._reader, self._writer = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self._count, self._session, self._rest = 0, "", b""
        self.complaints: list[str] = []  # errors on the page's console
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "DOM", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.close()
        self._writer.close()

    def call(self, method: str, **params: Any) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        self._writer.write(json.dumps(message).encode() + b"\0")
        self._writer.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "navigated or closed" in answer.get("error", {}).get("message", ""):
                    raise Navigated(answer)
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            piece = os.read(self._reader.fileno(), 1 << 16)
            assert piece, "the browser is gone"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.complaints.append(message["params"]["entry"]["text"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(message["params"]))
        return message

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str, seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        while not self._holds(expression):
            assert time.monotonic() < end, f"never true: {expression}\n{self.run('document.body.innerText')}"
            time.sleep(0.1)

    def _holds(self, expression: str) -> bool:
        try:
            return bool(self.run(expression))
        except Navigated:  # the page that was asked is gone; the next one will answer
            return False

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({selector!r}).innerText"))

    def choose(self, selector: str, *files: Path) -> None:
        """As the file dialog does."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def drop(self, selector: str, *files: Path) -> None:
        """As a file manager does: dragged in, held over, let go."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        x, y = self.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
        data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def press(self, key: str) -> None:
        number, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        for kind in ("keyDown", "keyUp"):
            output = text if kind == "keyDown" else ""
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=number, text=output)

    def resize(self, width: int, height: int = 900, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))
