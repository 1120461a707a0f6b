"""Headless Chromium for tests, controlled by the DevTools protocol over pipes."""

import json
import os
import shutil
import subprocess
import time

import pytest


class Browser:
    """A page in Chromium. width: of the window, in pixels."""

    def __init__(self, profile, *, width=1280, height=1000, scripts=True):
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            pytest.skip("needs Chromium")
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--no-first-run",
            f"--user-data-dir={profile}",
        ]
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'  # the descriptors that Chromium uses
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", browser, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._session, self._buffer, self.messages = 0, None, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait()

    def call(self, method, **parameters):
        """The result of a command."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps({"id": self._number, "method": method, "params": parameters} | session).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
                self.messages.append(answer["params"])
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _receive(self):
        while b"\0" not in self._buffer:
            data = os.read(self._in, 2**20)
            assert data, "Chromium has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, code):
        """The value of JavaScript code, awaited."""
        result = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, code, seconds=300.0):
        """The value of JavaScript code once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(code)):
            assert time.monotonic() < end, code
            time.sleep(0.05)
        return value

    def media(self, **features):
        """Set features of media queries, as prefers_color_scheme="dark"."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)
