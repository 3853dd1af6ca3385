"""Facts of compiled kernels: the round of a main loop that tools/sass_loops.py counts, and when the table is stale."""

import math
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import make_wgmma  # noqa: E402
import ptxas_facts  # noqa: E402
from sass_loops import main_loops  # noqa: E402


def text_of(*lines):
    """nvdisasm's text of one kernel, from its labels and instructions."""
    body = [line if line.startswith(".L") else f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines)]
    return "\n".join(["\t.section\t.text.k,\"ax\",@progbits", ".text.k:", *body, "\t.section\t.other"])


MASKED_OR_NOT = (
    "MOV R1, c[0x0][0x28]",
    ".L_x_0:",
    "@P0 BRA `(.L_x_1)",
    "LDGSTS.E.BYPASS.128 [R2], [R4.64]",
    "LDGSTS.E.BYPASS.128 [R3], [R4.64]",
    ".L_x_1:",
    "LDSM.16.M88.4 R8, [R2]",
    "HMMA.16816.F32.BF16 R4, R8, R12, R4",
    "@!PT LDS RZ, [RZ]",
    "@P1 BRA `(.L_x_2)",
    "LDG.E R20, [R6.64]",
    "FSEL R4, R4, -INF, P2",
    ".L_x_2:",
    "NOP",
    "HMMA.16816.F32.BF16 R4, R8, R12, R4",
    "@P3 BRA `(.L_x_0)",
    "EXIT",
)


def test_a_round_fetches_the_next_tile_and_masks_nothing():
    counts = main_loops(text_of(*MASKED_OR_NOT))["k"]
    assert counts == {"BRA": 3, "LDGSTS": 2, "LDSM": 1, "HMMA": 2, "never": 1}


def test_a_loop_without_products_counts_once_and_a_loop_of_products_has_no_count():
    inner = (".L_x_8:", "IADD3 R1, R1, 0x1, RZ", "@P5 BRA `(.L_x_8)")
    at = MASKED_OR_NOT.index("NOP")
    assert main_loops(text_of(*MASKED_OR_NOT[:at], *inner, *MASKED_OR_NOT[at:]))["k"]["IADD3"] == 1
    products = (".L_x_8:", "HMMA.16816.F32.BF16 R4, R8, R12, R4", "@P5 BRA `(.L_x_8)")
    assert main_loops(text_of(*MASKED_OR_NOT[:at], *products, *MASKED_OR_NOT[at:])) == {}


def test_a_kernel_without_matrix_instructions_has_no_row():
    assert main_loops(text_of(*(line for line in MASKED_OR_NOT if "HMMA" not in line))) == {}


def test_products_of_warpgroups_are_matrix_instructions():
    lines = [line.replace("HMMA.16816.F32.BF16 R4, R8, R12, R4", "HGMMA.64x176x16.F32.BF16 R24, gdesc[UR8], R24") for line in MASKED_OR_NOT]
    assert main_loops(text_of(*lines))["k"]["HGMMA"] == 2


@pytest.mark.parametrize("header", [False, True])
def test_digests_follow_the_code_and_not_the_comments(header, tmp_path, monkeypatch):
    monkeypatch.setattr(ptxas_facts, "ROOT", tmp_path)
    monkeypatch.setattr(ptxas_facts, "SOURCES", tmp_path / "cuda")
    (tmp_path / "cuda").mkdir()
    kernel, included = tmp_path / "cuda/a.cu", tmp_path / "cuda/b.h"
    kernel.write_text('#include "cuda/b.h"\nint x = 1;  // one\n')
    included.write_text("int y = 2;\n")
    before = ptxas_facts.digest_of(kernel)
    changed = included if header else kernel
    changed.write_text(changed.read_text() + "// a comment\n\n")
    assert ptxas_facts.digest_of(kernel) == before
    changed.write_text(changed.read_text() + "int z;\n")
    assert ptxas_facts.digest_of(kernel) != before


def test_a_table_of_other_kernels_is_an_error_where_there_is_an_nvcc(tmp_path, monkeypatch, capsys):
    table = tmp_path / "ptxas.txt"
    table.write_text(ptxas_facts.TABLE.read_text().replace("source norm.cu: ", "source norm.cu: 0"))
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'release 1.0, V1.0.0'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(ptxas_facts, "TABLE", table)
    monkeypatch.setattr(ptxas_facts, "nvcc", lambda: str(nvcc))
    monkeypatch.setattr(sys, "argv", ["ptxas_facts.py", "--build", str(tmp_path)])
    assert ptxas_facts.main() == 1
    assert "source norm.cu" in capsys.readouterr().out
    monkeypatch.setattr(ptxas_facts, "nvcc", lambda: None)
    assert ptxas_facts.main() == 0


FACTS = [line for line in ptxas_facts.TABLE.read_text().splitlines() if not line.startswith("#")]


LOOPS = [line for line in FACTS if line.startswith("loop ")]
OF_WARPGROUPS = [line for line in LOOPS if "sm_90a" in line]
OF_CHUNKS = [line for line in LOOPS if "_chunk" in line or "chunk_" in line or "channel_" in line]


@pytest.mark.parametrize("line", [line for line in LOOPS if line not in OF_WARPGROUPS and line not in OF_CHUNKS], ids=lambda line: line.split(":")[0])
def test_a_tile_takes_few_instructions_and_no_global_or_local_loads(line):
    """Six instructions a matrix instruction at most, loads of the next tile and the softmax included. Heads of 64 have half the products of heads of
    128 for as many exponentials."""
    most = 7 if "forward_tiles_kernel<64" in line else 6
    matrix, instructions, _, ldmatrix, _, of_global, _, local = map(float, line.split(": ")[1].split(", "))
    assert instructions <= most * matrix and ldmatrix <= matrix and of_global == local == 0


