#!/bin/sh
# Speed and memory of the two models of `run.sh` in every regime, at batch 1 and at the largest batch for 64 MiB of
# caches. From the repository root, on a machine at rest; half an hour, most of it the flat model's prefill of 32 768.
set -eu
runs=${RUNS:-runs}
infer=${INFER:-cargo run --release --bin photon-infer --}
bench() {
    model=$1
    shift
    echo "## $model: $*"
    $infer bench --model "$runs/cache-$model/checkpoints/best" "$@"
}
photon=exact,exact-int8,int8-int4,int4,blog-recipe,tiny-memory,recursive
flat=exact,exact-int8,int8-int4,int4
for regime in prefill-heavy decode-heavy 8k; do
    bench photon --regime $regime --preset $photon
    bench flat --regime $regime --preset $flat --repeats 1
done
for model in photon flat; do
    bench $model --regime prefill-heavy --preset exact,exact-int8,int4 --memory-gib 0.0625 --repeats 1
done
bench photon --regime 32k --preset $photon --repeats 1
bench flat --regime 32k --preset exact,exact-int8 --repeats 1
