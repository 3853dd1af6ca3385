"""Trainer, verify and gradient checkpointing, second model, LoRA: every pair of choices meets in one of these runs, and each run trains with
the bits of the same run without verify and without checkpointing. A second model's pass stands between the policy's forward and its backward,
in which checkpointed layers run again: whatever happens in it, the policy's layers must be those of its forward."""

import functools
import itertools

import pytest
import torch

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
pytest.importorskip("datasets")
shared = pytest.importorskip("espalier.trl")

import trl_batches as data  # noqa: E402
from espalier.errors import Unsupported  # noqa: E402
from espalier.hf import probe  # noqa: E402
from espalier.trl import batches  # noqa: E402
from test_trl_batches import KINDS, settings_of  # noqa: E402
from test_trl_trainer import LEAST_ALLOWED, load_example, run  # noqa: E402
from test_trl_tree import Holder, batch  # noqa: E402

FACTORS = {"trainer": [*KINDS, "grpo", "rloo"], "mode": ["verify, checkpointing", "verify", "checkpointing"], "second": ["runs", "refused"], "lora": [False, True]}
ROLLOUTS = {"grpo": (shared.GRPOTrainer, trl.GRPOConfig), "rloo": (shared.RLOOTrainer, trl.RLOOConfig)}


def pairwise(factors):
    """Few rows that hold every pair of values of two factors: each next row is one with the most pairs that no earlier row holds."""
    pairs = lambda row: {frozenset(two) for two in itertools.combinations(enumerate(row), 2)}
    rows = [*itertools.product(*factors.values())]
    missing, chosen = set().union(*map(pairs, rows)), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def adapters(task="CAUSAL_LM"):
    """Adapters whose output is not zero at the beginning."""
    return peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type=task)


def with_lora(make, task):
    def made():
        torch.manual_seed(4)
        return peft.get_peft_model(make(), adapters(task))
    return made


def refused_without_gradients(out):
    if not torch.is_grad_enabled() and not probe.running():
        raise Unsupported("second model", "a pass that can be shared", "one that cannot")
    return out


def refusing(trainer_class):
    """The trainer with passes that are refused in the midst of their call if they have no gradients: those of a reference or a teacher."""
    class Refusing(trainer_class):
        def _shared(self, *args):
            return refused_without_gradients(super()._shared(*args))

        def _of_parts(self, *args):
            return refused_without_gradients(super()._of_parts(*args))

    return Refusing


def trained(folder, trainer, mode, second, lora):
    """(losses, gradients, rows) of a run of one step."""
    settings = dict(gradient_checkpointing="checkpointing" in mode, max_steps=1)
    if trainer in ROLLOUTS:
        ours, config = ROLLOUTS[trainer]
    else:
        _, ours, made = settings_of(trainer, next(iter(KINDS[trainer][-1])))
    ours = refusing(ours) if second == "refused" else ours
    more = dict(verify="verify" in mode, **dict(peft_config=adapters()) if lora and trainer in ROLLOUTS else {})
    ours = type(ours.__name__, (ours,), {"__init__": functools.partialmethod(ours.__init__, **more)})
    if trainer in ROLLOUTS:
        done = run(load_example(), ours, config, folder, max_completion_length=6, beta=0.1, **settings)
    else:
        if lora:
            make = KINDS[trainer][3].get("make", data.example.small_model)
            settings |= dict(make=with_lora(make, "SEQ_CLS" if trainer == "reward" else "CAUSAL_LM"), reference=False)
        done = made(ours, folder, **settings)
    return done.losses, done.grads, done.shared_rows


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The function that runs a case without verify and without checkpointing, each once."""
    return functools.cache(lambda trainer, second, lora: trained(tmp_path_factory.mktemp(trainer), trainer, "", second, lora))


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=lambda case: "-".join(map(str, case)))
def test_a_run_has_the_bits_of_the_one_without_verify_and_checkpointing(case, tmp_path, expected):
    trainer, _, second, lora = case
    losses, grads, rows = trained(tmp_path, *case)
    plain = expected(trainer, second, lora)
    assert losses == plain[0] and rows == plain[2]
    assert second == "refused" or 0 < rows["run"] < rows["without_sharing"]
    assert len(grads) == len(plain[1]) == 1
    assert all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in zip(grads, plain[1]))


class Shared(shared.SharedBatches, Holder):
    pass


@pytest.mark.parametrize("refused", [False, True])
def test_a_call_that_is_refused_leaves_an_earlier_one_its_layers(refused, monkeypatch):
    """The same model twice before one backward, in which checkpointed layers run again."""
    model = data.example.small_model().train()
    _, ids, mask = batch(3)
    total = lambda: sum(model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[mask.bool()].square().sum() for _ in range(2))
    total().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    model.gradient_checkpointing_enable()
    trainer, run_tree, calls = Shared(model), batches._run, []

    def second_refused(*args):
        calls.append(args)
        if refused and len(calls) == 2:
            raise Unsupported("this batch", "a pass that can be shared", "one that cannot")
        return run_tree(*args)

    monkeypatch.setattr(batches, "_run", second_refused)
    with trainer._shared_backbones():
        value = total()
    value.backward()
    trainer._end_step()
    assert len(calls) == 2 and trainer.shared_rows["run"] > 0 and model.config._attn_implementation == "sdpa"
    # Sums over some hundred rows with roundings of 6e-8 each.
    size = sum(g.square().sum() for g in wanted.values()).sqrt()
    assert all(float((p.grad - wanted[name]).norm() / size) < LEAST_ALLOWED for name, p in model.named_parameters() if name in wanted)
