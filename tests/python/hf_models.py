"""Small random transformers models, a batch with shared prompts, a loss that reads everything, and the plain dense step beside it."""

import contextlib

import torch
import transformers
from torch.overrides import TorchFunctionMode

from rank_processes import written_by_ranks

COMMON = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
              initializer_range=.15, max_position_embeddings=512, pad_token_id=0)
FAMILIES = {
    "Llama": {}, "Qwen2": {}, "Qwen3": dict(head_dim=16), "Mistral": dict(sliding_window=None), "Olmo2": {}, "Phi3": {},
    "Glm4": dict(head_dim=16), "Gemma": dict(head_dim=16),
    "Mixtral": dict(num_local_experts=6, num_experts_per_tok=2, sliding_window=None, experts_implementation="eager"),
    "Qwen3Moe": dict(head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, experts_implementation="eager"),
}


def make(family, dtype=torch.float64, **changes):
    torch.manual_seed(1)
    config = getattr(transformers, family + "Config")(**{**COMMON, **FAMILIES[family], **changes})
    return getattr(transformers, family + "ForCausalLM")(config).to(dtype).train()


LORA = {"Phi3": ["qkv_proj", "gate_up_proj"], "Glm4": ["q_proj", "v_proj", "gate_up_proj"], "Mixtral": ["q_proj", "v_proj"],
        "Qwen3Moe": ["q_proj", "v_proj"]}


def adapted(family):
    """With LoRA on q, v and up, where they are projections of their own: keys of the first layer have no graph, all others do."""
    import peft
    model = peft.get_peft_model(make(family), peft.LoraConfig(r=4, target_modules=LORA.get(family, ["q_proj", "v_proj", "up_proj"]),
                                                              lora_dropout=0.0)).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=.1)
    return model


def checkpointed(model):
    """For steps inside `all_float64`."""
    again = lambda: (contextlib.nullcontext(), Wide())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": again})
    if hasattr(model, "peft_config"):
        model.enable_input_require_grads()
    return model


class Wide(TorchFunctionMode):
    """Keeps float64 where transformers rounds to float32 (norms, rotary tables, router softmax), so that what is left of a
    difference is Espalier's. What a backward runs again needs it once more (`checkpointed`)."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.float:
            return args[0].double()
        wide = lambda x: torch.float64 if x is torch.float32 else x
        if function in (torch.Tensor.to, torch.Tensor.type) and args[0].dtype == torch.float64:
            args, kwargs = tuple(wide(x) for x in args), {k: wide(x) for k, x in kwargs.items()}
        if function in (torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax, torch.linalg.vector_norm) and args[0].dtype == torch.float64:
            kwargs = {k: wide(x) for k, x in kwargs.items()}
        if function is torch.zeros_like and args[0].dtype == torch.float64:
            kwargs = {k: wide(x) for k, x in kwargs.items()}
        if function is torch.nn.functional.grid_sample:  # of float32 places
            args = (args[0], args[1].to(args[0].dtype), *args[2:])
        return function(*args, **kwargs)


def batch(seed=3, groups=((53, (17, 5, 0, 12)), (21, (7, 1))), stem=9):
    """Groups (prompt length, response lengths); to the first group two responses with a common beginning and the beginning itself."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, 97, (n,), generator=generator).tolist()
    out = []
    for g, (length, responses) in enumerate(groups):
        prompt = draw(length)
        out += [dict(prompt_ids=prompt, response_ids=draw(n)) for n in responses]
        if g == 0 and stem:
            beginning = draw(stem)
            out += [dict(prompt_ids=prompt, response_ids=beginning + draw(n)) for n in (6, 0, 8)]
    return out


def loss_of(rollouts, seed=5, device="cpu"):
    """A clipped ratio with old log-probs and advantages drawn, and an entropy term: sums over tokens, so it adds up over waves."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(len(r["response_ids"]) for r in rollouts)
    advantages = torch.randn(len(rollouts), generator=generator, dtype=torch.float64).to(device)
    old = (-4.5 + torch.randn(len(rollouts), longest, generator=generator, dtype=torch.float64) * .3).to(device)

    def loss(wave):
        at = advantages[wave.rollout].to(wave.logprobs.dtype)
        ratio = (wave.logprobs - old[wave.rollout, wave.position].to(at.dtype)).clamp(-3, 3).exp()
        return -(torch.minimum(ratio * at, ratio.clamp(.8, 1.2) * at).sum() + .1 * (wave.entropies * at).sum()) / 50

    return loss


class PlainWave:
    def __init__(self, rollouts, rollout, position, logprobs, entropies):
        self.rollouts, self.rollout, self.position, self.logprobs, self.entropies = rollouts, rollout, position, logprobs, entropies


def dense_step(model, rollouts, loss, temperature=1.0):
    """One rollout a call, transformers' own sdpa, autograd of the plain formulas. Returns the loss; gradients are added."""
    total = 0.0
    for i, record in enumerate(rollouts):
        prompt, response = record["prompt_ids"], record["response_ids"]
        if not response:
            continue
        logits = model(input_ids=torch.tensor([prompt + response[:-1]]), use_cache=False).logits[0, len(prompt) - 1:]
        logp = torch.log_softmax((logits if logits.dtype == torch.float64 else logits.float()) / temperature, -1)
        wave = PlainWave([i], torch.full((len(response),), i), torch.arange(len(response)),
                         logp.gather(1, torch.tensor(response)[:, None])[:, 0], -(logp.exp() * logp).sum(-1))
        value = loss(wave)
        value.backward()
        total += float(value.detach())
    return total


def shared_step(model, rollouts, loss, **how):
    """phased_step that shares whatever the plan predicts: of models this small it would often run dense."""
    import espalier.hf
    return espalier.hf.phased_step(model, rollouts, loss, schedule="shared", **how)


def gradients(model):
    out = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out


def worst(found, wanted):
    """The largest relative distance of a parameter's gradient, and its name; the same parameters must have one."""
    assert set(found) == set(wanted), sorted(set(found) ^ set(wanted))
    errors = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-30)) for name in wanted
              if wanted[name].norm() != 0 or found[name].norm() != 0}
    return max((error if error == error else float("inf"), name) for name, error in errors.items())


@contextlib.contextmanager
def all_float64(on=True):
    with Wide() if on else contextlib.nullcontext():
        yield


def run_ranks(folder, families, how="all"):
    """What both of two processes wrote (hf_ranks.py); `how` is "beside": a third one is outside their device mesh."""
    return written_by_ranks("hf_ranks.py", folder, 3 if how == "beside" else 2, [how, *families], 900 * len(families), writers=2)
