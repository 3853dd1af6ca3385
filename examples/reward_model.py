"""Train a reward model on lists of scored answers, and score other answers with it.

    python examples/reward_model.py [MODEL_DIRECTORY] [--answers answers.jsonl] [--out REWARD_MODEL] [--epochs 8]

A line of answers.jsonl is {"prompt": ..., "answers": [{"response": ..., "score": ...}, ...]}, texts or lists of chat messages. Without a
model directory a small random model with a tokenizer is made; without answers, sums. The trained directory is a
...ForSequenceClassification of transformers.
"""

import argparse
import json
import tempfile
from pathlib import Path

import espalier
from own_data import small_model

TASK = "You get a question about two numbers and give one number as the answer. The question: "
ANSWERS = [{"prompt": f"{TASK}What is {a} + {b}?", "answers": [{"response": f" {a + b}.", "score": 1}, {"response": f" {a + b + 1}!", "score": 0.5},
                                                               {"response": f" {a}?", "score": 0.2}, {"response": " I do not know", "score": 0}]}
           for a, b in ((2, 3), (4, 4), (7, 2), (5, 1))]
NEW = [{"prompt": f"{TASK}What is 3 + 3?", "answers": [{"response": " 6.", "score": 0}, {"response": " I do not know", "score": 0}]}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        out = arguments.out or scratch / "trained"
        result = espalier.train(model=arguments.model or small_model(scratch / "model"), objective="reward", out=out, lr=1e-3, quiet=True,
                                rollouts=arguments.answers or write(scratch / "answers.jsonl", ANSWERS), epochs=arguments.epochs)
        for number, step in enumerate(result["steps"]):
            print(f"step {number}: loss {step['loss']:.4f}, accuracy {step['accuracy']:.2f}, "
                  f"{step['rows']['physical']} rows run instead of {step['rows']['logical']}")
        espalier.score(model=out, rollouts=write(scratch / "new.jsonl", NEW), out=scratch / "scored.jsonl", quiet=True)
        for line, answer in zip((scratch / "scored.jsonl").read_text().splitlines(), NEW[0]["answers"], strict=True):
            print(f"reward {json.loads(line)['reward']:6.2f} for {answer['response']!r}")


if __name__ == "__main__":
    main()
