"""Speed of photon beside PyTorch: the same flat model, the same machine, one session.

    cargo build --release
    python experiments/speed-vs-pytorch/run.py --threads 2

Needs Python 3.11 with torch 2.5 or later, and an otherwise idle machine: PyTorch's threads wait for each
other and slow down tenfold beside other work. The two sides take turns, `--rounds` times; medians are
printed as a Markdown table and written, with every round, to results.json beside this file.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FLAT = "configs/model/flat-small.toml"
PHOTON = "configs/model/photon-3l-small.toml"


def run(command: list[str]):
    """Runs a command in the repository's root and reads the JSON it prints."""
    print(" ".join(command), file=sys.stderr)
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output)


def photon(binaries: Path, config: str, args: argparse.Namespace) -> dict:
    train = run([str(binaries / "photon-train"), "bench", config, "--batch-size", str(args.batch_size),
                 "--seq-len", str(args.seq_len), "--steps", str(args.steps), "--device", "cpu", "--format", "json"])
    decode = run([str(binaries / "photon-infer"), "bench", "--config", config, "--prompt-tokens", "128",
                  "--decode-tokens", "257", "--device", "cpu", "--format", "json"])[0]
    return {"training_tokens_per_sec": train["training_tokens_per_sec"],
            "decode_tokens_per_sec": decode["decode_tokens_per_sec"],
            "matmul_gflops": train["matmul_gflops"], "training_mfu": train["training_mfu"],
            "training_flops_per_token": train["training_flops_per_token"],
            "parameters": train["parameters"], "commit": train["commit"]}


def torch(args: argparse.Namespace, *extra: str) -> dict:
    return run([sys.executable, str(HERE / "flat_torch.py"), FLAT, "--threads", str(args.threads), "--batch-size",
                str(args.batch_size), "--seq-len", str(args.seq_len), "--steps", str(args.steps), *extra])


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--binaries", type=Path, default=ROOT / "target" / "release")
    args = parser.parse_args()

    sides = {
        "flat-small, photon": lambda: photon(args.binaries, FLAT, args),
        "flat-small, PyTorch eager": lambda: torch(args),
        "flat-small, PyTorch compiled": lambda: torch(args, "--compile"),
        "photon-3l-small, photon": lambda: photon(args.binaries, PHOTON, args),
    }
    rounds: dict[str, list[dict]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            rounds[name].append(side())

    print("| | training tokens/s | decode tokens/s | 2048² matmul, GFLOP/s | share of it |")
    print("|---|---:|---:|---:|---:|")
    for name, results in rounds.items():
        def median(key: str) -> float:
            return statistics.median(result[key] for result in results)
        print(f"| {name} | {median('training_tokens_per_sec'):.0f} | {median('decode_tokens_per_sec'):.0f} "
              f"| {median('matmul_gflops'):.0f} | {100 * median('training_mfu'):.0f} % |")
    settings = {key: value for key, value in vars(args).items() if key != "binaries"}
    facts = {"cpu": cpu_name(), "settings": settings, "rounds": rounds}
    (HERE / "results.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
