#!/usr/bin/env bash
# Finds or makes what a build needs, and writes the chosen Python to build/setup/python.
#
#   tools/setup.sh program   compiler, headers, and a Python package folder that holds a torch of tools/torch_versions.txt
#   tools/setup.sh tests     the same, GoogleTest, and the packages of the Python tests
#
# PYTHON names the Python to use. Without it: ./.venv, then python3.13, python3.12, python3.11, python3, the first with such a
# torch. If none has one, .venv is made and filled with the pinned wheels of tools/requirements-*.txt.
# Quick when nothing is to do. Exit 2: something is missing that this script may not or cannot install; it is named.
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-program}
case "$mode" in program | tests) ;; *) echo "usage: tools/setup.sh program|tests" >&2; exit 2 ;; esac
python_file=build/setup/python
stamp_file=build/setup/$mode
log() { printf '[setup] %s\n' "$*" >&2; }
fail() { printf '[setup] %s\n' "$@" >&2; exit 2; }

# One line that changes whenever the answer of this script could: its own text, the pins, the wish for a Python.
stamp() { printf '%s ' "${PYTHON-}"; cat tools/setup.sh tools/torch_versions.txt tools/requirements-*.txt | cksum; }

# The minor version of torch that tools/torch_versions.txt calls $1.
torch_version() { sed -n "s/^$1 //p" tools/torch_versions.txt; }
torch_range="$(torch_version oldest) to $(torch_version newest)"

# Folder of Python $1's torch if its version is in the range, or nothing; with `outside`, a version that is not in it. torch is not imported.
torch_folder() {
  "$1" -c '
import importlib.util, os, re, sys
if sys.version_info < (3, 11):
    sys.exit()
oldest, newest = (tuple(map(int, version.split("."))) for version in sys.argv[1:3])
spec = importlib.util.find_spec("torch")
for folder in (spec.submodule_search_locations or []) if spec else []:
    version = os.path.join(folder, "version.py")
    found = re.search(r"__version__ = .((\d+)\.(\d+)\.[^\x27\x22]*)", open(version).read()) if os.path.exists(version) else None
    if found:
        inside = oldest <= (int(found[2]), int(found[3])) <= newest
        print(folder if sys.argv[3:] == [] and inside else found[1] if sys.argv[3:] and not inside else "", end="")
' "$(torch_version oldest)" "$(torch_version newest)" "${@:2}" 2>/dev/null || true
}
torch_outside() { torch_folder "$1" outside; }

# The Python package (python/espalier) is on the path of .venv through this file; a Python of the user's own is left as
# it is and takes PYTHONPATH.
package_link=espalier.pth
package_linked() {
  case "$1" in
    "$PWD"/.venv/*) [ "$(cat .venv/lib/python3*/site-packages/$package_link 2>/dev/null)" = "$PWD/python" ] ;;
  esac
}

if [ -f "$stamp_file" ] && [ "$(cat "$stamp_file")" = "$(stamp)" ] && [ -f "$python_file" ] &&
  [ -n "$(torch_folder "$(cat "$python_file")")" ] && package_linked "$(cat "$python_file")"; then
  exit 0
fi

# ---- system packages ------------------------------------------------------------------------------------------------

have() { command -v "$1" >/dev/null 2>&1; }

# Names the Debian packages whose header the compiler does not find: pairs "header package" on stdin.
missing_headers() {
  local header package source=""
  while read -r header package; do
    source+="#if !__has_include(<$header>)"$'\n'"missing $package"$'\n'"#endif"$'\n'
  done
  printf '%s' "$source" | g++ -std=c++20 -E -P -x c++ - | sed -n 's/^missing //p' | tr -d ' '
}

# Sets `required` and `optional` to the missing Debian packages. Without g++ every header counts as missing.
find_missing() {
  required=() optional=()
  have g++ || required+=(g++)
  have cmake || required+=(cmake)
  have make || required+=(make)
  local headers="nlohmann/json.hpp nlohmann-json3-dev
CLI/CLI.hpp libcli11-dev
toml++/toml.h libtomlplusplus-dev
zlib.h zlib1g-dev
zstd.h libzstd-dev
simdjson.h libsimdjson-dev
boost/beast/http.hpp libboost-dev"  # sockets of espalier serve: headers alone, one thread for thousands of waiting clients
  local test_headers="gtest/gtest.h libgtest-dev
gmock/gmock.h libgmock-dev"
  if have g++; then
    mapfile -t -O "${#required[@]}" required < <(missing_headers <<<"$headers")
    mapfile -t optional < <(missing_headers <<<"$test_headers")
  else
    mapfile -t -O "${#required[@]}" required < <(sed 's/.* //' <<<"$headers")
    mapfile -t optional < <(sed 's/.* //' <<<"$test_headers")
  fi
  if [ "$mode" = tests ]; then
    required+=(${optional[@]+"${optional[@]}"})
    optional=()
  fi
  have ninja || optional+=(ninja-build)
  have ccache || optional+=(ccache)
}

