#!/usr/bin/env bash
# make aarch64: the program, the core library and tests of the CPU kernels for aarch64, built by a cross compiler and run under qemu-user:
# --version, selftest, verify in float64, the unit tests below, log-probs and entropies, which must have the bits of this machine's build, and
# gradients. Everything lies in build/aarch64. An hour or more on two cores.
#
#   tools/aarch64.sh [--if-possible]   --if-possible: says what is missing and is content, for make sweep
#
# Exit 1: a check failed. Exit 2: a tool is missing; it is named.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=build/aarch64
root=$PWD/$folder/root
missing=()
for need in aarch64-linux-gnu-g++=g++-aarch64-linux-gnu qemu-aarch64=qemu-user apt-get=apt dpkg-deb=dpkg cmake=cmake ninja=ninja-build; do
  command -v "${need%%=*}" >/dev/null || missing+=("${need##*=}")
done
if [ "$(uname -m)" = aarch64 ]; then
  echo "aarch64: this machine is one; make test runs everything"
  exit 0
elif [ ${#missing[@]} -gt 0 ]; then
  echo "aarch64: not built, because this machine lacks ${missing[*]} (Debian, Ubuntu: sudo apt-get install ${missing[*]})"
  [ "${1-}" = --if-possible ] && exit 0 || exit 2
fi
python=$(cat build/setup/python)

# Libraries as packages of Debian, and torch as pip would install it on such a machine; nothing of it is installed on this one.
packages="zlib1g zlib1g-dev libzstd1 libzstd-dev libsimdjson-dev libgtest-dev nlohmann-json3-dev libcli11-dev libtomlplusplus-dev"
if [ ! -e "$root/unpacked" ]; then
  state=$PWD/$folder/apt
  mkdir -p "$state"/{lists/partial,archives/partial,packages} "$root"
  touch "$state/status"
  printf '%s\n' 'APT::Architecture "arm64";' 'APT::Architectures { "arm64"; };' 'APT::Sandbox::User "root";' "Dir::State \"$state\";" \
    "Dir::State::lists \"$state/lists\";" "Dir::State::status \"$state/status\";" "Dir::Cache \"$state\";" >"$state/apt.conf"
  export APT_CONFIG=$state/apt.conf
  apt-get -q update
  # Their names carry versions.
  boost=$(apt-cache depends libboost-dev | sed -n 's/.*Depends: \(libboost[0-9.]*-dev\).*/\1/p')
  simdjson=$(apt-cache depends libsimdjson-dev | sed -n 's/.*Depends: \(libsimdjson[0-9]*\).*/\1/p')
  (cd "$state/packages" && apt-get -q download $packages $boost $simdjson)
  for package in "$state"/packages/*.deb; do dpkg-deb -x "$package" "$root"; done
  unset APT_CONFIG
  platforms=(manylinux_2_28_aarch64 manylinux_2_25_aarch64 manylinux_2_17_aarch64 manylinux2014_aarch64)
  "$python" -m pip install --disable-pip-version-check --progress-bar off --quiet --no-deps --only-binary=:all: --python-version 3.11 \
    "${platforms[@]/#/--platform=}" --target "$root/python" -r tools/requirements-build.txt
  touch "$root/unpacked"
fi

tests="base/simd_test ops/adamw_kernels_test ops/delta_rule_test ops/own_products_test ops/row_kernels_test ops/attention_test"
cmake -G Ninja -B $folder/build -S . --toolchain cmake/aarch64-linux-gnu.cmake -DCMAKE_BUILD_TYPE=Release -DESPALIER_AARCH64_ROOT="$root" \
  -DESPALIER_TORCH_DIR="$root/python/torch" -DESPALIER_PYTHON="$python" >/dev/null
cmake --build $folder/build --parallel "${JOBS:-$(nproc)}" --target espalier_cli espalier_core $(basename -a $tests)

export QEMU_LD_PREFIX=/usr/aarch64-linux-gnu
libraries=$root/usr/lib/aarch64-linux-gnu:$(ls -d "$root"/python/torch/lib "$root"/python/nvidia/*/lib | paste -sd:)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=passive  # an emulated thread that waits busily takes a processor
emulated() { qemu-aarch64 -E LD_LIBRARY_PATH="$libraries" "$@"; }
status=0
run() {  # run NAME COMMAND...: one line for each check
  local name=$1 begin=$SECONDS
  if "${@:2}" >$folder/output.txt 2>&1; then
    echo "aarch64: $name: $((SECONDS - begin)) s: $(grep -v '^$' $folder/output.txt | tail -1)"
  else
    status=1
    tail -20 $folder/output.txt
    echo "aarch64: $name FAILED"
  fi
}
program=$folder/build/espalier
cases=$folder/cases
tools/gpu_cases.sh $cases
data=(--model $cases/model --rollouts $cases/rollouts.jsonl)
run "--version" emulated $program --version
run selftest emulated $program selftest
run "verify in float64" emulated $program verify "${data[@]}" --dtype float64
for test in $tests; do
  filter="*"
  [ $test != ops/attention_test ] || filter="AttentionOf/1.IsRightAtBlockEdges"  # in float32; selftest has attention in every number type
  run "$test" emulated $folder/build/tests/unit/$test --gtest_brief=1 --gtest_filter="$filter"
done

# Sums of a defined order (docs/mathematics.md, section 18) on both: the bits of every log-prob and entropy.
same_bits() {
  local options=("${data[@]}" --dtype "$1" --products own --schedule phased --quiet --entropies --overwrite)
  build/espalier score "${options[@]}" --out $cases/here.jsonl && emulated $program score "${options[@]}" --out $cases/there.jsonl &&
    cmp $cases/{here,there}.jsonl && echo "log-probs and entropies have the bits of this machine"
}
# Gradients have no bits of their own: the tiles of the attention's backward follow the registers.
near_gradients() {
  local options=("${data[@]}" --dtype float64 --schedule phased --quiet --steps 1)
  build/espalier train "${options[@]}" --gradients $cases/here.safetensors --out $cases/here &&
    emulated $program train "${options[@]}" --gradients $cases/there.safetensors --out $cases/there &&
    "$python" -c '
import sys
from safetensors.torch import load_file
here, there = map(load_file, sys.argv[1:])
assert set(here) == set(there)
far = (sum((here[n] - there[n]).square().sum() for n in here) / sum(g.square().sum() for g in here.values())).sqrt().item()
print(f"gradients of {len(here)} tensors within {far:.1e} of those of this machine; 1e-10 is allowed")
sys.exit(not far <= 1e-10)' $cases/{here,there}.safetensors
}
for dtype in float64 float32 bfloat16; do run "bits in $dtype" same_bits $dtype; done
run "gradients" near_gradients
exit $status
