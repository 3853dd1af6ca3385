#!/usr/bin/env bash
# make gpu-check: what needs a GPU. Every operation against the CPU's answer, then a small model that learns on the GPU
# and whose shared update is compared with the dense one. Results: build/gpu_check/. Exit 6: something differs.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v nvidia-smi >/dev/null 2>&1 || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "gpu-check: no GPU on this machine: nothing was checked"
  exit 0
fi
make all cuda
out=build/gpu_check
rm -rf "$out"
mkdir -p "$out"
nvidia-smi -L
status=0
build/espalier selftest --device cuda --json >"$out/selftest.json" || status=$?
build/espalier selftest --device cuda | tail -60 || status=$?
build/espalier grpo --device cuda --out "$out/run" --task copy --prompt-length 64 --max-response-length 8 \
  --train-batch-size 8 --n 8 --steps 2
for dtype in float64 float32 bfloat16; do
  build/espalier verify --device cuda --dtype "$dtype" --model "$out/run/model" \
    --rollouts "$out/run/last_rollouts.jsonl" || status=$?
done
echo "gpu-check: results in $out"
exit "$status"
