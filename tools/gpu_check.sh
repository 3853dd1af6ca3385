#!/usr/bin/env bash
# What needs a GPU. This version of Espalier runs on CPUs only, so there is nothing to check on one.
set -euo pipefail
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "gpu-check: a GPU is there, but this version has no part that uses one: nothing was checked"
else
  echo "gpu-check: no GPU on this machine: nothing was checked"
fi
