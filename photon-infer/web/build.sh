#!/usr/bin/env bash
# The page, ready to be served: photon-infer/web/build.sh [FOLDER], target/web unless another is named.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-target/web}

rustup target list --installed | grep -q '^wasm32-unknown-unknown$' || rustup target add wasm32-unknown-unknown
RUSTFLAGS="-C target-feature=+simd128" \
    cargo rustc --profile web --target wasm32-unknown-unknown --package photon-web --lib --crate-type cdylib
cargo run --release --manifest-path photon-infer/web/bindgen/Cargo.toml --target-dir target/bindgen -- \
    target/wasm32-unknown-unknown/web/photon_web.wasm "$out"
cp photon-infer/web/page/* "$out"
echo "The page is in $out; serve it, as by: python3 -m http.server --bind 127.0.0.1 --directory $out" >&2
