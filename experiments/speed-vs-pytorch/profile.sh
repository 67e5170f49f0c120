#!/usr/bin/env bash
# Where the time of training goes: samples by function, on the CPU. Needs Linux perf.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --release
samples=$(mktemp)
perf record -F 200 -o "$samples" target/release/photon-train bench configs/model/flat-small.toml \
    --batch-size 8 --seq-len 256 --steps 10 --device cpu
perf report -i "$samples" --no-children --percent-limit 1 -g none --stdio
rm -f "$samples"
