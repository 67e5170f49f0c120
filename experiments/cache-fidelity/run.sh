#!/bin/sh
# Trains the two models unless they are there, and measures what every preset and policy costs. From the repository root.
set -eu
here=experiments/cache-fidelity
runs=${RUNS:-runs}
train="cargo run --release --bin photon-train --"
infer="cargo run --release --bin photon-infer --"
for model in photon flat; do
    [ -d "$runs/cache-$model/checkpoints/best" ] || $train run $here/$model.toml --out "$runs/cache-$model"
done
# The end of the novel, which neither model has seen.
text=$(mktemp)
trap 'rm -f "$text"' EXIT
tail -c 60000 configs/data/moby-dick.txt > "$text"

echo "## photon: every preset"
$infer fidelity --model "$runs/cache-photon/checkpoints/best" --text "$text" --context 1024 --prompt 256 --max-tokens 8192 \
    --preset exact,bounded,f16,exact-int8,int8-int4,int4,blog-recipe,tiny-memory,recursive
echo "## flat: storage"
$infer fidelity --model "$runs/cache-flat/checkpoints/best" --text "$text" --context 1024 --prompt 256 --max-tokens 8192 \
    --preset exact,f16,exact-int8,int8-int4,int4
echo "## flat: policies with a fifth of the entries"
$infer fidelity --model "$runs/cache-flat/checkpoints/best" --text "$text" --context 1024 --prompt 256 --max-tokens 8192 \
    --preset $here/policies/attention_mass.toml,$here/policies/attention_mass_alone.toml,$here/policies/lru.toml,$here/policies/tova.toml,$here/policies/snapkv.toml,$here/policies/knorm.toml,$here/policies/window.toml,$here/policies/random.toml
echo "## 8192 tokens of context: speed and bytes"
bench() {
    $infer bench --model "$runs/cache-flat/checkpoints/best" --model "$runs/cache-photon/checkpoints/best" \
        --prompt-tokens 8192 --repeats 1 "$@"
}
bench --preset exact,exact-int8,int4 --decode-tokens 64
bench --preset exact --decode-tokens 32 --batch-size 8
