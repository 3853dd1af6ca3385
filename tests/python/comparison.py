"""Running `train` and holding its gradients and weights against the oracle."""

import json

import torch
from safetensors.torch import load_file

# What may be left of a float64 gradient, relative to its own L2 norm (the engine's promise for every plan).
FLOAT64_RELATIVE = 1e-10
# A gradient that nearly cancels is held against this part of the norm over all parameters instead of its own.
NEGLIGIBLE = 1e-6


def flags(options):
    """{"policy-loss": "gspo"} -> ["--policy-loss", "gspo"]; True stands for a flag without a value."""
    return [word for name, value in options.items() for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]


class Trained:
    """One run of `train`: its JSON, the gradients it wrote and its log-probs."""

    def __init__(self, espalier, model, rollouts, folder, dtype="float64", **options):
        folder.mkdir(parents=True, exist_ok=True)
        self.out = folder / "out"
        gradients, logprobs = folder / "gradients.safetensors", folder / "logprobs.jsonl"
        outcome = espalier("train", "--model", model, "--rollouts", rollouts, "--out", self.out, "--dtype", dtype, "--threads", 2,
                           "--gradients", gradients, "--logprobs", logprobs, "--json",
                           *flags({name.replace("_", "-"): value for name, value in options.items()}))
        self.json = outcome.json
        self.gradients = load_file(gradients)
        self.logprobs = [json.loads(line) for line in logprobs.read_text().splitlines()]


def relative_errors(found, exact):
    """{name: |found - exact| / |exact|} in float64, after checking that the same parameters are there."""
    assert set(found) == set(exact), f"only here {set(found) - set(exact)}, only in the oracle {set(exact) - set(found)}"
    total = torch.stack([g.double().norm() for g in exact.values()]).norm()
    errors = {}
    for name, gradient in exact.items():
        assert found[name].shape == gradient.shape, f"{name}: {found[name].shape}, oracle {gradient.shape}"
        scale = max(gradient.double().norm(), NEGLIGIBLE * total)
        errors[name] = float((found[name].double() - gradient.double()).norm() / scale) if scale else float(found[name].norm())
    return errors


def total_error(found, exact):
    difference = torch.stack([(found[name].double() - g.double()).norm() for name, g in exact.items()]).norm()
    return float(difference / torch.stack([g.double().norm() for g in exact.values()]).norm())


def assert_equal_gradients(found, exact, seed):
    errors = relative_errors(found, exact)
    worst = max(errors, key=errors.get)
    assert errors[worst] <= FLOAT64_RELATIVE, f"seed {seed}: {worst} is off by {errors[worst]:.3e} relative"


def assert_equal_series(found, name, exact, tolerance):
    assert [line["index"] for line in found] == list(range(len(exact)))
    for line, own in zip(found, exact, strict=True):
        assert len(line[name]) == len(own), f"record {line['index']}: {len(line[name])} values, wanted {len(own)}"
        for position, (a, b) in enumerate(zip(line[name], own)):
            assert abs(a - b) <= tolerance, f"record {line['index']} token {position}: {a}, oracle {b}"
