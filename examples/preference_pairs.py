"""Train on preference pairs of text (DPO): prompts run once for both answers, and for all pairs below them.

    python examples/preference_pairs.py [MODEL_DIRECTORY] [--pairs pairs.jsonl] [--out TRAINED] [--epochs 3]

A line of pairs.jsonl is {"prompt": ..., "chosen": ..., "rejected": ...}, texts or lists of chat messages. Without a model directory a small
random model with a tokenizer is made; without pairs, polite and rude answers.
"""

import argparse
import json
import tempfile
from pathlib import Path

import espalier
from own_data import small_model

SYSTEM = "You answer travellers at the information desk of a large station. You are short, friendly and exact. "
PAIRS = [{"prompt": SYSTEM + question, "chosen": " With pleasure: " + answer, "rejected": " Look yourself."}
         for question, answer in (("Where is track 4?", "left, behind the kiosk."), ("When does the train to Lyon leave?", "at ten past nine."),
                                  ("Where can I buy a ticket?", "at the red machines."), ("Is there a bus to the lake?", "yes, line 12."))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        pairs = arguments.pairs or scratch / "pairs.jsonl"
        if not arguments.pairs:
            pairs.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
        result = espalier.train(model=arguments.model or small_model(scratch / "model"), objective="dpo", rollouts=pairs,
                                out=arguments.out or scratch / "trained", epochs=arguments.epochs, lr=1e-4, quiet=True)
        for number, step in enumerate(result["steps"]):
            print(f"step {number}: loss {step['loss']:.4f}, accuracy {step['rewards/accuracies']:.2f}, "
                  f"{step['rows']['physical']} rows run instead of {step['rows']['logical']}")


if __name__ == "__main__":
    main()
