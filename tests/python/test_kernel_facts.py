"""Facts of compiled kernels: the round of a main loop that tools/sass_loops.py counts, and when the table is stale."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
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
