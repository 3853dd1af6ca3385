#!/usr/bin/env bash
# make torches: the program, the core library and the tests of `make fast` with the oldest and the newest torch that the sources are held to
# (tools/torch_versions.txt), and `espalier verify` in float64. Each has a folder of its own, build/torch-VERSION, with an environment and a
# build: 2 to 7 GB, and the time of a first build.
#
#   tools/other_torches.sh [--if-possible] [VERSION...]   VERSION: as 2.13, in place of those two
#                                                         --if-possible: content where pip cannot install one, for make sweep
#
# PYTHON names the Python of the environments (default: the one that .venv was made of, or python3). Exit 1: a build or a check failed.
set -euo pipefail
cd "$(dirname "$0")/.."
optional=
if [ "${1-}" = --if-possible ]; then optional=yes && shift; fi
[ -f build/setup/tests ] || tools/setup.sh tests
base=${PYTHON:-$("$(cat build/setup/python)" -c 'import sys; print(sys._base_executable)')}
[ $# -gt 0 ] || set -- $(sed -n 's/^oldest //p; s/^newest //p' tools/torch_versions.txt)
status=0

# Prints what pip says only if it fails.
environment() {
  local python=$1/python/bin/python version=$2
  [ -x "$python" ] || "$base" -m venv "$1/python"
  grep -hvE '^(#|nvidia-|clang-|ruff)' tools/requirements-te*.txt >"$1/pins.txt"
  "$python" -m pip install --disable-pip-version-check --no-input --progress-bar off --quiet "torch==$version.*" &&
    "$python" -m pip install --disable-pip-version-check --no-input --progress-bar off --quiet --no-deps -r "$1/pins.txt" &&
    "$python" -c 'import torch, transformers, pytest'
}

check() {
  local folder=$1 python=$PWD/$1/python/bin/python build=$1/build generator="Unix Makefiles"
  ! command -v ninja >/dev/null || generator=Ninja
  [ -f "$build/CMakeCache.txt" ] || cmake -G "$generator" -B "$build" -S . -DCMAKE_BUILD_TYPE=Release -DESPALIER_PYTHON="$python" >/dev/null || return
  cmake --build "$build" --parallel "${JOBS:-$(nproc)}" >"$folder/build.txt" 2>&1 || { tail -30 "$folder/build.txt"; return 1; }
  if grep -m 3 'warning:' "$folder/build.txt"; then return 1; fi
  tools/gpu_cases.sh "$folder/cases" "$build/espalier" &&
    "$build/espalier" verify --model "$folder/cases/model" --rollouts "$folder/cases/rollouts.jsonl" --dtype float64 --quiet &&
    "$python" tools/run_tests.py --build "$build" --tier fast
}

for version in "$@"; do
  folder=build/torch-$version begin=$SECONDS
  mkdir -p "$folder"
  if ! environment "$folder" "$version"; then
    echo "torch $version: pip could not install it into $folder/python"
    [ -n "$optional" ] || status=1
  elif check "$folder"; then
    echo "torch $("$folder/python/bin/python" -c 'import platform, torch; print(torch.__version__ + ", Python " + platform.python_version())'): builds without warnings and passes, $((SECONDS - begin)) s"
  else
    echo "torch $version: FAILED"
    status=1
  fi
done
exit $status
