"""What photon does on a graphics card; check.sh runs it.

In this order, so that what matters most is there when time is up: whether every part of a model computes what the CPU
computes, in f32 and in bf16; training in bf16; prefill and decode of the 600 M models in the paper's two regimes, bf16
weights, random; presets of the caches. Every figure comes from a command that is printed and kept in results.json.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = "configs/data/moby-dick.txt"
F32_TOLERANCE = 1e-4
# Mean KL of predictions with bf16 weights from those in f32 on the CPU, in nats.
BF16_MOST_KL = 1e-3


class OutOfTime(Exception):
    """The minutes are over."""


class Session:
    """Commands, what they printed, and how much time is left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.ends = time.monotonic() + args.minutes * 60
        self.commands = []
        self.problems = []

    def run(self, program: str, *words: str) -> str:
        """What a command prints; where it fails that is a problem, and nothing."""
        command = [str(self.args.programs / program), *map(str, words)]
        left = self.ends - time.monotonic()
        if left < 5:
            raise OutOfTime
        shown = " ".join([program, *map(str, words)])
        print(f"[{left:.0f} s left] {shown}", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            self.problems.append(f"{shown}: not done when time was up")
            raise OutOfTime from None
        self.commands.append({"command": shown, "seconds": round(time.monotonic() - started, 1), "status": done.returncode})
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            self.problems.append(f"{shown}: {' / '.join(said[-3:])}")
        return done.stdout

    def json(self, program: str, *words: str):
        """The same as JSON; nothing where there is none."""
        text = self.run(program, *words, "--format", "json")
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return None


def card() -> str:
    """Name, driver and memory of the card, where NVIDIA's tool tells."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def parity(session: Session, model: Path, results: dict) -> None:
    device = session.args.device
    common = ["parity", "--model", model, "--text", TEXT, "--devices", f"cpu,{device}"]
    for weights, presets, tolerance in [("f32", "exact,exact-int8,int4", F32_TOLERANCE), ("bf16", "exact", 1e9)]:
        if weights not in session.args.formats:
            continue
        found = session.json("photon-infer", *common, "--weights", weights, "--preset", presets, "--tolerance", tolerance)
        if not found:
            continue
        found = found[0]
        worst = max(found["parts"], key=lambda part: part["alone"] / max(part["largest"], 1e-30))
        line = {"weights": weights, "worst_part": worst["part"],
                "worst_share": worst["alone"] / max(worst["largest"], 1e-30), "predictions": found["predictions"]}
        results["parity"].append(line)
        forward = found["predictions"][0]
        if weights == "f32" and not forward["logit_difference"] <= F32_TOLERANCE:
            session.problems.append(f"f32 logits differ by {forward['logit_difference']:.1e}, more than {F32_TOLERANCE}")
        if weights != "f32" and not forward["kl_mean_nats"] <= BF16_MOST_KL:
            session.problems.append(f"{weights}: KL {forward['kl_mean_nats']:.1e} nats, more than {BF16_MOST_KL}")


def train(session: Session, folder: Path, results: dict) -> Path:
    """A checkpoint of the quickstart model, trained on the card in f32 and then in bf16."""
    args = session.args
    steps = args.train_steps
    for compute in args.formats:
        out = folder / f"train-{compute}"
        session.run("photon-train", "run", "configs/train/quickstart.toml", "--device", args.device, "--out", out,
                    "--overwrite", "--display", "plain", "--set", f"steps={steps}", "--set", f"eval.every_steps={steps}",
                    "--set", "eval.max_tokens=16384", "--set", f"precision.default={compute}")
        try:
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        except OSError:
            continue
        taken = [line for line in lines if line["kind"] == "step"]
        held_out = [line["held_out"]["bits_per_byte"] for line in lines if line["kind"] == "evaluation"]
        speeds = sorted(line["tokens_per_sec"] for line in taken)
        results["training"].append({
            "model": "photon-3l-tiny", "compute": compute, "steps": len(taken), "bits_per_byte": held_out,
            "tokens_per_sec": speeds[len(speeds) // 2] if speeds else None,
        })
    return folder / f"train-{args.formats[0]}" / "checkpoints" / "last"


def train_large(session: Session, results: dict) -> None:
    args = session.args
    for config in args.models:
        found = session.json("photon-train", "bench", config, "--device", args.device, "--seq-len", args.seq_len,
                             "--batch-size", 1, "--steps", 4)
        if found:
            speed = found["training_tokens_per_sec"]
            results["training"].append({"model": Path(config).stem, "compute": "f32", "tokens_per_sec": speed, **found})


def generate(session: Session, results: dict) -> None:
    args = session.args
    weights = args.formats[-1]
    common = ["bench", "--device", args.device, "--weights", weights, "--repeats", 1]
    plans = [("exact", 1), (args.presets, 8)]
    for presets, batch in plans:
        for prompt, decode in args.regimes:
            for config in args.models:
                found = session.json("photon-infer", *common, "--config", config, "--preset", presets, "--batch-size",
                                     batch, "--prompt-tokens", prompt, "--decode-tokens", decode)
                results["generation"] += found or []


def number(value, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def report(results: dict, peak: float) -> str:
    """The table."""
    out = [f"{results['date']}, {results['card']}, commit {results['commit']}", ""]
    out += ["| compared with the CPU | path | largest difference of logits | KL mean, nats | top-1 |", "|---|---|---|---|---|"]
    for line in results["parity"]:
        for path in line["predictions"]:
            out.append(f"| {line['weights']} | {path['path']} | {path['logit_difference']:.1e} | {path['kl_mean_nats']:.1e} "
                       f"| {100 * path['top1_agreement']:.1f} % |")
    out += ["", "| training | products | bits/byte | tokens/s |", "|---|---|---|---|"]
    for line in results["training"]:
        curve = " -> ".join(f"{value:.3f}" for value in line.get("bits_per_byte", []))
        out.append(f"| {line['model']} | {line['compute']} | {curve} | {number(line['tokens_per_sec'], 0)} |")
    out += ["", "| model | preset | batch | prompt + decode | prefill tokens/s | decode tokens/s | weights read, GB/s "
            f"| of {peak:.0f} GB/s | cache MiB | device memory, MiB |", "|---|---|---|---|---|---|---|---|---|---|"]
    for line in results["generation"]:
        config, read = line["config"], line["weights_read_gb_per_sec"]
        memory = line["device_memory_bytes"]
        out.append(
            f"| {Path(line['model']).stem} {line['weights']} | {line['preset']} | {config['batch_size']} "
            f"| {config['prompt_tokens']} + {config['decode_tokens']} | {line['prefill_tokens_per_sec']:.0f} "
            f"| {line['decode_tokens_per_sec']:.1f} | {read:.1f} | {100 * read / peak:.2f} % "
            f"| {line['cache_allocated_bytes'] / 2**20:.1f} | {number(memory and memory / 2**20)} |")
    for problem in results["problems"]:
        out.append(f"\nPROBLEM: {problem}")
    return "\n".join(out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for results.json, table.md and the trained checkpoints")
    parser.add_argument("--minutes", type=float, default=5.8)
    parser.add_argument("--peak-gb-per-sec", type=float, default=4800, help="memory bandwidth, by the data sheet (H200)")
    parser.add_argument("--programs", type=Path, default=ROOT / "target/gpu/release")
    parser.add_argument("--rehearse", metavar="DEVICE", help="small models on this device, to see the script work")
    args = parser.parse_args()
    args.device = args.rehearse or "cuda"
    args.train_steps, args.seq_len = 300, 2048
    args.formats = ["f32", "bf16"]
    args.models = ["configs/model/photon-600m.toml", "configs/model/flat-600m.toml"]
    args.regimes = [(2048, 128), (128, 2048)]
    args.presets = "exact,f16,exact-int8,int4"
    if args.rehearse:
        args.train_steps, args.seq_len = 2, 64
        args.models = ["configs/model/photon-3l-tiny.toml"]
        args.regimes = [(32, 4)]
        args.presets = "exact-int8"
    return args


def main() -> int:
    args = parse()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    session = Session(args)
    results = {"date": str(date.today()), "card": card(), "commit": "unknown", "parity": [], "training": [], "generation": []}
    try:
        results["devices"] = session.json("photon-infer", "devices") or []
        has_bf16 = any(line["bf16"] for line in results["devices"] if line["device"] == args.device)
        if not has_bf16:
            session.problems.append(f"{args.device} has no bf16: measured in f32")
            args.formats = ["f32"]
        checkpoint = train(session, args.out, results)
        parity(session, checkpoint, results)
        generate(session, results)
        train_large(session, results)
    except OutOfTime:
        session.problems.append("time was up before the end")
    measured = results["generation"]
    results["commit"] = measured[0]["commit"] if measured else "unknown"
    results["commands"], results["problems"] = session.commands, session.problems
    results["cuda_path"] = os.environ.get("CUDA_PATH")
    table = report(results, args.peak_gb_per_sec)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "table.md").write_text(table + "\n")
    print(table)
    return 1 if session.problems else 0


if __name__ == "__main__":
    sys.exit(main())
