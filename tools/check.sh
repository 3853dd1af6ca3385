#!/usr/bin/env bash
# make check: everything that reads the sources without building them. TIDY=1 adds clang-tidy on the files free of torch.
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

sources() { git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' | sort; }

format() {
  local version
  version=$(clang-format --version | sed -n 's/.*version \([0-9]*\).*/\1/p')
  if [ "$version" != 14 ]; then
    echo "check: clang-format $version found; the tree is formatted with 14, versions differ in details"
    sources | xargs -r clang-format --dry-run 2>&1 | grep -c warning | sed 's/$/ places differ/' || true
    return 0
  fi
  sources | xargs -r clang-format --dry-run --Werror
}

tidy() {
  [ -f build/compile_commands.json ] || { echo "check: clang-tidy needs build/compile_commands.json: run make first"; return 1; }
  sources | grep '\.cpp$' | xargs grep -LE 'ATen|torch' | grep -v '^tests/' | xargs -r -P "$(nproc)" -n 4 clang-tidy -p build --quiet --warnings-as-errors='*'
}

step "include order" "$python" tools/check_includes.py
step "sizes and names" "$python" tools/check_sizes.py
step "documents" "$python" tools/check_docs.py
if command -v clang-format >/dev/null; then step "format" format; else echo "check: format left out, no clang-format"; fi
if [ "${TIDY-0}" = 1 ]; then step "tidy" tidy; else echo "check: tidy left out (TIDY=1 runs it, minutes)"; fi
exit $status
