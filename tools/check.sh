#!/usr/bin/env bash
# make check: everything that reads the sources without building them.
#   TIDY=REVISION  clang-tidy goes over what differs from that revision (default HEAD: what is not committed)
#   TIDY=all       over everything; TIDY_MINUTES=n ends that early and says how far it came
#   TIDY=0         left out
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
[ ! -f build/setup/python ] || python=$(cat build/setup/python)
status=0
step() {
  local name=$1
  shift
  if "$@"; then echo "check: $name fine"; else echo "check: $name FAILED"; status=1; fi
}

sources() { git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' | sort; }

# The first of $1's candidates whose version is 14, or a complaint: versions differ in what they want.
version_14() {
  local candidate
  for candidate in ".venv/bin/$1" "build/python/bin/$1" "$1-14" "$1"; do
    command -v "$candidate" >/dev/null && "$candidate" --version 2>/dev/null | grep -q 'version 14\.' && { echo "$candidate"; return; }
  done
  echo "check: no $1 of version 14, the one that this tree is held to: tools/setup.sh tests installs it" >&2
  return 1
}

format() {
  local tool
  tool=$(version_14 clang-format) && sources | xargs -r "$tool" --dry-run --Werror
}

tidy() {
  local tool which=(--changed "$TIDY")
  [ "$TIDY" != all ] || which=()
  tool=$(version_14 clang-tidy) && "$python" tools/tidy.py --tidy "$tool" ${which[@]+"${which[@]}"} --minutes "${TIDY_MINUTES:-1000}"
}

step "include order" "$python" tools/check_includes.py
step "Python imports" "$python" tools/check_imports.py
step "faults of the mutation tests" "$python" tests/mutation/write_faulty_sources.py espalier
step "faults of the host code of a GPU" "$python" tests/mutation/write_faulty_sources.py --table tests/cuda/host_faults.py espalier
step "sizes and names" "$python" tools/check_sizes.py
step "documents" "$python" tools/check_docs.py
step "prose" "$python" tools/check_prose.py
step "Python style" "$python" -m ruff check --quiet python tools bench tests examples
step "Python types" "$python" -m mypy --no-error-summary
step "registers of kernels" "$python" tools/ptxas_facts.py
step "format" format
TIDY=${TIDY-HEAD}
if [ "$TIDY" = 0 ]; then
  echo "check: tidy left out, as TIDY=0 asks"
elif [ "$TIDY" = HEAD ] && [ -z "$(git status --porcelain -- '*.cpp' '*.h')" ]; then
  echo "check: tidy has nothing to do, all is committed (TIDY=main: what a branch changed; TIDY=all: everything)"
else
  step "tidy" tidy
fi
exit $status
