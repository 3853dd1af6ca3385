#!/usr/bin/env bash
# make demo: a small fresh model learns a task by GRPO, from a few right answers to most; then its own last rollouts show
# that the shared update is the dense one (verify) and how much faster it is (bench). Ends with the path of a report.
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
show "A fresh model learns to look things up in a long document: warm start, then GRPO" \
  "$program" grpo --out "$run" --seed "${SEED:-0}" --task retrieval --prompt-length 512 --max-response-length 8 \
  --train-batch-size 32 --n 16 --lr 5e-4 --steps 200 --test-freq 20 --save-freq 50 --show 2 \
  --expect-accuracy 0.7
show "Is the shared update of this batch the dense one?" "$program" verify "${data[@]}"
show "How fast is it, dense and shared" "$program" bench "${data[@]}"
show "The run as one page" "$program" report "$run"
printf '\nThe trained model, a Hugging Face directory: %s\nThe report: %s\n' "$PWD/$run/model" "$PWD/$run/report.html"
