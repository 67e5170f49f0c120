"""Training speed and memory of photon and flat, here and in PyTorch, taking turns on one machine.

    cargo build --release && cargo build --release --example logits
    python experiments/training-speed/run.py --threads 2          # speed and growth; writes speed.json and growth.json
    python experiments/training-speed/run.py --check CHECKPOINT   # do both sides give the same logits?
    python experiments/training-speed/run.py --cpu-time           # CPU time of a step, for a machine that is shared

Needs Linux, Python 3.11 and torch 2.5 or later with a C++ compiler, and an otherwise idle machine (but for --cpu-time).
Every number comes from a process of its own; peak memory is what the system reports of the process (with the 2048 x
2048 matrices of photon's matmul benchmark, 50 MB). Medians over `--rounds` go into a Markdown table, every run into a JSON file beside this one.
"""

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FLAT = "configs/model/flat-small.toml"
PHOTON = "configs/model/photon-3l-small.toml"
WINDOW = ["--set", "stack.attention={ window = { units = 256 } }"]
FLAT_TORCH = HERE.parent / "speed-vs-pytorch" / "flat_torch.py"
# That script always decodes too.
NO_DECODING = ["--decode-tokens", "1", "--prompt-len", "1"]
TOLERANCE = 1e-4


def run(command: list[str]) -> tuple[dict, int]:
    """The JSON that a command prints, and its peak memory in bytes."""
    report, usage = measure(command)
    return report, usage.ru_maxrss * 1024


def measure(command: list[str]) -> tuple[dict, resource.struct_rusage]:
    """The JSON that a command prints, and what the system says of its process."""
    print(" ".join(command), file=sys.stderr)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return json.loads(output), usage


def our_command(args: argparse.Namespace, config: str, batch: int, seq_len: int, steps: int, *extra: str) -> list[str]:
    return [str(args.binaries / "photon-train"), "bench", config, "--batch-size", str(batch), "--seq-len", str(seq_len),
            "--steps", str(steps), "--device", "cpu", "--format", "json", *extra]


def torch_command(threads: int, script: Path, config: str, batch: int, seq_len: int, steps: int, *extra) -> list[str]:
    return [sys.executable, str(script), config, "--threads", str(threads), "--batch-size", str(batch), "--seq-len",
            str(seq_len), "--steps", str(steps), *extra]


def ours(args: argparse.Namespace, *rest) -> dict:
    report, peak = run(our_command(args, *rest))
    keys = ("training_tokens_per_sec", "matmul_gflops", "training_mfu", "training_flops_per_token", "parameters",
            "commit")
    return {key: report[key] for key in keys} | {"peak_bytes": peak}


def torch(args: argparse.Namespace, *rest) -> dict:
    report, peak = run(torch_command(args.threads, *rest))
    return {"training_tokens_per_sec": report["training_tokens_per_sec"], "peak_bytes": peak}


def cpu_time(args: argparse.Namespace) -> None:
    """CPU time of a step: what further steps add to a process. One thread in PyTorch, whose threads wait busily."""
    few, many = 1, 1 + args.steps
    at = (args.batch_size, args.seq_len)
    photon_torch = HERE / "photon_torch.py"
    sides = {
        "flat-small, photon": lambda n: our_command(args, FLAT, *at, n, "--warmup-steps", "0"),
        "flat-small, PyTorch": lambda n: torch_command(1, FLAT_TORCH, FLAT, *at, n, "--warmup", "0", *NO_DECODING),
        "photon-3l-small, photon": lambda n: our_command(args, PHOTON, *at, n, "--warmup-steps", "0"),
        "photon-3l-small, PyTorch": lambda n: torch_command(1, photon_torch, PHOTON, *at, n, "--warmup", "0"),
    }
    secs: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, command in sides.items():
            usages = [measure(command(n))[1] for n in (few, many)]
            spent = [usage.ru_utime + usage.ru_stime for usage in usages]
            secs[name].append((spent[1] - spent[0]) / args.steps)
    print("| | CPU ms a step | from to | tokens a CPU second |\n|---|---:|---:|---:|")
    for name, values in secs.items():
        median = statistics.median(values)
        low, high = 1000 * min(values), 1000 * max(values)
        rate = args.batch_size * args.seq_len / median
        print(f"| {name} | {1000 * median:.0f} | {low:.0f} to {high:.0f} | {rate:.0f} |")


