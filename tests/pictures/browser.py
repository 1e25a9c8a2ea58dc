# SPDX-License-Identifier: Apache-2.0
"""Opens pages in Debian's headless Chromium over its DevTools pipe: what was requested, what went wrong, and a PNG."""

import base64
import contextlib
import json
import os
import select
import subprocess
import time
from pathlib import Path

WAIT_SECONDS = 60
PAINTED = "document.documentElement.dataset.ready"  # set by zaya_plugin/pictures/page.js


class Browser:
    """A browser without a window. program: its path."""

    def __init__(self, program: str, folder: Path):
        read, self.out = os.pipe()
        self.answers, write = os.pipe()
        words = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        words += [f"--user-data-dir={folder}", "about:blank"]

        def arrange():  # the pipe is expected at 3 and 4
            high = [os.dup2(fd, fd + 100) for fd in (read, write)]
            for target, fd in zip((3, 4), high, strict=True):
                os.dup2(fd, target, inheritable=True)

        self.process = subprocess.Popen(
            words, close_fds=False, preexec_fn=arrange, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read)
        os.close(write)
        self.number, self.events, self.buffer, self.session = 0, [], b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")

    def call(self, method: str, **parameters):
        """Return the result of a command."""
        self.number += 1
        text = {"id": self.number, "method": method, "params": parameters}
        os.write(self.out, json.dumps(text | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            for message in self._messages():
                if message.get("id") == self.number:
                    assert "error" not in message, message
                    return message["result"]
                self.events.append(message)
        raise TimeoutError(method)

    def _messages(self):
        if select.select([self.answers], [], [], 1.0)[0]:
            self.buffer += os.read(self.answers, 1 << 20)
        *whole, self.buffer = self.buffer.split(b"\0")
        return [json.loads(each) for each in whole]

    def value(self, script: str):
        """Return the value of a script."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)["result"].get(
            "value"
        )

    def open(self, page: Path, width: int, dark: bool = False, height: int = 900, ready: str = PAINTED) -> None:
        """Open a page and wait until it has painted everything. ready: a script whose value is then not null."""
        self.events.clear()
        self.choose(dark)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + WAIT_SECONDS
        while self.value(ready) is None:
            assert time.monotonic() < end, "the page never got ready"
            time.sleep(0.02)

    def choose(self, dark: bool) -> None:
        """Choose between light and dark, as a person does in the system."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    @property
    def seconds(self) -> float:
        """Processor time of the page's main thread since `open`: the same on a busy machine."""
        metrics = {one["name"]: one["value"] for one in self.call("Performance.getMetrics")["metrics"]}
        return metrics["TaskDuration"]

    def named(self, method: str) -> list[dict]:
        """Return the parameters of the events of a kind since `open`."""
        return [event["params"] for event in self.events if event.get("method") == method]

    @property
    def requests(self) -> list[str]:
        """The addresses that the page has asked for, without its own and data inside it."""
        urls = [event["request"]["url"] for event in self.named("Network.requestWillBeSent")]
        return [url for url in urls[1:] if not url.startswith("data:")]

    @property
    def errors(self) -> list:
        """Exceptions, and errors and warnings of the console, also about the page's policy."""
        console = [event for event in self.named("Runtime.consoleAPICalled") if event["type"] in ("error", "warning")]
        log = [event for event in self.named("Log.entryAdded") if event["entry"]["level"] in ("error", "warning")]
        return self.named("Runtime.exceptionThrown") + console + log

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def save(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(OSError):
            os.close(self.out)
        self.process.terminate()
        self.process.wait(WAIT_SECONDS)
        os.close(self.answers)
