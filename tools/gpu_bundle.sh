#!/usr/bin/env bash
# make gpu-bundle: build/gpu-bundle, a folder that starts on a machine with a GPU's driver and a Python with the torch of the build, without network
# and without a compiler: program, libraries, package, examples, cases, and first_hour.py, which runs them.
#   gpu_bundle.sh [FOLDER] [--rehearsal] [--carry WHEEL]...
# --rehearsal: with the emulated device in the place of CUDA's, for first_hour.py --device emulate. --carry: a wheel that the machine lacks, for the
# stages fa3 (flash_attn3_jax) and fla (fla_core, flash_linear_attention): pip download --no-deps -d FOLDER NAME.
set -euo pipefail
cd "$(dirname "$0")/.."
most_mib=64
out=build/gpu-bundle rehearsal= carried=()
while [ $# -gt 0 ]; do
  case "$1" in
    --rehearsal) rehearsal=yes ;;
    --carry)
      [ -f "${2:-}" ] || { echo "gpu-bundle: --carry: expected a wheel, found ${2:-nothing}" >&2; exit 2; }
      carried+=("$2")
      shift
      ;;
    *) out=$1 ;;
  esac
  shift
done
rm -rf "$out"
mkdir -p "$out/examples"
# FlashAttention 3 is changed before it is loaded (gpu_yardsticks.py); other wheels are packages as they are.
for wheel in ${carried[@]+"${carried[@]}"}; do
  mkdir -p "$out/carried"
  case "$(basename "$wheel")" in
    flash_attn3_jax-*) cp "$wheel" "$out/carried/" ;;
    *) tools/python -m zipfile -e "$wheel" "$out/carried" ;;
  esac
done
cmake --install build --component wheel --strip --prefix "$out" >/dev/null
cp -r python/espalier/. "$out/espalier/"
find "$out" -name __pycache__ -prune -exec rm -rf {} +
bin=$out/espalier/bin
# Libraries that the target may lack, by the name that the program asks for.
ldd build/espalier build/libespalier_core.so | awk '/lib(z|zstd|simdjson|gomp)\.so/ && $3 ~ /^\// {print $1, $3}' | sort -u | while read -r name path; do
  cp -L --remove-destination "$path" "$bin/$name"
done
find "$bin" -type l -exec sh -c 'cp --remove-destination "$(readlink -f "$1")" "$1"' _ {} \;
find "$bin" \( -name '*.so.*.*' -o -name 'libespalier_core.so.*' \) -delete
if [ -n "$rehearsal" ]; then
  rm -f "$bin/libespalier_cuda.so"
  cp -L build/libespalier_emulated.so "$bin/"
  for library in build/tests/cuda/libespalier_emulat*.so; do cp -L "$library" "$bin/"; done
elif [ ! -f "$bin/libespalier_cuda.so" ]; then
  echo "gpu-bundle: no libespalier_cuda.so: make cuda needs nvcc of CUDA 13" >&2
  exit 8
fi
cp examples/trl_grpo.py "$out/examples/"
cp tools/first_hour.py tools/gpu_yardsticks.py "$out/"
mkdir "$out/checks" "$out/checks/megatron"
cp tests/python/megatron/cpu.py "$out/checks/megatron/"
for name in device_megatron.py device_models.py make_model.py comparison.py hf_every_model.py hf_models.py hf_sweep.json; do
  cp "tests/python/$name" "$out/checks/"
done
tools/gpu_cases.sh "$out/cases"
size=$(du -sm "$out" | cut -f1)
if [ "$size" -ge "$most_mib" ]; then
  echo "gpu-bundle: $size MiB, $most_mib are the most: $(du -m "$out"/espalier/bin/* | sort -rn | head -3 | tr '\n' ' ')" >&2
  exit 1
fi
echo "gpu-bundle: $out, $size MiB. On the machine with the GPU:  python3 first_hour.py --out RESULTS"
