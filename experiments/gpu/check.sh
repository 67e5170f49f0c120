#!/usr/bin/env bash
# Everything to measure on a graphics card, in at most six minutes, with programs that `build.sh --pack` has made:
#
#   tar -xf photon-gpu.tar.xz && experiments/gpu/check.sh [FOLDER FOR THE RESULTS]
#
# Needs the NVIDIA driver, libnvrtc and the CUDA headers (CUDA_PATH or /usr/local/cuda), and Python 3.9. It prints a table
# and writes results.json. A rehearsal without a card: experiments/gpu/check.sh OUT --rehearse wgpu
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-"$here/../../runs/gpu"}
shift $(($# > 0 ? 1 : 0))
if [ -z "${CUDA_PATH-}" ] && [ -d /usr/local/cuda ]; then
    export CUDA_PATH=/usr/local/cuda
fi
exec python3 "$here/check.py" "$out" "$@"
