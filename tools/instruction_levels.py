"""The instruction sets that tests are repeated under (ESPALIER_INSTRUCTION_SET, espalier/base/instruction_set.h), and the
environment that holds the program and its libraries to one of them."""

import os
import platform
import subprocess

VARIABLE = "ESPALIER_INSTRUCTION_SET"
# Each library by its own variable, read when it is loaded: ATen's kernels, oneDNN's products in bfloat16, MKL's in float32.
# MKL takes MKL_ENABLE_INSTRUCTIONS as an upper bound on Intel's processors and may overlook it on others.
LIBRARIES = {
    "baseline": dict(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41", MKL_ENABLE_INSTRUCTIONS="SSE4_2"),
    "avx2": dict(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", MKL_ENABLE_INSTRUCTIONS="AVX2"),
    "avx512": dict(ATEN_CPU_CAPABILITY="avx512", ONEDNN_MAX_CPU_ISA="AVX512_CORE", MKL_ENABLE_INSTRUCTIONS="AVX512"),
    "emulated_amx_bf16": dict(ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16"),
    "avx512_bf16": dict(ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16"),
    "amx_bf16": {},
    "neon": {},
}
# The sets of each architecture (espalier/base/compiled_sets.h).
ARCHITECTURES = {"aarch64": ("neon",)}
# As avx512 but for products of bfloat16: of the Python tests only those that name it are repeated.
BFLOAT16_ALONE = ("emulated_amx_bf16", "avx512_bf16", "amx_bf16")
# No processor's own set, and slow: the attention tests run it, whole suites only where the variable asks for it.
EMULATED = "emulated_amx_bf16"


def environment_of(level):
    return {VARIABLE: level, **LIBRARIES[level]} if level else {}


def levels_to_run(build):
    """(the level of the whole suite, "" where only the program knows it; those that judgements of rounding are repeated under)."""
    named = os.environ.get(VARIABLE)
    if named:
        return named, []
    tool = build / "tests/support/list_instruction_levels"
    if not tool.is_file():
        return "", []
    levels = subprocess.run([tool], capture_output=True, text=True, check=True).stdout.split()
    return levels[-1], [level for level in levels[:-1] if level != EMULATED]


def described(level, repeated, narrower):
    """`narrower`: all that the processor has below `level`."""
    if not level:
        return "Instruction sets: the processor's widest alone; the C++ tests are not built, which list the others"
    text = f"Instruction sets: every case under {level}"
    if repeated:
        text += f"; those that judge float32 or bfloat16 again under {', '.join(repeated)}"
    elif os.environ.get(VARIABLE):
        text += f", as {VARIABLE} asks"
    left = [name for name in narrower if name not in repeated]
    if left:
        text += f"; left to the sweep: {', '.join(left)}"
    here = ARCHITECTURES.get(platform.machine(), [name for name in LIBRARIES if name != "neon"])
    absent = [name for name in here if name not in (level, EMULATED, *narrower)]
    if absent and not os.environ.get(VARIABLE):
        text += f"; not on this processor: {', '.join(absent)}"
    return text
