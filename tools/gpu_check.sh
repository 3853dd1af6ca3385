#!/usr/bin/env bash
# make gpu-check: tools/first_hour.py in place, on a machine with a GPU. Its results become bench/results/gpu-NAME/, and
# docs/hardware/NAME.json, the GPU as a machine for `espalier plan --machine`, once everything has run. Arguments go to
# first_hour.py. Exit 6: a stage failed; 8: the GPU cannot be used, and nothing was written.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v nvidia-smi >/dev/null 2>&1 || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "gpu-check: no GPU on this machine: nothing was checked"
  exit 0
fi
make all cuda
out=build/gpu_check
rm -rf "$out"
tools/gpu_cases.sh build/gpu_cases
status=0
tools/python tools/first_hour.py --out "$out" "$@" || status=$?
[ "$status" != 8 ] || exit 8
name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr -cd 'A-Za-z0-9')
mkdir -p docs/hardware "bench/results/gpu-$name"
cp "$out"/[0-9]*.json "$out/first_hour.md" "bench/results/gpu-$name/"
[ ! -f "$out/machine.json" ] || cp "$out/machine.json" "docs/hardware/$name.json"
echo "gpu-check: results in bench/results/gpu-$name/ and docs/hardware/$name.json"
exit "$status"
