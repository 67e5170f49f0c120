#!/bin/sh
# Trains a flat model that picks blocks by their scores unless it is there, and counts how often picked blocks are on the
# device, with and without prefetch. From the repository root.
set -eu
here=experiments/offload
runs=${RUNS:-runs}
train=${TRAIN:-cargo run --release --bin photon-train --}
infer=${INFER:-cargo run --release --bin photon-infer --}
[ -d "$runs/offload-picked/checkpoints/best" ] || $train run $here/picked.toml --out "$runs/offload-picked"
# Three places in the end of the novel, which the model has not seen.
prompt() {
    tail -c "$1" configs/data/moby-dick.txt | head -c 512
}
for resident in 8 16 32; do
    for prefetch in false true; do
        echo "## $resident resident blocks, prefetch $prefetch"
        $infer generate --model "$runs/offload-picked/checkpoints/best" --preset $here/offload.toml \
            --set caches.0.offload.resident_blocks=$resident --set caches.0.offload.prefetch=$prefetch \
            --prompt "$(prompt 50000)" --prompt "$(prompt 30000)" --prompt "$(prompt 10000)" \
            --max-tokens 512 --seed 1 --stats --format json | grep '"caches"'
    done
done
