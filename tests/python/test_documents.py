"""The commands that the README tells a user to type, typed."""

import json
import random
import re
import shlex
import subprocess
from pathlib import Path

import make_model

ROOT = Path(__file__).resolve().parents[2]
# What makes a command of minutes one of seconds; the last value of an option wins.
QUICK = {
    "grpo": ["--steps", "2", "--warm-start-steps", "10", "--train-batch-size", "2", "--n", "2", "--val-size", "4"],
    "bench": ["--repetitions", "1"],
}


def readme_commands():
    """Lines of the README's code blocks that run the program, in order."""
    lines = [line.strip() for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("    ")]
    return [line.split("#")[0].strip() for line in lines if line.startswith("$espalier ")]


def write_rollouts(path):
    draw = random.Random(3)
    with open(path, "w") as out:
        for _ in range(3):
            prompt = [draw.randrange(make_model.VOCABULARY) for _ in range(20)]
            for _ in range(4):
                response = [draw.randrange(make_model.VOCABULARY) for _ in range(draw.randrange(1, 9))]
                out.write(json.dumps({"prompt_ids": prompt, "response_ids": response, "reward": draw.random()}) + "\n")


def test_readme_commands_run(program, model_of, tmp_path):
    commands = readme_commands()
    verbs = {command.split()[1] for command in commands}
    assert set(QUICK) | {"inspect", "plan", "verify", "train", "replay", "score", "generate", "report", "convert"} <= verbs
    write_rollouts(tmp_path / "rollouts.jsonl")
    write_rollouts(tmp_path / "day1.jsonl")
    subprocess.run([str(program), "convert", "day1.jsonl", "day2.jsonl.zst"], cwd=tmp_path, check=True, capture_output=True)
    prompts = [{"prompt_ids": list(range(1, 9))}, {"prompt_ids": [3, 1, 4, 1, 5]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    nemo = ROOT / "tests/golden/train_data_step3.jsonl"
    (tmp_path / nemo.name).write_bytes(nemo.read_bytes())
    (tmp_path / "MODEL").symlink_to(model_of("qwen3_tied"), target_is_directory=True)
    (tmp_path / "CRITIC").symlink_to(model_of("qwen3_tied"), target_is_directory=True)
    for command in commands:
        words = [str(program) if word == "$espalier" else word for word in shlex.split(command)]
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


def test_readme_names_the_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:`|^    )make ([a-z-]+)", (ROOT / "README.md").read_text(), re.M))
    assert {"demo", "test"} <= named <= targets
