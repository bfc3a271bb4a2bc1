"""A headless browser that tests control by the WebDriver protocol of `chromedriver`; no Python package is needed."""

import base64
import contextlib
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import httpx


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # The key under which WebDriver's JSON has an element's id.


class Browser:
    """A window of a browser that `open_browser` has started."""

    def __init__(self, client, session):
        self._client, self._session = client, session

    def send(self, method, path, **body):
        """Send a WebDriver command; return its value."""
        content = body if method == "POST" else None
        response = self._client.request(method, f"/session/{self._session}/{path}", json=content)
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value

    def open(self, url):
        self.send("POST", "url", url=url)

    def run(self, script, *arguments):
        """Run the body of a JavaScript function; return its value."""
        return self.send("POST", "execute/sync", script=script, args=[*arguments])

    def find(self, selector):
        """Return the last element that a selector finds; scripts and other methods take it as an argument."""
        elements = self.send("POST", "elements", using="css selector", value=selector)
        assert elements, f"there is no {selector}"
        return elements[-1]

    def text(self, selector):
        return self.run("return arguments[0].innerText", self.find(selector))

    def type(self, selector, text):
        self.send("POST", f"element/{self.find(selector)[ELEMENT]}/value", text=text)

    def click(self, selector):
        self.send("POST", f"element/{self.find(selector)[ELEMENT]}/click")

    def choose(self, selector, value):
        """Choose an option of a `<select>` element."""
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))"
        self.run(script, self.find(selector), value)

    def point_at(self, element):
        """Move the mouse to an element."""
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": element}
        actions = [{"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}]
        self.send("POST", "actions", actions=actions)

    def wait_for(self, script, seconds=60.0):
        """Wait until the body of a JavaScript function returns a true value; return it."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"in {seconds:g} s it did not happen that {script}"
            time.sleep(0.02)
        return value

    def errors(self):
        """Return the messages of the page's scripts that failed since the last call."""
        entries = self.send("POST", "se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self, path):
        Path(path).write_bytes(base64.b64decode(self.send("GET", "screenshot")))


@contextlib.contextmanager
def open_browser(width=1000, height=800, *flags):
    """Start a browser with an empty profile; yield its window."""
    assert CHROMIUM and DRIVER
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        try:
            port = next(line for line in process.stdout if "successfully on port" in line).rstrip(".\n").split()[-1]
            # The environment may name a proxy, which must not get the commands.
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
                args = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", *flags]
                options = {"binary": CHROMIUM, "args": args}
                capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
                created = client.post("/session", json={"capabilities": {"alwaysMatch": capabilities}}).json()["value"]
                assert "sessionId" in created, created
                try:
                    yield Browser(client, created["sessionId"])
                finally:
                    client.delete(f"/session/{created['sessionId']}")
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()
