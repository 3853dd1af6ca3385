"""A plain dense trainer on Hugging Face transformers: one rollout a forward, nothing shared, torch autograd, AdamW.

In float64 everything is float64: transformers itself computes rotary tables, norms and the softmax of attention and of routers
in float32, so those are replaced here by their float64 formulas. In float32 the model runs as transformers ships it.
"""

import contextlib
import math

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

import objective


class Rotary(torch.nn.Module):
    """cos and sin of position * frequency in float64, with Llama 3's frequency bands where the config asks for them."""

    def __init__(self, config):
        super().__init__()
        rope = config.rope_parameters
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
        frequency = rope["rope_theta"] ** -exponents
        if rope["rope_type"] == "llama3":
            frequency = torch.stack([self.scaled(f, rope) for f in frequency])
        elif rope["rope_type"] != "default":
            raise ValueError(rope["rope_type"])
        self.register_buffer("frequency", frequency, persistent=False)

    @staticmethod
    def scaled(frequency, rope):
        wavelength = 2 * math.pi / frequency
        context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < context / high:
            return frequency
        if wavelength > context / low:
            return frequency / rope["factor"]
        smooth = (context / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / rope["factor"] + smooth * frequency

    def forward(self, hidden, position_ids):
        angles = position_ids[..., None].double() * self.frequency
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def attention64(module, query, key, value, attention_mask, scaling, dropout=0.0, sliding_window=None, **_):
    """softmax(scaling q k^T) v with a causal mask, all in the dtype of its inputs; with a window W a row sees itself and the W - 1
    rows before it. query [1, H, T, D], key [1, J, T, D]."""
    repeat, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(2, 3) * scaling
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    hidden = future if sliding_window is None else future | torch.ones(length, length, dtype=torch.bool).tril(-sliding_window)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("espalier_oracle_float64", attention64)


def norm64(module, hidden):
    return module.weight * hidden * torch.rsqrt((hidden * hidden).mean(-1, keepdim=True) + module.variance_epsilon)


def router64(module, hidden):
    """Softmax over all experts, the largest of them, their shares where the config says so."""
    hidden = hidden.reshape(-1, module.hidden_dim)
    logits = hidden @ module.weight.T
    weights, chosen = torch.topk(torch.softmax(logits, dim=-1), module.top_k, dim=-1)
    return logits, weights / weights.sum(-1, keepdim=True) if module.norm_topk_prob else weights, chosen


def of_files(tensors, model):
    """{name: tensor} of parameters, in the tensors of the files that transformers saves: names, experts apart or stacked, fused matrices.
    Adapters have the names of modules."""
    if any(".lora_" in name for name in tensors):
        return tensors
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}


class Wide(TorchFunctionMode):
    """Keeps float64 wherever transformers asks for float32."""

    CHANGES = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.softmax, torch.arange, torch.empty, torch.tensor, torch.zeros, torch.softmax,
               torch.nn.functional.softmax)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.float:
            return args[0].double()
        if getattr(function, "__name__", "") in ("div", "__truediv__") and isinstance(args[0], torch.Tensor) and not args[0].is_floating_point():
            args = (args[0].double(), *args[1:])  # whole numbers would become float32
        if function in self.CHANGES:
            wide = lambda x: torch.float64 if x is torch.float32 else x
            args, kwargs = tuple(wide(x) for x in args), {name: wide(x) for name, x in kwargs.items()}
        return function(*args, **kwargs)


# Families whose float64 formulas stand above, so that they share nothing with transformers' own.
WITH_FORMULAS = ("Llama", "Mistral", "Qwen2", "Qwen3For", "Qwen3Moe")


def widened(model):
    """transformers' own code in float64: rotary tables are made again, and each forward runs in `Wide`."""
    decoder = getattr(model.model, "language_model", model.model)  # beside a vision tower
    if getattr(decoder, "rotary_emb", None) is not None:
        with Wide():
            decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config.get_text_config())
    forward = model.forward

    def wide_forward(*arguments, **keywords):
        with Wide():
            return forward(*arguments, **keywords)

    model.forward = wide_forward
    return model


def run_experts_one_by_one(model):
    """Grouped products of experts know no float64."""
    if any(hasattr(model.config.get_text_config(), name) for name in ("num_experts_per_tok", "top_k_experts")):
        model.set_experts_implementation("eager")


def load_model(directory, dtype, kind=transformers.AutoModelForCausalLM):
    """The model in eval mode with gradients on. dtype float64 replaces what transformers would compute in float32."""
    # Some routers' weights are declared in float32, and are read so, whatever the dtype is.
    with Wide() if dtype == torch.float64 else contextlib.nullcontext():
        model = kind.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    run_experts_one_by_one(model)
    rope = (getattr(model.config.get_text_config(), "rope_parameters", None) or {}).get("rope_type", "default")
    if dtype == torch.float64 and not (type(model).__name__.startswith(WITH_FORMULAS) and rope in ("default", "llama3")):
        return widened(model)
    if dtype == torch.float64:
        model.config._attn_implementation = "espalier_oracle_float64"
        model.model.rotary_emb = Rotary(model.config)
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = norm64.__get__(module)
            if type(module).__name__.endswith("TopKRouter"):
                module.forward = router64.__get__(module)
    return model


