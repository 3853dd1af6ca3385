#!/usr/bin/env bash
# make gpu-check: what needs a GPU. Every operation against the CPU's answer and how fast it runs, with own attention, with
# FlashAttention-2 and, on Hopper, with cuDNN; then a small model that learns on the GPU and whose shared update is compared
# with the dense one; then dense against shared. Results: bench/results/gpu-NAME-*.json, and docs/hardware/NAME.json, the
# GPU as a machine for `espalier plan --machine`; each is put there when it is whole. Exit 6: something differs; 8: the GPU
# cannot be used.
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
name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr -cd 'A-Za-z0-9')
results=bench/results/gpu-$name
status=0
for attention in own flash cudnn; do
  code=0
  build/espalier selftest --device cuda --attention "$attention" --json >"$out/selftest.json" || code=$?
  case "$code" in
    0) ;;
    6) status=6 ;;
    8)
      [ "$attention" != own ] || exit 8
      echo "gpu-check: without --attention $attention (the reason stands above)"
      continue
      ;;
    *) exit "$code" ;;
  esac
  mv "$out/selftest.json" "$results-selftest-$attention.json"
done
"$(cat build/setup/python)" - "$results-selftest-own.json" "$out/machine.json" <<'END'
import json, sys
told = json.load(open(sys.argv[1]))
json.dump(told["profile"], open(sys.argv[2], "w"), indent=1)
for rate in told["rates"]:
    print(rate["operation"], rate["rows"], "rows", f"{1e3 * rate['seconds']:.3f} ms",
          *(f"{1e-9 * rate[unit]:.0f} G{unit[0].upper()}/s" for unit in ("bytes_per_second", "flops_per_second") if rate[unit]))
END
mkdir -p docs/hardware
mv "$out/machine.json" "docs/hardware/$name.json"
build/espalier grpo --device cuda --out "$out/run" --task copy --prompt-length 64 --max-response-length 8 \
  --train-batch-size 8 --n 8 --steps 2
for dtype in float64 float32 bfloat16; do
  build/espalier verify --device cuda --dtype "$dtype" --model "$out/run/model" \
    --rollouts "$out/run/last_rollouts.jsonl" || status=$?
done
build/espalier bench --device cuda --dtype bfloat16 --model "$out/run/model" --rollouts "$out/run/last_rollouts.jsonl" \
  --json >"$out/bench.json" && mv "$out/bench.json" "$results-bench.json" || status=$?
echo "gpu-check: results in $results-*.json and docs/hardware/$name.json"
exit "$status"
