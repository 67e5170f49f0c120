"""Starts TensorBoard on a run folder and compares what it serves with the run's metrics.jsonl.

Run by `check` in this folder.
"""

import json
import math
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

run = Path(sys.argv[1])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
steps = [line for line in lines if line["kind"] == "step"]
evaluations = [line for line in lines if line["kind"] == "evaluation"]


def expected_scalars():
    """Every curve as pairs of a step and a value."""
    of_steps = {
        "train/loss_nats": lambda line: line["loss_nats"],
        "train/bits_per_byte": lambda line: line["bits_per_byte"],
        "train/gradient_norm": lambda line: line["gradient_norm"],
        "train/learning_rate": lambda line: line["learning_rate"],
        "train/tokens_per_sec": lambda line: line["tokens_per_sec"],
        "train/share_of_peak": lambda line: line["share_of_peak"],
    }
    for stage in steps[0]["stage_gradient_norms"]:
        of_steps[f"gradient_norm/{stage}"] = lambda line, stage=stage: line["stage_gradient_norms"][stage]
    if steps[0]["memory"]["resident_bytes"] is not None:
        of_steps["memory/resident_mib"] = lambda line: line["memory"]["resident_bytes"] / 2**20
    of_evaluations = {
        "held_out/bits_per_byte": lambda line: line["held_out"]["bits_per_byte"],
        "held_out/loss_nats": lambda line: line["held_out"]["nats_per_token"],
    }
    for source in ["whale", "docs"]:
        name = f"held_out_bits_per_byte/{source}"
        of_evaluations[name] = lambda line, source=source: line["sources"][source]["bits_per_byte"]
    for curves, told in [(of_steps, steps), (of_evaluations, evaluations)]:
        for tag, value in curves.items():
            yield tag, [(line["step"], value(line)) for line in told]


def check(load_fast):
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", run / "tensorboard", "--port", "0",
         f"--load_fast={load_fast}", "--reload_interval", "1", "--samples_per_plugin", "text=100,histograms=100"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )
    try:
        for line in server.stderr:
            if found := re.search(r"http://\S+", line):
                address = found.group().rstrip("/")
                break
        else:
            sys.exit("TensorBoard did not start")

        def get(path, **query):
            with urllib.request.urlopen(f"{address}/data/plugin/{path}?{urllib.parse.urlencode(query)}") as reply:
                return json.load(reply)

        tags = {}
        for _ in range(60):
            # It reads in the background; histograms are the last that a run writes into a file.
            tags = {plugin: get(f"{plugin}/tags").get(".", {}) for plugin in ["scalars", "histograms", "text"]}
            if all(tags.values()) and len(get("histograms/histograms", run=".", tag="weights/head")) == len(evaluations):
                break
            time.sleep(1)

        expected = dict(expected_scalars())
        missing = set(expected) - set(tags["scalars"])
        assert not missing, f"no curves {missing} among {sorted(tags['scalars'])}"
        for tag, points in expected.items():
            served = [(step, value) for _, step, value in get("scalars/scalars", run=".", tag=tag)]
            assert [step for step, _ in served] == [step for step, _ in points], (tag, served, points)
            for (_, found), (step, told) in zip(served, points):
                assert math.isclose(found, told, rel_tol=1e-6), (tag, step, found, told)

        texts = get("text/text", run=".", tag="sample")
        assert [text["step"] for text in texts] == [line["step"] for line in evaluations], texts
        for text, line in zip(texts, evaluations):
            assert text["text"].startswith("<pre><code>The "), text
            letters = re.sub(r"[^a-z]", "", re.sub(r"<[^>]*>|&\w+;", "", text["text"]).lower())
            assert letters == re.sub(r"[^a-z]", "", line["sample"].lower()), (text, line["sample"])

        stages = set(steps[0]["stage_gradient_norms"])
        for kind in ["weights", "gradients"]:
            missing = {f"{kind}/{stage}" for stage in stages} - set(tags["histograms"])
            assert not missing, f"no histograms {missing} among {sorted(tags['histograms'])}"
        for tag in tags["histograms"]:
            told = [line["step"] for line in evaluations if line["step"] > 0 or tag.startswith("weights")]
            served = get("histograms/histograms", run=".", tag=tag)
            assert [step for _, step, _ in served] == told, (tag, served, told)
            sizes = {sum(count for _, _, count in buckets) for _, _, buckets in served}
            assert len(sizes) == 1 and sizes.pop() > 0, (tag, served)
            for _, _, buckets in served:
                assert all(left <= right for left, right, _ in buckets), (tag, buckets)
        counts = {kind: sum(b[2] for b in get("histograms/histograms", run=".", tag=f"{kind}/head")[0][2])
                  for kind in ["weights", "gradients"]}
        assert counts["weights"] == counts["gradients"], counts
        print(f"TensorBoard (load_fast={load_fast}) shows {len(expected)} curves, {len(texts)} samples and "
              f"{len(tags['histograms'])} histograms as recorded")
    finally:
        server.terminate()
        server.wait()


for load_fast in ["true", "false"]:
    check(load_fast)
