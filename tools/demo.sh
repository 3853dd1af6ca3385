#!/usr/bin/env bash
# make demo: the main job on a small random model and rollouts with long shared prompts, both made on the spot.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=build/demo
program=build/espalier
data=(--model "$folder/model" --rollouts "$folder/rollouts.jsonl")

show() {
  printf '\n\033[1m%s\033[0m\n$ %s\n\n' "$1" "${*:2}"
  "${@:2}"
}

rm -rf "$folder"
"$(cat build/setup/python)" tools/make_demo.py "$folder"
show "What is in the file, and what sharing could save" "$program" inspect "$folder/rollouts.jsonl"
show "The schedule that would run, and why" "$program" plan "${data[@]}" --explain
show "The update as trainers do it today: every rollout on its own" "$program" train "${data[@]}" --schedule dense --out "$folder/dense"
show "The same update, every shared prompt computed once" "$program" train "${data[@]}" --out "$folder/shared"
show "Is it the same? Every gradient against the noise of two dense runs" "$program" verify "${data[@]}"
show "How fast is each schedule here" "$program" bench "${data[@]}"
printf '\nThe trained model is a Hugging Face directory: %s\n' "$folder/shared"
