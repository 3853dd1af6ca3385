"""Writes espalier/ops/cuda/hopper/wgmma_shapes.h: for each width of wgmma.mma_async of bfloat16 with float sums a function with its inline
assembly, once with the left factor in shared memory and once in registers.

    tools/make_wgmma.py            writes the file
    tools/make_wgmma.py --check    exit 1 if the file differs
"""

import sys
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "espalier/ops/cuda/hopper/wgmma_shapes.h"
WIDTHS = (32, 48, 64, 80, 96, 112, 128, 176, 192, 256)  # those of the kernels
HEAD = """// Written by tools/make_wgmma.py. For nvcc alone; what d, a and b are: products.h.
// clang-format off
#pragma once

#include <cstdint>

namespace espalier::cuda::hopper {
"""


def rows(items, per_row, indent):
    return (",\n" + " " * indent).join(", ".join(items[i:i + per_row]) for i in range(0, len(items), per_row))


def function(name, width, left, operands, arguments):
    """`left`: the operand number -> text of the left factor; the operands of the asm follow the results."""
    results = width // 2
    names = [f"%{i}" for i in range(results)]
    lines = "\n".join(f'      "{", ".join(names[i:i + 16])}{", " if i + 16 < results else "}, "}"' for i in range(0, results, 16))
    outs = rows([f'"+f"(d[{i}])' for i in range(results)], 8, 8)
    return f"""
template <int kTransposedB>
__device__ __forceinline__ void {name}_{width}(float (&d)[{results}], {arguments}, std::uint64_t b, int adds) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{results + operands + 1}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{"
{lines}
      "{left(results)}, %{results + operands}, p, 1, 1, {'0, ' if operands == 1 else ''}%{results + operands + 2};\\n}}\\n"
      : {outs}
      : {'"l"(a)' if operands == 1 else ", ".join(f'"r"(a[{i}])' for i in range(4))}, "l"(b), "r"(adds), "n"(kTransposedB));
}}
"""


def choice(name, arguments):
    lines = "\n".join(f"  if constexpr (N == {width}) {name}_{width}<kTransposedB>(d, a, b, adds);" for width in WIDTHS)
    widths = " || ".join(f"N == {width}" for width in WIDTHS)
    return f"""
template <int N, int kTransposedB>
__device__ __forceinline__ void {name}(float (&d)[N / 2], {arguments}, std::uint64_t b, int adds) {{
  static_assert({widths});
{lines}
}}
"""


def text():
    forms = (("wgmma_shared", lambda at: f"%{at}", 1, "std::uint64_t a"),
             ("wgmma_registers", lambda at: "{" + ", ".join(f"%{at + i}" for i in range(4)) + "}", 4, "const unsigned (&a)[4]"))
    functions = "".join(function(name, width, left, operands, arguments) for name, left, operands, arguments in forms for width in WIDTHS)
    return HEAD + functions + "".join(choice(name, arguments) for name, _, _, arguments in forms) + "\n}  // namespace espalier::cuda::hopper\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if FILE.read_text(encoding="utf-8") == text() else f"{FILE} is not what tools/make_wgmma.py writes")
    FILE.write_text(text(), encoding="utf-8")
