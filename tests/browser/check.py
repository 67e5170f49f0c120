#!/usr/bin/env python3
"""Opens the page in headless Chromium and generates with it, on the CPU backend in WebAssembly and on WebGPU.

  tests/browser/check.py FOLDER-OF-THE-PAGE CHECKPOINT [SCREENSHOT-FOLDER]

The page must be built (photon-infer/web/build.sh) and so must the programs (cargo build --release --workspace): what a
browser generates is what `photon-infer generate` prints. It needs chromium and chromedriver; without a graphics card
Chromium takes a software driver for WebGPU.
"""

import base64
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INFER = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release/photon-infer"
PROMPT = "Call me"
TOKENS = 48
TIMEOUT_SECS = 240
CHROMIUM = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1000,1400",
            "--enable-unsafe-webgpu", "--enable-features=Vulkan", "--use-vulkan=native", "--use-angle=vulkan",
            "--use-webgpu-adapter=default", "--ignore-gpu-blocklist"]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Browser:
    """A Chromium that chromedriver drives."""

    def __init__(self, port):
        self.driver = subprocess.Popen(["chromedriver", f"--port={port}", "--log-level=SEVERE"], stdout=subprocess.DEVNULL)
        self.base = f"http://127.0.0.1:{port}"
        for _ in range(100):
            try:
                if self.call("GET", "/status")["ready"]:
                    break
            except urllib.error.URLError:
                time.sleep(0.1)
        options = {"args": CHROMIUM, "binary": shutil.which("chromium")}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}}
        self.base += "/session/" + self.call("POST", "/session", wanted)["sessionId"]

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            sys.exit(f"chromedriver: {error.read().decode()[:1000]}")

    def run(self, script, *args):
        return self.call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def open(self, url):
        self.call("POST", "/url", {"url": url})

    def wait_for(self, state):
        """Waits for a state of the page; an error that it shows ends the check."""
        began = time.time()
        while True:
            shown = self.run("return [document.body.dataset.state, document.getElementById('error').textContent]")
            if shown[1]:
                sys.exit(f"the page says: {shown[1]}\n{self.console()}")
            if shown[0] == state:
                return
            if time.time() - began > TIMEOUT_SECS:
                sys.exit(f"the page is {shown[0]} after {TIMEOUT_SECS} s, not {state}\n{self.console()}")
            time.sleep(0.2)

    def console(self):
        lines = self.call("POST", "/se/log", {"type": "browser"})
        return "\n".join(line["message"] for line in lines[-20:])

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def close(self):
        self.call("DELETE", "")
        self.driver.terminate()


def choose(browser, device):
    browser.run("const it = document.getElementById('device'); it.value = arguments[0]; it.dispatchEvent(new Event('change'))",
                device)
    browser.wait_for("ready")
    shown = browser.run("const it = document.getElementById('runs-on'); return [it.dataset.device, it.textContent]")
    assert shown[0] == device, shown
    return shown[1]


def generate(browser, preset, tokens):
    """What the page shows after a greedy generation: text, speed, table of caches."""
    browser.run("""
        const values = { prompt: arguments[0], preset: arguments[1], 'max-tokens': arguments[2], temperature: 0 };
        for (const [id, value] of Object.entries(values)) {
            document.getElementById(id).value = value;
            document.getElementById(id).dispatchEvent(new Event('change'));
        }
        document.getElementById('generate').click();
    """, PROMPT, preset, tokens)
    browser.wait_for("ready")
    return browser.run("""
        const rows = [...document.querySelectorAll('#caches tr')].map((row) => [...row.cells].map((cell) => cell.textContent));
        const text = (id) => document.getElementById(id).textContent;
        return { text: text('text'), speed: text('speed'), rows };
    """)


def expected_text(checkpoint, preset):
    command = [INFER, "generate", "--model", checkpoint, "--device", "cpu", "--prompt", PROMPT, "--temperature", "0",
               "--max-tokens", str(TOKENS), "--preset", preset]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.removesuffix("\n")


def check(browser, device, checkpoint, shots):
    print(f"{device}: {choose(browser, device)}")
    for preset in ["exact", "f16", "exact-int8"]:
        refused = browser.run("return [...document.querySelectorAll('#preset option')].find((it) => it.value === arguments[0]).title",
                              preset)
        if refused:
            print(f"  {preset}: {refused}")
            continue
        shown = generate(browser, preset, TOKENS)
        # Entries in fewer bits may be rounded otherwise on another device.
        if preset == "exact" or device == "cpu":
            assert shown["text"] == expected_text(checkpoint, preset), (preset, shown["text"])
        assert shown["speed"].startswith(f"{TOKENS} tokens") and "tokens/s" in shown["speed"], shown["speed"]
        assert shown["rows"][-1][0] == "all" and len(shown["rows"]) > 2, shown["rows"]
        print(f"  {preset}: {shown['speed']}; caches {shown['rows'][-1][2]} bytes")
    if shots:
        browser.run("scrollTo(0, 0)")
        browser.screenshot(shots / f"{device}.png")
    # What is under way can be stopped, and the page goes on.
    browser.run("document.getElementById('max-tokens').value = 100000; document.getElementById('generate').click()")
    browser.wait_for("generating")
    browser.run("document.getElementById('stop').click()")
    browser.wait_for("ready")
    assert "stopped" in browser.run("return document.getElementById('speed').textContent")


def check_refusals(browser, page, served, address):
    """Files that are no checkpoint are refused by name."""
    bad = page / "damaged"
    shutil.copytree(served, bad)
    weights = bad / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    browser.open(f"{address}/index.html?model=damaged")
    for _ in range(600):
        said = browser.run("return document.getElementById('error').textContent")
        if said:
            break
        time.sleep(0.1)
    assert "model.safetensors is damaged" in said, said
    print(f"damaged: {said}")


def main():
    for program in ["chromium", "chromedriver"]:
        if not shutil.which(program):
            print(f"no {program} on this machine: the check of the page is LEFT OUT "
                  "(Debian: apt-get install chromium chromium-driver)", file=sys.stderr)
            sys.exit(77)
    built, checkpoint = Path(sys.argv[1]), Path(sys.argv[2])
    shots = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    if shots:
        shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as page:
        page = Path(page)
        shutil.copytree(built, page, dirs_exist_ok=True)
        served = page / "checkpoint"
        shutil.copytree(checkpoint, served)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=page))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        browser = Browser(server.server_port + 1)
        try:
            browser.open(f"{address}/index.html?model=checkpoint")
            browser.wait_for("ready")
            print("auto:", browser.run("return document.getElementById('runs-on').textContent"))
            check(browser, "cpu", checkpoint, shots)
            has_webgpu = browser.run("return Boolean(navigator.gpu)") and browser.call(
                "POST", "/execute/async",
                {"script": "navigator.gpu.requestAdapter().then((it) => arguments[0](Boolean(it)))", "args": []})
            if has_webgpu:
                check(browser, "wgpu", checkpoint, shots)
            else:
                print("this Chromium gives no WebGPU adapter: WebGPU in the browser is LEFT OUT", file=sys.stderr)
            check_refusals(browser, page, served, address)
        finally:
            browser.close()


main()
