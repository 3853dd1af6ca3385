"""Draws a whole training run from a seed: a tiny model, rollouts, options of the objective and the optimizer, plans.

What is drawn has no kink within rounding of a token: recorded log-probs are placed so that no ratio lies near a bound of its
clip, and none equals the policy's own number where that number is a kink.
"""

import math
import random

import oracle
from make_model import add_kept_sets

KINDS = ["llama3_tied", "llama_untied", "qwen2_untied", "qwen3_tied", "qwen3_moe"]
KINK = 1e-3  # relative distance that a ratio keeps from the bounds of its clip


class Case:
    """`family` and `config` for make_model, `records`, `objective` (for objective.resolve), `router`, `training` (of the
    optimizer and of mini-batches), `plans` (ways to run the same update), `far`: log-probs far from the policy's."""

    def __init__(self, seed):
        self.seed, self.rng = seed, random.Random(seed)
        self.family = self.rng.choice(KINDS)
        self.long = self.rng.random() < 0.12  # beyond the blocks of attention and of the head, and what one thread does alone
        self.config = draw_config(self.family, self.long, self.rng)
        self.vocabulary = self.config["vocab_size"]
        self.with_critic = self.rng.random() < 0.2
        self.far = self.rng.random() < 0.3
        self.records = draw_texts(self.vocabulary, self.long, self.rng)
        self.objective = draw_objective(self.rng)
        if self.with_critic and self.rng.random() < 0.7:
            self.objective["cliprange-value"] = self.rng.choice([0.1, 1.5])
        self.router = draw_router(self.config, self.rng) if self.family == "qwen3_moe" else {}
        if self.family == "qwen3_moe" and self.rng.random() < 0.4:
            draw_routes(self.records, self.config, self.rng)
        if seed % 5 < 2:
            add_kept_sets(self.records, seed, self.vocabulary)
        self.training = draw_training(self.rng, len(self.records), self.far)
        if self.with_critic:
            self.training["critic-lr"] = 5e-4
        self.plans = [draw_plan(self.rng) for _ in range(3)]

    def finish(self, model):
        """Adds what needs the policy's own log-probs, or depends on the options."""
        own, _ = oracle.score(model, self.records)
        add_series(self, own)
        add_rewards(self)
        add_groups(self)
        drop_masks(self)

    def is_smooth(self):
        """No kink within float32's reach of a token: choices of experts, gspo's mean and a critic's clip are not held apart,
        and over hundreds of tokens a log-prob of transformers in float32 is off by a third of KINK itself."""
        return not self.long and self.family != "qwen3_moe" and self.objective["policy-loss"] != "gspo" and not self.with_critic

    def flags(self):
        return {**self.objective, **self.router, **self.training}


