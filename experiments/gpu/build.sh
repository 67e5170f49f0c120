#!/usr/bin/env bash
# Builds both programs with CUDA and WebGPU into target/gpu/release, without a CUDA toolkit and without LLVM:
#
#   experiments/gpu/build.sh [arguments of cargo build]
#   experiments/gpu/build.sh --pack     the same, stripped, and packed with the tree into target/gpu/photon-gpu.tar.xz
#
# cubecl-cuda depends on cubecl-llvm, whose build script downloads LLVM. photon has kernels compiled by NVRTC and never
# calls it, so cubecl-llvm beside this script stands in for it. Where LLVM can be downloaded, or is there already,
# `cargo build --release --features cuda` does without this script.
set -euo pipefail
cd "$(dirname "$0")/../.."

# The patch is written into the lock file: put back what was there.
kept=$(mktemp)
cp Cargo.lock "$kept"
trap 'cp "$kept" Cargo.lock; rm -f "$kept"' EXIT

pack=
if [ "${1-}" = --pack ]; then
    pack=yes
    shift
    set -- --config 'profile.release.strip="symbols"' --config 'profile.release.debug=false' "$@"
fi
cargo build --release --package photon-train --package photon-infer --features cuda --target-dir target/gpu \
    --config "patch.crates-io.cubecl-llvm.path=\"$PWD/experiments/gpu/cubecl-llvm\"" "$@"
if [ -n "$pack" ]; then
    git ls-files -z | tar --null --files-from=- --create --file target/gpu/photon-gpu.tar
    tar --append --file target/gpu/photon-gpu.tar target/gpu/release/photon-train target/gpu/release/photon-infer
    xz --force --threads=0 target/gpu/photon-gpu.tar
    ls -l target/gpu/photon-gpu.tar.xz
fi
