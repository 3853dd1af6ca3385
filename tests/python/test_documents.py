"""The commands that README.md and docs/program.md show, run in order."""

import json
import random
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import make_model
from text_model import byte_level_tokenizer

ROOT = Path(__file__).resolve().parents[2]
# What makes a command of minutes one of seconds; the last value of an option wins.
QUICK = {
    "grpo": ["--steps", "2", "--warm-start-steps", "10", "--train-batch-size", "2", "--n", "2", "--val-size", "4"],
    "bench": ["--repetitions", "1"],
}


PAGES = ("README.md", "docs/program.md")
RUNS = "build/espalier "


def commands_of(page):
    """Lines of a page's code blocks that run the program, in order."""
    lines = [line.strip() for line in (ROOT / page).read_text().splitlines() if line.startswith("    ")]
    return [line.split("#")[0].strip() for line in lines if line.startswith(RUNS)]


def write_rollouts(path):
    draw = random.Random(3)
    with open(path, "w") as out:
        for _ in range(3):
            prompt = [draw.randrange(make_model.VOCABULARY) for _ in range(20)]
            for _ in range(4):
                response = [draw.randrange(make_model.VOCABULARY) for _ in range(draw.randrange(1, 9))]
                out.write(json.dumps({"prompt_ids": prompt, "response_ids": response, "reward": draw.random()}) + "\n")


def test_the_program_page_shows_every_verb():
    verbs = {command.split()[1] for command in commands_of("docs/program.md")}
    assert set(QUICK) | {"inspect", "plan", "verify", "train", "replay", "score", "generate", "report", "convert"} <= verbs


@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page, program, model_of, tmp_path):
    write_rollouts(tmp_path / "rollouts.jsonl")
    write_rollouts(tmp_path / "day1.jsonl")
    subprocess.run([str(program), "convert", "day1.jsonl", "day2.jsonl.zst"], cwd=tmp_path, check=True, capture_output=True)
    prompts = [{"prompt_ids": list(range(1, 9))}, {"prompt_ids": [3, 1, 4, 1, 5]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    nemo = ROOT / "tests/golden/train_data_step3.jsonl"
    (tmp_path / nemo.name).write_bytes(nemo.read_bytes())
    shutil.copytree(model_of("qwen3_tied"), tmp_path / "MODEL")
    byte_level_tokenizer(["1 2 3"], 258).save(str(tmp_path / "MODEL/tokenizer.json"))
    (tmp_path / "CRITIC").symlink_to(model_of("qwen3_tied"), target_is_directory=True)
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    for command in commands_of(page):
        words = [str(program), *shlex.split(command)[1:]]
        quick = QUICK.get(words[1], [])
        for name, value in zip(quick[::2], quick[1::2]):  # an option is said once
            if name in words:
                words[words.index(name) + 1] = value
            else:
                words += [name, value]
        if words[1] == "generate":  # the records that were there stay as they were
            words[words.index("rollouts.jsonl")] = "generated.jsonl"
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"


def test_the_first_screen_of_readme_has_one_table_and_the_two_commands():
    screen = (ROOT / "README.md").read_text().splitlines()[:60]
    assert sum(line.startswith("| ---") for line in screen) == 1
    assert [line.split()[1] for line in screen if line.startswith("    make ")] == ["demo", "test"]
    assert screen.index("## How it works") < 45  # above it: what Espalier is, who it is for, what it saves, how to run it
    assert not [line for line in screen if "$(" in line]  # commands as they are typed


def test_the_changelog_of_an_unreleased_version_has_40_lines():
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 144


def test_readme_names_the_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:`|^    )make ([a-z-]+)", (ROOT / "README.md").read_text(), re.M))
    assert {"demo", "test"} <= named <= targets
