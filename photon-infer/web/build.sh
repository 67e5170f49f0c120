#!/usr/bin/env bash
# The page, ready to be served: photon-infer/web/build.sh [FOLDER], target/web unless another is named.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-target/web}

rustup target list --installed | grep -q '^wasm32-unknown-unknown$' || rustup target add wasm32-unknown-unknown
# The tool must be of the library's version.
version=$(sed -n '/^name = "wasm-bindgen"$/{n;s/version = "\(.*\)"/\1/p}' Cargo.lock)
bindgen=target/tools/bin/wasm-bindgen
if [ "$("$bindgen" --version 2>/dev/null)" != "wasm-bindgen $version" ]; then
    cargo install --quiet --locked --root target/tools --version "$version" wasm-bindgen-cli
fi

RUSTFLAGS="-C target-feature=+simd128" \
    cargo rustc --profile web --target wasm32-unknown-unknown --package photon-web --lib --crate-type cdylib
"$bindgen" --target web --no-typescript --out-dir "$out" target/wasm32-unknown-unknown/web/photon_web.wasm
cp photon-infer/web/page/* "$out"
echo "The page is in $out; serve it, as by: python3 -m http.server --bind 127.0.0.1 --directory $out" >&2