install_packages() {
  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    have sudo && sudo -n true 2>/dev/null || return 1
    as_root=(sudo -n)
  fi
  have apt-get || return 1
  log "apt-get install $*"
  ${as_root[@]+"${as_root[@]}"} apt-get update -qq >&2 || log "apt-get update failed; going on with the lists that are there"
  ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

find_missing
wanted=(${required[@]+"${required[@]}"} ${optional[@]+"${optional[@]}"})
if [ ${#wanted[@]} -gt 0 ]; then
  install_packages "${wanted[@]}" || true
  find_missing
  if [ ${#required[@]} -gt 0 ]; then
    fail "missing system packages: ${required[*]}" \
      "install them (Debian, Ubuntu):  sudo apt-get install ${required[*]} ${optional[*]-}"
  fi
  [ ${#optional[@]} -eq 0 ] || log "not found, going on without: ${optional[*]}"
fi
gxx=$(g++ -dumpfullversion)
[ "${gxx%%.*}" -ge 12 ] || fail "g++ $gxx found, 12 or newer is needed (C++20)"
cmake_version=$(cmake --version | sed -n '1s/[^0-9]*\([0-9]*\.[0-9]*\).*/\1/p')
[ "$(printf '%s\n' 3.25 "$cmake_version" | sort -V | head -1)" = 3.25 ] || fail "cmake $cmake_version found, 3.25 or newer is needed"

# ---- Python and torch -----------------------------------------------------------------------------------------------

# Absolute path of a Python that runs and is 3.11 or newer, or nothing.
working_python() {
  "$1" -c 'import os, sys; print(os.path.abspath(sys.executable)) if sys.version_info >= (3, 11) else None' 2>/dev/null || true
}

# Sets `python` to the first candidate with a torch in the range, and `base` to the first that could make .venv.
choose_python() {
  python="" base=""
  local candidate path outside
  for candidate in ${PYTHON:+"$PYTHON"} .venv/bin/python python3.13 python3.12 python3.11 python3; do
    path=$(working_python "$candidate")
    if [ -z "$path" ] && [ "$candidate" = "${PYTHON-}" ]; then
      have "$PYTHON" || fail "PYTHON=$PYTHON: no such program"
      fail "PYTHON=$PYTHON: expected a Python 3.11 or newer, got $("$PYTHON" --version 2>&1 | head -1 || true)"
    fi
    [ -n "$path" ] || continue
    case "$path" in "$PWD"/.venv/*) ;; *) [ -n "$base" ] || base=$path ;; esac
    if [ -n "$(torch_folder "$path")" ]; then
      python=$path
      return
    fi
    outside=$(torch_outside "$path")
    if [ "$candidate" = "${PYTHON-}" ]; then
      [ -z "$outside" ] || fail "PYTHON=$PYTHON has torch $outside, expected $torch_range" \
        "upgrade it ($PYTHON -m pip install 'torch==$(torch_version newest).*'), or leave PYTHON out: make then installs torch $(torch_version downloaded) into .venv"
      log "PYTHON=$PYTHON has no torch: using another Python or making .venv"
    elif [ -n "$outside" ]; then
      log "$path has torch $outside, expected $torch_range: not used"
    fi
  done
}

choose_python
if [ -z "$python$base" ]; then
  install_packages python3 python3-venv || true
  choose_python
fi

pip_install() {
  local quiet=()
  [ -t 2 ] || quiet=(--progress-bar off)
  "$1" -m pip install --disable-pip-version-check --no-input --no-deps ${quiet[@]+"${quiet[@]}"} "${@:2}" >&2
}

# Installs what the loader misses when torch is imported, one library at a time; prints nothing when all is there.
complete_cuda_libraries() {
  local error library pin
  for _ in $(seq 16); do
    error=$("$python" -c 'import torch' 2>&1) && return 0
    library=$(sed -n 's/.*\(lib[A-Za-z]*[a-z_]*\)\.so[.0-9]*: cannot open shared object file.*/\1/p' <<<"$error" | tail -1)
    [ -n "$library" ] || break
    pin=$(grep -E "# .*\b$library\b" tools/requirements-cuda-libraries.txt | sed 's/ *#.*//') || break
    log "import torch misses $library: installing $pin"
    pip_install "$python" "$pin" || break
  done
  printf '%s\n' "$error" | tail -3 >&2
  return 1
}

if [ -z "$python" ]; then
  [ -n "$base" ] || fail "no Python 3.11 or newer found; install one (Debian, Ubuntu: sudo apt-get install python3 python3-venv) or set PYTHON"
  if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
    install_packages python3-venv || true
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
      fail "$base cannot make virtual environments; install them (Debian, Ubuntu: sudo apt-get install python3-venv)"
  fi
  [ -n "$(working_python .venv/bin/python)" ] || { log "making .venv with $base"; "$base" -m venv --clear .venv; }
  python=$PWD/.venv/bin/python
  log "installing torch $(torch_version downloaded) into .venv (0.5 GB to download, 1.3 GB on disk)"
fi
case "$python" in
  "$PWD"/.venv/*)  # also when torch is there already: an interrupted installation is completed
    pip_install "$python" -q -r tools/requirements-build.txt -r tools/requirements-text.txt ||
      fail "pip could not install tools/requirements-build.txt and requirements-text.txt; where there is no network, set PYTHON to a Python with torch $torch_range"
    [ -n "$(torch_folder "$python")" ] || fail "torch $(torch_version downloaded) is not in .venv after the installation: remove .venv and try again"
    # torchrun imports torch, which wants CUDA libraries that the program itself has no use for.
    complete_cuda_libraries || log "import torch fails, so .venv/bin/torchrun does not work (the error stands above); the program does"
    ;;
esac

# Headers and a disassembler for the CUDA part, where there is a compiler for it: in .venv, else in build/python.
in_packages() { ls "$(torch_folder "$python")/../$1" "build/python/$1" 2>/dev/null; }
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
if [ -n "$nvcc" ] && { [ -z "$(in_packages include/cudnn_frontend.h)" ] || [ -z "$(in_packages nvidia/cu13/bin/nvdisasm)" ]; }; then
  target=(--upgrade --target build/python)
  case "$python" in "$PWD"/.venv/*) target=() ;; esac
  pip_install "$python" -q ${target[@]+"${target[@]}"} -r tools/requirements-cuda-build.txt ||
    log "pip could not install tools/requirements-cuda-build.txt: make cuda will be without --attention cudnn"
fi

# ---- packages of the Python tests -----------------------------------------------------------------------------------

test_packages="numpy, torch, transformers, safetensors, pyarrow, pytest, trl, peft, datasets, scikit_build_core, mypy"

# Whether tool $1 is here in the version that tools/check.sh wants.
have_version_14() {
  local candidate
  for candidate in "build/python/bin/$1" "$1-14" "$1"; do
    ! have "$candidate" || ! "$candidate" --version 2>/dev/null | grep -q 'version 14\.' || return 0
  done
  return 1
}

# The first Python 3.12 or newer, or nothing.
python_for_megatron() {
  local candidate
  for candidate in python3.12 python3.13 python3.14 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9].*/bin/python3 python3; do
    "$candidate" -c 'import ensurepip, os, sys, venv
if sys.version_info < (3, 12): sys.exit(1)
print(os.path.abspath(sys.executable))' 2>/dev/null && return
  done
  return 1
}

# .venv-megatron with the newest Megatron-Core. The CUDA libraries that torch opens are those of the torch at hand.
make_megatron_environment() {
  local base own=.venv-megatron/bin/python libraries
  if ! "$own" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    base=$(python_for_megatron) || { log "no Python 3.12 or newer: the tests with Megatron-Core 0.19.2 are left out"; return; }
    log "making .venv-megatron with $base (torch once more, 0.5 GB to download)"
    "$base" -m venv --clear .venv-megatron
  fi
  pip_install "$own" -q -r tools/requirements-megatron.txt || { log "pip could not install tools/requirements-megatron.txt: its tests are left out"; return; }
  libraries=$(dirname "$(torch_folder "$python")")/nvidia
  [ ! -d "$libraries" ] || ln -sfn "$libraries" "$("$own" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia"
  "$own" -c 'import torch' || { log "torch cannot be imported from .venv-megatron (the error stands above): its tests are left out"; rm -rf .venv-megatron; }
}

if [ "$mode" = tests ]; then
  case "$python" in
    "$PWD"/.venv/*)
      pip_install "$python" -q -r tools/requirements-tests.txt || fail "pip could not install tools/requirements-tests.txt"
      "$python" -c 'import torch' || fail "torch cannot be imported from .venv (the error stands above)"
      "$python" -c "import $test_packages" || fail "the packages of the Python tests do not work in .venv: remove it and try again"
      ;;
    *)
      # A Python of the user's own is left as it is: what it lacks goes to build/python, which the test runner adds.
      if ! PYTHONPATH=build/python "$python" -c "import $test_packages" 2>/dev/null; then
        mkdir -p build/setup
        grep -hvE '^(#|nvidia-|typing_extensions)' tools/requirements-t*.txt >build/setup/pins.txt
        log "$python lacks some of $test_packages: installing the pinned ones into build/python"
        pip_install "$python" -q --upgrade --target build/python -r build/setup/pins.txt ||
          log "pip could not install them: the Python tests that need them will be skipped"
      fi
      if ! have_version_14 clang-format || ! have_version_14 clang-tidy; then
        log "no clang-format and clang-tidy of version 14: installing them into build/python, for make check"
        mapfile -t pins < <(grep '^clang-' tools/requirements-tests.txt)
        pip_install "$python" -q --upgrade --target build/python "${pins[@]}" || log "pip could not install them: make check will say so"
      fi
      ;;
  esac
  make_megatron_environment
fi

case "$python" in
  "$PWD"/.venv/*)
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf '%s\n' "$PWD/python" >"$site/$package_link"
    ;;
  *)
    log "for import espalier in $python:  export PYTHONPATH=$PWD/python"
    "$python" -c 'import tokenizers, jinja2' 2>/dev/null ||
      log "for prompts that are text:  $python -m pip install tokenizers jinja2"
    ;;
esac

mkdir -p build/setup
printf '%s\n' "$python" >"$python_file"
stamp >"$stamp_file"
log "using $python ($(torch_folder "$python"))"