def check(args: argparse.Namespace) -> None:
    """Compares the logits of a checkpoint for sequences of several lengths."""
    worst = 0.0
    for n_tokens in (1, 5, 64, 333):
        token_ids = ",".join(str(random.Random(n_tokens + i).randrange(256)) for i in range(n_tokens))
        here, _ = run([str(args.binaries / "examples" / "logits"), args.check, token_ids])
        there, _ = run([sys.executable, str(HERE / "photon_torch.py"), args.check, "--logits", token_ids])
        pairs = ((a, b) for row, other in zip(here, there, strict=True) for a, b in zip(row, other, strict=True))
        worst = max(worst, max(abs(a - b) for a, b in pairs))
    print(f"largest difference of logits: {worst:.2e}")
    sys.exit(worst > TOLERANCE)


def row(name: str, results: list[dict]) -> str:
    rates = [result["training_tokens_per_sec"] for result in results]
    peak = statistics.median(result["peak_bytes"] for result in results)
    return f"| {name} | {statistics.median(rates):.0f} | {min(rates):.0f} to {max(rates):.0f} | {peak / 2**20:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048, 8192, 32768, 65536])
    parser.add_argument("--binaries", type=Path, default=ROOT / "target" / "release")
    parser.add_argument("--cpu-time", action="store_true", help="only measure the CPU time of a step")
    parser.add_argument("--only", choices=("speed", "growth"), help="measure one of the two")
    parser.add_argument("--check", metavar="CHECKPOINT", help="only compare logits")
    args = parser.parse_args()
    if args.check:
        return check(args)
    if args.cpu_time:
        return cpu_time(args)
    if args.only != "growth":
        measure_speed(args)
    if args.only != "speed":
        measure_growth(args)


def measure_speed(args: argparse.Namespace) -> None:
    at = (args.batch_size, args.seq_len, args.steps)
    photon_torch = HERE / "photon_torch.py"
    sides = {
        "flat-small, photon": lambda: ours(args, FLAT, *at),
        "flat-small, PyTorch eager": lambda: torch(args, FLAT_TORCH, FLAT, *at, *NO_DECODING),
        "flat-small, PyTorch compiled": lambda: torch(args, FLAT_TORCH, FLAT, *at, *NO_DECODING, "--compile"),
        "photon-3l-small, photon": lambda: ours(args, PHOTON, *at),
        "photon-3l-small, PyTorch eager": lambda: torch(args, photon_torch, PHOTON, *at),
        "photon-3l-small, PyTorch compiled": lambda: torch(args, photon_torch, PHOTON, *at, "--compile"),
    }
    speed: dict[str, list[dict]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            speed[name].append(side())
    print("| | training tokens/s | from to | peak memory, MiB |\n|---|---:|---:|---:|")
    for name, results in speed.items():
        print(row(name, results))
    write(args, "speed", speed)


def measure_growth(args: argparse.Namespace) -> None:
    # One row of the batch, so that only its length grows.
    growing = {
        "photon-3l-small, photon": lambda n: ours(args, PHOTON, 1, n, 2, "--warmup-steps", "1"),
        "flat-small with a window of 256, photon": lambda n: ours(
            args, FLAT, 1, n, 2, "--warmup-steps", "1", *WINDOW
        ),
        "photon-3l-small, PyTorch eager": lambda n: torch(
            args, HERE / "photon_torch.py", PHOTON, 1, n, 2, "--warmup", "1"
        ),
    }
    growth = {name: {n: side(n) for n in args.lengths} for name, side in growing.items()}
    print("\n| batch 1, T = | " + " | ".join(map(str, args.lengths)) + " |\n|---|" + "---:|" * len(args.lengths))
    for name, results in growth.items():
        rates = " | ".join(f"{result['training_tokens_per_sec']:.0f}" for result in results.values())
        peaks = " | ".join(f"{result['peak_bytes'] / 2**20:.0f}" for result in results.values())
        print(f"| {name}, tokens/s | {rates} |\n| the same, peak MiB | {peaks} |")
    write(args, "growth", growth)


def write(args: argparse.Namespace, name: str, results: dict) -> None:
    settings = {key: value for key, value in vars(args).items() if key not in ("binaries", "check", "cpu_time", "only")}
    facts = {"cpu": cpu_name(), "settings": settings, "results": results}
    (HERE / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
