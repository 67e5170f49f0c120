#!/usr/bin/env python3
"""Runs photon-train under a pseudo-terminal, ends it in every way, and looks at what it leaves of the terminal.

The programs must be built (cargo build --release --workspace).
"""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release/photon-train"
LEAVE = b"\x1b[?1049l"
TIMEOUT_SECS = 120

RUN = f"""
steps = 1000000
seq_len = 64
batch_size = 2
checkpoint_every_steps = 1000000
eval = {{ every_steps = 1000000, max_tokens = 128, sample_tokens = 8 }}
model = {{ base = "{ROOT}/configs/model/photon-3l-tiny.toml" }}
data = {{ paths = ["{ROOT}/ARCHITECTURE.md"], held_out = {{ tail = {{ fraction = 0.1 }} }} }}
"""


def watch(config, out, then, *args):
    """Calls `then(terminal, pid)` once steps are shown; the exit code, and what was written."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(PROGRAM, [PROGRAM, "run", config, "--out", out, *args])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    before = termios.tcgetattr(terminal)
    written, is_told, began = b"", False, time.time()
    while True:
        if time.time() - began > TIMEOUT_SECS:
            os.kill(pid, signal.SIGKILL)
            sys.exit(f"{out.name}: no end after {TIMEOUT_SECS} s:\n{written[-2000:]}")
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                written += os.read(terminal, 1 << 16)
            except OSError:
                break
        # A number that is known once there was a step.
        if not is_told and b"learning rate" in written:
            is_told = True
            then(terminal, pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert written.count(LEAVE) == 1, f"{out.name}: the screen is left {written.count(LEAVE)} times"
    after = written[written.index(LEAVE):]
    assert b"\x1b[?25h" in after, f"{out.name}: the cursor stays hidden"
    assert termios.tcgetattr(terminal) == before, f"{out.name}: the terminal is not as it was"
    os.close(terminal)
    return code, after.decode(errors="replace")


def main():
    def keys(text):
        return lambda terminal, _: os.write(terminal, text)

    def twice(terminal, _):
        os.write(terminal, b"\x03")
        os.write(terminal, b"\x03")

    def send(which):
        return lambda _, pid: os.kill(pid, which)

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        config = folder / "run.toml"
        config.write_text(RUN)
        for name, then, args, code, said in [
            ("q", keys(b"q"), [], 1, "error: interrupted after"),
            ("ctrl-c", keys(b"\x03"), [], 1, "error: interrupted after"),
            ("ctrl-c twice", twice, [], 130, ""),
            ("terminated", send(signal.SIGTERM), [], 1, "error: interrupted after"),
            ("done", lambda *_: None, ["--set", "steps=60"], 0, "held-out bits per byte:"),
            # Every update is a spike once it is known what is usual.
            ("stuck", lambda *_: None, ["--set", "guards.spike_factor=1.000001", "--set", "guards.max_skips_in_a_row=1"],
             1, "error: 1 updates in a row were skipped"),
        ]:
            found, after = watch(config, folder / name, then, *args)
            assert found == code, f"{name}: exit code {found}, expected {code}:\n{after}"
            assert said in after, f"{name}: no {said!r} in:\n{after}"
        # What goes to a pipe is no dashboard.
        piped = subprocess.run([PROGRAM, "run", config, "--out", folder / "piped", "--set", "steps=2"],
                               capture_output=True, check=True)
        assert b"\x1b" not in piped.stdout + piped.stderr, piped
    print("the dashboard gives the terminal back, however a run ends")


main()