def draw_config(family, long, rng):
    shared = rng.choice([1, 1, 2, 3])
    heads = shared * rng.randint(1, 8 if shared == 1 else 3)
    size = rng.choice([size for size in (2, 6, 10, 14, 16, 22, 40, 72, 130) if heads * size <= 300])
    hidden = heads * (size if family == "qwen2_untied" else rng.randint(max(1, 7 // heads), 1 + 53 // heads))
    config = dict(
        hidden_size=hidden, intermediate_size=rng.randint(5, 61),
        num_hidden_layers=rng.randint(1, 3), num_attention_heads=heads, num_key_value_heads=shared, head_dim=size,
        vocab_size=1031 if long else rng.choice([7, 31, 61, 97, 131, 257]), rms_norm_eps=rng.choice([1e-6, 1e-5]),
        tie_word_embeddings=rng.random() < 0.5)
    if family == "qwen2_untied":
        del config["head_dim"]
    if family == "llama_untied":
        config.update(attention_bias=rng.random() < 0.4, mlp_bias=rng.random() < 0.4)
    if family == "qwen3_moe":
        experts = rng.randint(2, 9)
        config.update(num_experts=experts, num_experts_per_tok=rng.randint(1, experts), moe_intermediate_size=rng.randint(3, 29),
                      norm_topk_prob=rng.random() < 0.5, decoder_sparse_step=rng.choice([1, 1, 2]))
        if config["num_hidden_layers"] < config["decoder_sparse_step"]:
            config["num_hidden_layers"] = 2
    return config


def draw_texts(vocabulary, long, rng):
    """Prompts and responses that share all sorts of starts, with masks and temperatures."""
    tokens = lambda count: [rng.randrange(vocabulary) for _ in range(count)]
    temperatures = rng.choice([[1.0], [0.7], [0.4, 1.0, 1.6]])
    records, prompts = [], []
    for index in range(rng.randint(1, 5)):
        prompt = tokens(rng.randint(40, 330) if long else rng.choice([1, 2, rng.randint(3, 24)]))
        if prompts and rng.random() < 0.5:
            start = rng.choice(prompts)  # one prompt continues another, or shares its start
            prompt = start[:rng.randint(1, len(start))] + prompt if rng.random() < 0.5 else start + tokens(rng.randint(0, 6))
        if records and rng.random() < 0.2:  # the next turn: what was a response is a prompt now
            former = rng.choice(records)
            prompt = former["prompt_ids"] + former["response_ids"] + tokens(rng.randint(0, 3))
        prompts.append(prompt)
        own = []
        for _ in range(rng.choice([1, 2, rng.randint(2, 6)])):
            response = tokens(rng.choice([1, rng.randint(1, 90 if long else 12)]))
            if own and rng.random() < 0.5:
                former = rng.choice(own)
                response = former[:rng.randint(0, len(former))] + response
            if own and rng.random() < 0.12:
                response = list(rng.choice(own))
            if rng.random() < 0.06:
                response = []
            own.append(response)
            mask = [1] * len(response)
            kind = rng.random()
            if kind < 0.08:
                mask = [0] * len(response)
            elif kind < 0.5:
                mask = [int(rng.random() < 0.7) for _ in response]
            records.append({"prompt_ids": list(prompt), "response_ids": response, "loss_mask": mask, "prompt_number": index})
            temperature = rng.choice(temperatures)
            if temperature != 1.0 or rng.random() < 0.3:
                records[-1]["temperature"] = temperature
    if not any(r["response_ids"] for r in records):
        records[0].update(response_ids=tokens(2), loss_mask=[1, 1])
    rng.shuffle(records)
    return records


def draw_objective(rng):
    loss = rng.choice(["vanilla", "vanilla", "gspo", "cispo", "sapo", "gpg", "reinforce"])
    options = {"policy-loss": loss, "adv-estimator": rng.choice([
        "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "given"])}
    maybe = lambda chance: rng.random() < chance
    if maybe(0.6):
        options["clip-ratio-low"] = rng.choice([0.0, 0.05, 0.3, 1.0])
    if maybe(0.6):
        options["clip-ratio-high"] = rng.choice([0.0, 0.05, 0.28, 4.0])
    if maybe(0.5):
        options["clip-ratio-c"] = rng.choice([1.1, 1.7, 10.0])
    if loss != "sapo" and maybe(0.8):
        options["loss-agg-mode"] = rng.choice([
            "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"])
    if options.get("loss-agg-mode") == "seq-mean-token-sum-norm" and maybe(0.5):
        options["loss-scale-factor"] = rng.choice([1, 7.5, 4096])
    if maybe(0.5):
        options["kl-loss-coef"] = rng.choice([1e-3, 0.1, 2.0])
        options["kl-loss-type"] = rng.choice(["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]) + rng.choice(["", "", "+"])
    if maybe(0.5):
        options["entropy-coeff"] = rng.choice([1e-3, 0.05, -0.2])
    if maybe(0.5):
        options["rollout-is"] = rng.choice(["token", "sequence"])
        options["rollout-is-threshold"] = rng.choice([0.5, 1.3, 2.0, 50.0])
    if maybe(0.5):
        options["gamma"] = rng.choice([0.0, 0.9, 0.99])
    if maybe(0.5):
        options["lam"] = rng.choice([0.0, 0.5, 0.95])
    return options


def draw_router(config, rng):
    """Where every expert is chosen, the balancing loss is constant: nothing but rounding could be compared."""
    options = {}
    if config["num_experts_per_tok"] < config["num_experts"] and rng.random() < 0.7:
        options["router-aux-loss-coef"] = rng.choice([1e-3, 0.2])
        options["router-aux-loss-scope"] = rng.choice(["rollout", "minibatch"])
    if rng.random() < 0.5:
        options["router-z-loss-coef"] = rng.choice([1e-3, 0.1])
    return options


def draw_routes(records, config, rng):
    """Recorded experts: the same for equal starts, but for some tokens; some tokens and some rollouts without, as the last one."""
    every, layers = config["decoder_sparse_step"], config["num_hidden_layers"]
    draw = lambda: [rng.sample(range(config["num_experts"]), config["num_experts_per_tok"])
                    for layer in range(layers) if (layer + 1) % every == 0]
    known, least = {}, rng.choice([0.0, 0.05])
    for record in records:
        if rng.random() < 0.2:
            continue
        tokens = record["prompt_ids"] + record["response_ids"]
        routes = []
        for t in range(len(tokens)):
            common = known.setdefault(tuple(tokens[:t + 1]), draw() if rng.random() < 0.9 else None)
            routes.append(draw() if rng.random() < least else common)
        record["routed_experts"] = routes[:len(tokens) - rng.randint(0, 1)]
        if not record["routed_experts"] or all(token is None for token in record["routed_experts"]):
            del record["routed_experts"]


def draw_training(rng, rollouts, far):
    """Many steps only where the log-probs are near: a ratio of e^20 makes the second step's weights those of another model.
    beta2 is no less than beta1 and eps no less than 1e-6 in several steps: else AdamW may enlarge a gradient's rounding more
    than 1 / eps times, or 1e8 times."""
    several = not far and rng.random() < 0.6
    training = {"lr": rng.choice([1e-4, 1e-3]), "eps": rng.choice([1e-6, 1e-5, 1e-4] if several else [1e-8, 1e-6, 1e-4]),
                "weight-decay": rng.choice([0, 0.01, 0.5]), "max-grad-norm": rng.choice([0, 0.03, 1.0, 100.0]),
                "betas": rng.choice(["0.9,0.999", "0.5,0.8", "0,0.9", "0,0"])}
    if rng.random() < 0.3:
        training["decay-matrices-only"] = True
    if several:
        training["mini-batch-size"] = rng.choice([0, 1, 3, rollouts // 2])
        training["epochs"] = rng.choice([1, 2])
        if rng.random() < 0.4:
            training["warmup-steps"] = rng.randint(1, 4)
        if rng.random() < 0.3:
            training["steps"] = rng.randint(1, 5)
    return training


def draw_plan(rng):
    plan = {"schedule": rng.choice(["auto", "dense", "packed", "phased", "phased"]), "threads": rng.choice([1, 1, 2, 3])}
    if rng.random() < 0.6:
        plan["token-budget"] = rng.choice([1, 2, 5, 17, 64, 300])
    if rng.random() < 0.6:
        plan["trunk-state"] = rng.choice(["auto", "keep", "recompute", "offload"])
    if rng.random() < 0.3:
        plan["wave-state"] = rng.choice(["keep", "recompute"])
    if rng.random() < 0.3:
        plan["path-state"] = rng.choice(["keep", "offload"])
    if rng.random() < 0.5:
        plan["share"] = rng.choice(["auto", "prompt", "off"])
    return plan


def near_a_kink(log_ratio, options):
    bounds = [1 - options.get("clip-ratio-low", 0.2), 1 + options.get("clip-ratio-high", 0.2), options.get("clip-ratio-c", 3.0)]
    kinks = [math.log(bound) for bound in bounds if bound > 0] + [20.0, -20.0, 10.0, 0.0]  # 0: of |KL|
    return any(abs(log_ratio - kink) < KINK for kink in kinks)


def draw_apart(rng, own, spread, options):
    """A log-prob about `own` whose ratio is near no kink."""
    while True:
        drawn = own + rng.gauss(0, spread)
        if not near_a_kink(own - drawn, options):
            return drawn


def add_series(case, logprobs):
    rng, options = case.rng, case.objective
    present = {"old_logprobs": rng.choice([0.0, 0.5, 1.0, 1.0]),
               "ref_logprobs": 1.0 if "kl-loss-coef" in options else rng.choice([0.0, 0.5]),
               "rollout_logprobs": 1.0 if "rollout-is" in options else rng.choice([0.0, 0.5])}
    spread = rng.choice([3.0, 15.0]) if case.far else rng.choice([0.02, 0.4])
    for record, own in zip(case.records, logprobs, strict=True):
        for name, chance in present.items():
            if rng.random() < chance:
                record[name] = [draw_apart(rng, value, spread, options) for value in own]


def add_rewards(case):
    rng, estimator = case.rng, case.objective["adv-estimator"]
    kind = rng.choice(["binary", "continuous", "equal", "large"])
    draw = {"binary": lambda: float(rng.random() < 0.4), "continuous": lambda: rng.uniform(-1, 2), "equal": lambda: 0.1,
            "large": lambda: rng.uniform(-300, 300)}[kind]
    given = 1.0 if estimator == "given" else rng.choice([0.0, 0.0, 0.3])
    for record in case.records:
        if rng.random() < given:
            scalar = rng.random() < 0.4
            record["advantage"] = rng.gauss(0, 1) if scalar else [rng.gauss(0, 1) for _ in record["response_ids"]]
        if case.with_critic or "advantage" not in record or rng.random() < 0.5:
            record["reward"] = draw()
        if estimator == "gae" and not case.with_critic or rng.random() < (0.5 if case.with_critic else 0.1):
            record["values"] = [rng.gauss(0, 1) for _ in record["response_ids"]]
        if case.with_critic and rng.random() < 0.2:
            record["returns"] = [rng.gauss(0, 1) for _ in record["response_ids"]]


def add_groups(case):
    rng = case.rng
    kind = rng.choice(["absent", "own", "numbers", "wrong", "mixed"])
    for record in case.records:
        number = record.pop("prompt_number")
        if kind == "own" or kind == "mixed" and rng.random() < 0.5:
            record["group"] = f"g{number}"
        elif kind == "numbers":
            record["group"] = number
        elif kind == "wrong":
            record["group"] = rng.choice(["a", "b", 1, "1", True])
    if not case.far and case.training["eps"] >= 1e-6 and rng.random() < 0.2:
        for record in case.records:
            record["step"] = rng.choice([0, 3, 12])


def drop_masks(case):
    """The file's records: a mask of ones may be left out, null stands for an absent field."""
    case.lines = []
    for record in case.records:
        line = dict(record)
        if all(line["loss_mask"]) and case.rng.random() < 0.5:
            del line["loss_mask"]
        if "group" not in line and case.rng.random() < 0.3:
            line["group"] = None
        case.lines.append(line)