@pytest.mark.parametrize("line", OF_CHUNKS, ids=lambda line: line.split(":")[0])
def test_a_chunk_of_a_recurrent_layer_takes_few_instructions_and_no_local_loads(line):
    """Most instructions split float32 numbers into two bfloat16, and copy tiles: 180,000 for 21,500 matrix instructions in the backward of 64 rows
    (docs/cuda.md), and twice as many for one in the scan of heads of 64."""
    matrix, instructions, _, ldmatrix, _, _, _, local = map(float, line.split(": ")[1].split(", "))
    assert instructions <= 17 * matrix and ldmatrix <= matrix and local == 0


@pytest.mark.parametrize("line", OF_WARPGROUPS, ids=lambda line: line.split(":")[0])
def test_a_tile_of_warpgroups_takes_few_instructions_and_no_loads_beside_numbers(line):
    """The products of a round are one instruction for 16 rows or columns of a whole warpgroup; most others are the softmax of 64 rows, once for each
    score of a thread. FlashAttention 3 has 584 instructions for 19 HGMMA of its forward with 176 keys, and 464 for 16 with 128."""
    matrix, instructions, _, ldmatrix, shared, of_global, _, local = map(float, line.split(": ")[1].split(", "))
    assert ldmatrix == of_global == local == 0 and shared <= 17
    assert instructions <= (26 if "backward" in line else 42) * matrix
    if "forward_kernel<128,128,false>" in line:
        assert matrix == 19 and instructions <= 1.1 * 584
    if "backward_keys_kernel<128,128,0,128,2,false>" in line:  # all gradients; FlashAttention 3: 485 for the same tiles
        assert matrix == 32 and instructions <= 1.1 * 485


def test_every_instance_for_warpgroups_has_a_loop_and_spills_nothing():
    """24 registers are kept by the warpgroup that copies: 168 when the block starts, and no stack."""
    kernels = [line for line in FACTS if line.startswith("registers hopper_")]
    instances = [list(map(int, line.split(": ")[1].split(", "))) for line in kernels]
    assert len(kernels) == 3 and all(numbers[1] == 168 and numbers[3] == numbers[4] == 0 for numbers in instances)
    assert sum(numbers[0] for numbers in instances) == len(OF_WARPGROUPS)


def test_the_shapes_of_wgmma_are_those_of_their_script():
    assert make_wgmma.text() == make_wgmma.FILE.read_text()


def constants_of(text, known):
    """{name: value} of the whole numbers that are declared as a number or a product of numbers and names."""
    found = dict(known)
    for declared in re.findall(r"constexpr (?:int|std::int64_t) ([^;]*);", text):
        for name, product in re.findall(r"(\w+) = (\w+(?: \* \w+)*)(?=,|$)", declared):
            factors = [found.get(factor, int(factor) if factor.isdigit() else None) for factor in product.split(" * ")]
            if None not in factors:
                found[name] = math.prod(factors)
    return found


def launch_bounds():
    """{kernel: most threads of a block}"""
    shared, found = {}, {}
    for path in sorted(ptxas_facts.SOURCES.rglob("*.h")):
        shared = constants_of(path.read_text(), shared)
    for path in ptxas_facts.kernel_sources():
        text = path.read_text()
        constants = constants_of(text, shared)
        for bounds, kernel in re.findall(r"__global__ void(?: __launch_bounds__\(([^)]*)\))?\s+(\w+)", text):
            threads = bounds.split(",")[0].strip()
            assert threads, f"{path.name}: {kernel} has no launch bounds"
            found[kernel] = int(threads) if threads.isdigit() else constants.get(threads)
    return found


def test_a_block_of_every_kernel_fits_the_registers_of_every_gpu():
    """65,536 a block from sm_80 to sm_120; a warp takes them by 256."""
    bounds, registers = launch_bounds(), {}
    for line in FACTS:
        if line.startswith("registers "):
            kernel, numbers = line.removeprefix("registers ").split(", ", 1)
            registers[kernel] = max(registers.get(kernel, 0), int(numbers.split(": ")[1].split(", ")[1]))
    assert set(registers) == set(bounds) and all(bounds.values())
    for kernel, most in registers.items():
        assert -(-most * 32 // 256) * 256 * -(-bounds[kernel] // 32) <= 65536, (kernel, most, bounds[kernel])


def test_every_status_of_cuda_is_checked():
    """But those of frees, which a destructor calls: what failed before them, the next call says. Kernels start in launch() alone."""
    unchecked = {"cudaGetDeviceCount", "cudaGetErrorString", "cudaGetLastError", "cudaEventQuery", "cudaPointerGetAttributes", "cudaFreeHost",
                 "cudaFreeAsync", "cublasGetStatusString"}
    launches = []
    for path in sorted(path for path in ptxas_facts.SOURCES.rglob("*") if path.is_file()):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        launches += re.findall(r"<<<.*", text)
        for call in re.finditer(r"\b(cuda|cublas)[A-Z]\w*\(", text):
            before = text[:call.start()].rstrip().rsplit(";", 1)[-1]
            assert call[0][:-1] in unchecked or re.search(r"expect_(success|cublas)\(\s*$", before), f"{path.name}: {call[0]}"
    assert len(launches) == 1