def response_logprobs(model, record, more=0):
    """Log-probs of the response tokens and entropies of their distributions, both [R], each over the record's kept ids of the token if there are
    some. `more` tokens behind the response change nothing but the sizes of the products, and so what is rounded."""
    prompt, response = record["prompt_ids"], record["response_ids"]
    if not response:
        empty = torch.zeros(0, dtype=model.dtype)
        return empty, empty
    ids = torch.tensor([prompt + response + prompt[:1] * more])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1:len(prompt) + len(response) - 1]
    log_softmax = torch.log_softmax(logits / record.get("temperature", 1.0), dim=-1)
    if record.get("kept_ids"):
        over = [one if ids is None else torch.log_softmax(one[ids], 0) for one, ids in zip(log_softmax, record["kept_ids"])]
        places = [token if ids is None else ids.index(token) for token, ids in zip(response, record["kept_ids"])]
        return torch.stack([one[place] for one, place in zip(over, places)]), torch.stack([-(one.exp() * one).sum() for one in over])
    logprob = log_softmax.gather(1, torch.tensor(response)[:, None])[:, 0]
    return logprob, -(log_softmax.exp() * log_softmax).sum(-1)


def score(model, records):
    with torch.no_grad():
        pairs = [response_logprobs(model, record) for record in records]
    return [p[0].tolist() for p in pairs], [p[1].tolist() for p in pairs]


def gradients(model, records, advantage_series, options, more=0):
    """(loss, its parts, {name: gradient}, log-probs, entropies) of one mini-batch; tied weights stand once."""
    model.zero_grad(set_to_none=True)
    pairs = [response_logprobs(model, record, more) for record in records]
    logprobs, entropies = [p[0] for p in pairs], [p[1] for p in pairs]
    loss, parts = objective.loss(records, logprobs, entropies, advantage_series, options)
    if loss.requires_grad:
        loss.backward()
    found = of_files({name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}, model)
    series = [x.detach().tolist() for x in logprobs], [x.detach().tolist() for x in entropies]
    return float(loss.detach()), {k: float(v.detach()) for k, v in parts.items()}, found, *series


def response_values(model, record):
    """A critic's value before each response token, [R]."""
    prompt, response = record["prompt_ids"], record["response_ids"]
    if not response:
        return torch.zeros(0, dtype=model.dtype)
    return model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1:-1, 0]


def values(model, records):
    with torch.no_grad():
        return [response_values(model, record).tolist() for record in records]


def value_gradients(model, records, returns, options):
    """(loss, {name: gradient}) of the critic's mini-batch; records have `values`."""
    model.zero_grad(set_to_none=True)
    loss = objective.value_loss(records, [response_values(model, record) for record in records], returns, options)
    loss.backward()
    return float(loss.detach()), of_files({name: p.grad.clone() for name, p in model.named_parameters()}, model)


def mini_batches(records, size):
    """Indices of the records of each optimizer step: by `step`, else whole groups in order of first appearance."""
    if all("step" in r for r in records):
        return [[i for i, r in enumerate(records) if r["step"] == step] for step in sorted({r["step"] for r in records})]
    groups = {}
    for index, record in enumerate(records):
        groups.setdefault(objective.group_of(record), []).append(index)
    batches = [[]]
    for indices in groups.values():
        if size and batches[-1] and len(batches[-1]) + len(indices) > size:
            batches.append([])
        batches[-1] += indices
    return [sorted(batch) for batch in batches]


def global_norm(gradients):
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


class AdamW:
    """torch.optim.AdamW with decay of all or of matrices, clipping by the global norm and a linear warm-up from 0."""

    def __init__(self, model, *, lr, max_grad_norm=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, warmup_steps=0,
                 decay_matrices_only=False):
        self.parameters, self.lr, self.max_grad_norm, self.warmup_steps = dict(model.named_parameters()), lr, max_grad_norm, warmup_steps
        plain = [p for p in self.parameters.values() if decay_matrices_only and p.dim() < 2]
        decayed = [p for p in self.parameters.values() if not (decay_matrices_only and p.dim() < 2)]
        self.optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
                                           lr=lr, betas=betas, eps=eps)
        self.done = 0

    def step(self, gradients):
        """Updates by {name of a parameter: gradient} and returns the learning rate."""
        factor = min(1.0, self.max_grad_norm / (global_norm(gradients) + 1e-6)) if self.max_grad_norm else 1.0
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name] * factor
        # as transformers' get_constant_schedule_with_warmup: the first step has rate 0
        rate = self.lr * min(1.0, self.done / self.warmup_steps) if self.warmup_steps else self.lr
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.done += 1
        return rate


def train(model, records, options, *, epochs=1, mini_batch_size=0, **settings):
    """Runs the update in place. Returns one (loss, gradient norm, gradients) per step; `settings` are those of AdamW."""
    optimizer, everything, history = AdamW(model, **settings), objective.advantages(records, options), []
    for _ in range(epochs):
        for indices in mini_batches(records, mini_batch_size):
            batch, series = [records[i] for i in indices], [everything[i] for i in indices]
            loss, _, found, *_ = gradients(model, batch, series, options)
            grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            optimizer.step(grads)
            history.append((loss, global_norm(grads), found))
    return history
