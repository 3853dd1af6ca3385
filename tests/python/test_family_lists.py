"""The families that README.md and docs/families.md name are those of the engine's table, no more and no fewer."""

import re
from pathlib import Path

from published_configs import PUBLISHED

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "espalier/config/model_families.cpp").read_text()
README = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in
        (ROOT / "docs/families.md").read_text().split("<!-- families -->\n")[1].split("<!-- end -->")[0].splitlines()[2:]]
TOWERS = {"Gemma3": "Gemma 3", "Gemma4": "Gemma 4", "Gemma4Unified": "Gemma 4 12B", "Qwen3_5": "Qwen3.5", "Qwen3_5Moe": "Qwen3.5-MoE", "Mistral3": "Mistral 3", "Qwen3VL": "Qwen3-VL",
          "Glm4v": "GLM-4.1V", "Glm4vMoe": "GLM-4.5V", "Qwen2_5_VL": "Qwen2.5-VL", "Qwen2VL": "Qwen2-VL"}


def named_in_readme(before, behind):
    return README.split(before)[1].split(behind)[0].split(", ")


def test_the_page_has_a_row_for_every_family_of_the_engine():
    assert [row[1] for row in ROWS] == [f"{name}ForCausalLM" for name in re.findall(r'\{\.name = "(\w+)"', TABLE)]


def test_readme_names_the_families_of_the_page():
    assert named_in_readme("one of [these families](docs/families.md): ", "; - or the text model of ") == [row[0] for row in ROWS]


def test_readme_names_the_models_with_a_tower():
    rows = TABLE.split("kVisionFamilies[] = {")[1].split("};")[0]
    assert named_in_readme("; - or the text model of ", ", whose vision tower") == [TOWERS[name] for name in dict.fromkeys(re.findall(r'\{"(\w+)", "', rows))]


def test_every_family_has_a_published_config():
    """Whose tests open it. Qwen3.5 with experts is published beside a tower alone, Ministral without a config of its own type; test_sarvam.py has
    Sarvam's, for which transformers has no class of the name."""
    opened = {config["architectures"][0] for config in PUBLISHED.values()}
    assert {row[1] for row in ROWS} - opened == {"Qwen3_5MoeForCausalLM", "MinistralForCausalLM", "SarvamMLAForCausalLM", "SarvamMoEForCausalLM"}
