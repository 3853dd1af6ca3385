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


class TermSizes:
    """How large the terms are that a linear layer's gradients are sums of, whatever is left of the sums.

    Of a layer y_t = W x_t + b with dL/dy_t = g_t:  dL/dW = sum_t g_t x_t^T  and  dL/db = sum_t g_t.  Inside `with`, backward
    passes of the model add to `squares`: sum_t |g_t|^2 |x_t|^2 under the weight's name and sum_t |g_t|^2 under the bias's."""

    def __init__(self, model):
        self.model, self.squares, self.hooks = model, {}, []

    def __enter__(self):
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Linear) and module.bias is not None:
                self.hooks.append(module.register_forward_hook(self.watch(name)))
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def watch(self, name):
        def forward(module, inputs, output):
            x = inputs[0].detach()

            def backward(gradient):
                lengths = gradient.square().sum(-1)
                self.add(f"{name}.weight", float((lengths * x.square().sum(-1)).sum()))
                self.add(f"{name}.bias", float(lengths.sum()))

            if output.requires_grad:
                output.register_hook(backward)

        return forward

    def add(self, name, square):
        self.squares[name] = self.squares.get(name, 0.0) + square

    def bias_over_weight(self):
        """{name of a bias: size of its terms over that of its weight's}."""
        weights = {name: name.removesuffix("bias") + "weight" for name in self.squares if name.endswith("bias")}
        return {name: (self.squares[name] / self.squares[weight]) ** 0.5 for name, weight in weights.items()}


def assert_as_exact_as(found, draws, exact, bias_over_weight):
    """Whether `found` is as near to `exact` as `draws` are, the same gradient computed by somebody else in the same dtype.

    Errors of one run have a part in common: where a token's log-prob is off, so is the slope of the loss at it, and with it
    the token's whole contribution to every parameter. A few tokens decide how large that part is, and hundreds of parameters
    tell of one and the same draw. So the size over all parameters is judged once: twice that of the worst draw. A parameter is
    then judged by its share of that size, |error of it| / |error of all|: twice the largest share that it has in a draw.

    Draws do not tell the share of a parameter that is small because large terms cancel, as a key's bias: the same number added
    to all of a query's scores changes nothing, so little is left of sum_t g_t, and what its rounding is, chance. But that
    rounding is known from the weight of the same layer. Its gradient is the sum of the same g_t, with the same errors e_t:
    sum_t e_t x_t^T there and sum_t e_t here, which for errors that do not conspire are to each other as the terms are,
    sqrt(sum_t |g_t|^2 |x_t|^2) to sqrt(sum_t |g_t|^2); and a matrix of thousands of numbers is a sure measure of them."""
    assert set(found) == set(exact)
    sizes = [total_error(draw, exact) for draw in draws]
    size = total_error(found, exact)
    assert size <= 2 * max(sizes), f"the whole gradient: off by {size:.3e}, allowed {2 * max(sizes):.3e}"

    def distance(gradients, name):
        return float((gradients[name].double() - exact[name].double()).norm())

    for name in exact:
        share = max(distance(draw, name) / own for draw, own in zip(draws, sizes, strict=True))
        if name in bias_over_weight:
            weight = name.removesuffix("bias") + "weight"
            share = max(share, bias_over_weight[name] * max(distance(draw, weight) / own for draw, own in zip(draws, sizes, strict=True)))
        allowed = 2 * share * max(size, *sizes)
        assert distance(found, name) <= allowed, (
            f"{name}: off by {distance(found, name):.3e}, allowed {allowed:.3e}, norm {float(exact[name].norm()):.3e}")


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
