#!/usr/bin/env bash
# make demo: a small fresh model learns a task by GRPO, from a few right answers to most; then its own last rollouts show
# how much faster a shared update is (bench) and that it is the dense one (verify). Ends with the verdict and a page.
# --schedule phased shows the three phases at a size at which auto would put a whole group into one wave.
# SEED=n: another start. Exit code 6 where the model did not learn, or the updates differ.
set -euo pipefail
cd "$(dirname "$0")/.."
program=build/espalier
run=build/demo/run
data=(--model "$run/model" --rollouts "$run/last_rollouts.jsonl")

show() {
  printf '\n\033[1m%s\033[0m\n$ %s\n\n' "$1" "${*:2}"
  "${@:2}"
}

rm -rf build/demo
mkdir -p build/demo
show "A fresh model learns to recite from a long document: warm start, then GRPO" \
  "$program" grpo --out "$run" --seed "${SEED:-0}" --task recite --prompt-length 512 --max-response-length 16 \
  --train-batch-size 32 --n 16 --lr 1e-3 --steps 60 --test-freq 20 --save-freq 30 --show 1 --schedule phased \
  --expect-accuracy 0.55
show "How fast is an update on its last rollouts, dense and shared" "$program" bench "${data[@]}"
show "The run as one page" "$program" report "$run"
# A step of two groups: the whole batch in float64 and under every schedule would take minutes.
show "Is the shared update the dense one?" "$program" verify "${data[@]}" --mini-batch-size 32
"$(cat build/setup/python)" - "$run" <<'PYTHON'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1] + "/metrics.jsonl")]
right = [line["accuracy"] for line in lines if line["kind"] == "evaluation"]
print(f"\nThe model answered {right[0]:.0%} of the held-out questions right before GRPO and {right[-1]:.0%} after it,")
print("and the shared update of two of its last groups is the dense one up to rounding (PASS above).")
PYTHON
printf 'The page about the run: %s\nThe model, a Hugging Face directory: %s\n' "$PWD/$run/report.html" "$PWD/$run/model"
