"""phased_step gives the gradients of the plain dense step, float64 to 1e-10, around unmodified models of ten families, under every
way of cutting the step; and the log-probs alone too. bench/phased_errors.py runs every combination."""

import pytest
import torch

from hf_combinations import AROUND, PLANS, errors, walks
from hf_models import FAMILIES, all_float64, batch, dense_step, gradients, loss_of, make, shared_step, worst

hf = pytest.importorskip("espalier.hf")
from espalier.rows.visibility import Rule  # noqa: E402
ROLLOUTS = batch()
LOSS = loss_of(ROLLOUTS)


def assert_exact(found):
    assert max(found.values()) <= 1e-10, found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("around", ["as it is", "tied"])
def test_gradients_are_those_of_the_dense_step(family, around):
    assert_exact(errors(AROUND[around](family), {name: PLANS[name] for name in ("one prompt, one wave", "responses with a common beginning")}))


@pytest.mark.parametrize("plan", PLANS)
def test_every_kind_of_plan(plan):
    assert_exact(errors(make("Qwen3"), {plan: PLANS[plan]}))


@pytest.mark.parametrize("wave_tokens", [3, 8, 30, 100])
def test_every_cut_of_a_deep_tree(wave_tokens):
    assert_exact(errors(make("Qwen3"), {"cut": (ROLLOUTS, wave_tokens)}))


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_in_torch_s_own_kernels(family, monkeypatch):
    """As on a GPU: squares and rectangles merged, instead of one call of the engine's kernel."""
    from espalier import kernels
    monkeypatch.setattr(kernels, "serves", lambda tensor: False)
    monkeypatch.setattr(kernels, "attention_forward", None)
    assert_exact(errors(make(family), {name: plan for name, plan in PLANS.items() if name != "trees of any depth"}))


@pytest.mark.parametrize("seed", range(1, 4))
def test_trees_of_any_depth_over_several_groups(seed):
    rollouts = walks(seed)
    assert_exact(errors(make("Qwen3"), {str(wave_tokens): (rollouts, wave_tokens) for wave_tokens in (15, 4096)}))


def plain_rows(q, k, v, scale, seen):
    """q [1, H, T, D] over all keys [1, J, K, .], of which row t sees seen[t]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return ((q @ k.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("rule", [Rule(), Rule(window=4), Rule(chunk=3)])
@pytest.mark.parametrize("value_size", [16, 24])
def test_rows_below_different_trunks_in_one_call(value_size, rule):
    """Two nested trunks, one of them alone, none; heads of values may have a size of their own, then torch's kernels run, as where a rule
    counts depths."""
    from espalier.hf.attention import Phase
    from espalier.rows.attention import RowAttention
    from espalier.rows.trunk import RowSet, Trunk
    generator = torch.Generator().manual_seed(2)
    draw = lambda heads, rows, size: torch.randn(1, heads, rows, size, generator=generator, dtype=torch.float64)
    outer, inner = Trunk(5), Trunk(3)
    for trunk in (outer, inner):
        trunk.take(0, draw(2, trunk.rows, 16).requires_grad_(), draw(2, trunk.rows, value_size).requires_grad_())
    # a run of 2 that two runs follow; a run of 4; two runs of 2
    sets = [RowSet(0, (outer, inner), [(0, 2, 7), (2, 3, 5), (5, 2, 7)]), RowSet(7, (outer,), [(7, 4, 11)]), RowSet(11, (), [(11, 2, 13), (13, 2, 15)])]
    own = [draw(4, 15, 16), draw(2, 15, 16), draw(2, 15, value_size)]
    seen = torch.zeros(15, 5 + 3 + 15, dtype=torch.bool)
    seen[:11, :5] = seen[:7, 5:8] = True
    for begin, length, end in (run for rows in sets for run in rows.runs):
        seen[begin:end, 8 + begin:8 + begin + length] = torch.ones(end - begin, length, dtype=torch.bool).tril()
    depth = torch.tensor([8, 9, 10, 11, 12, 10, 11, 5, 6, 7, 8, 0, 1, 0, 1])
    keys = torch.cat([torch.arange(8), depth])
    seen &= keys >= torch.from_numpy(rule.lowest(depth.numpy()))[:, None]
    leaves = [x.requires_grad_() for x in own]
    out = RowAttention.apply(*leaves, None, .3, Phase(sets, 15), 0, rule)
    joined = [torch.cat([outer.live[0][i], inner.live[0][i], leaves[i + 1]], 2) for i in range(2)]
    wanted = plain_rows(leaves[0], *joined, .3, seen)
    slope = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    theirs = torch.autograd.grad(wanted, [*leaves, *outer.live[0], *inner.live[0]], slope)
    ours = [*torch.autograd.grad(out, leaves, slope), *(grad for trunk in (outer, inner) for grad in trunk.gathered()[1::2])]
    # Sums of at most 23 terms of size one, three of them one after the other.
    for got, want in zip([out, *ours], [wanted, *theirs], strict=True):
        assert got.shape == want.shape and float((got - want).detach().norm() / want.detach().norm()) <= 64 * torch.finfo(torch.float64).eps


def test_a_step_reports_rows_time_and_memory():
    result = shared_step(make("Qwen3", torch.float32), ROLLOUTS, LOSS)
    assert result.rows < result.rows_without_sharing and result.seconds > 0 and result.peak_bytes > 2**20
    assert str(result).startswith(f"{result.rows} rows run instead of {result.rows_without_sharing} (")


def test_temperature_divides_the_logits():
    model = make("Llama")
    with all_float64():
        dense_step(model, ROLLOUTS, LOSS, temperature=.7)
        wanted = gradients(model)
        shared_step(model, ROLLOUTS, LOSS, wave_tokens=30, temperature=.7)
        assert worst(gradients(model), wanted)[0] <= 1e-10


def test_gradients_are_added_to_what_is_there():
    model = make("Llama")
    with all_float64():
        shared_step(model, ROLLOUTS, LOSS)
        once = {name: p.grad.clone() for name, p in model.named_parameters()}
        shared_step(model, ROLLOUTS, LOSS)
    assert worst(gradients(model), {name: 2 * g for name, g in once.items()})[0] <= 1e-12


@pytest.mark.parametrize("wave_tokens", [16, 4096])
def test_logprobs_without_gradients(wave_tokens):
    model = make("Qwen3").eval()
    with all_float64(), torch.no_grad():
        found = hf.logprobs(model, ROLLOUTS, wave_tokens=wave_tokens, temperature=1.3)
        for record, values in zip(ROLLOUTS, found):
            prompt, response = record["prompt_ids"], record["response_ids"]
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1] / 1.3
            wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(response, dtype=torch.long)[:, None])[:, 0]
            assert values.shape == wanted.shape and not values.requires_grad
            assert len(wanted) == 0 or float((values - wanted).abs().max()) <= 1e-10
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("wave_tokens", [8, 4096])
def test_a_wave_holds_whole_responses_in_order(wave_tokens):
    seen = []

    def loss(wave):
        assert wave.rollouts == sorted(set(wave.rollouts))
        wanted = [(i, t) for i in wave.rollouts for t in range(len(ROLLOUTS[i]["response_ids"]))]
        assert list(zip(wave.rollout.tolist(), wave.position.tolist())) == wanted and len(wave) == len(wanted)
        seen.extend(wave.rollouts)
        return LOSS(wave)

    shared_step(make("Qwen2", torch.float32), ROLLOUTS, loss, wave_tokens=wave_tokens)
    assert sorted(seen) == [i for i, r in enumerate(ROLLOUTS) if r["response_ids"]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_verification_finds_rounding_only(dtype):
    model = make("Qwen3", dtype)
    result = shared_step(model, ROLLOUTS, LOSS, wave_tokens=30, verify=True)
    assert result.verification.verdict == "pass" and "pass: " in str(result.verification)
    again = shared_step(model, ROLLOUTS, LOSS, wave_tokens=30, verify=True)
    assert result.verified and again.verification is None and again.verified


def test_verification_catches_a_wrong_gradient(monkeypatch):
    """A trunk whose keys get one percent too much."""
    import espalier
    from espalier.rows.trunk import Trunk
    model = make("Qwen3", torch.float32)
    gathered = Trunk.gathered
    monkeypatch.setattr(Trunk, "gathered", lambda self: [x * 1.01 if i % 4 == 1 else x for i, x in enumerate(gathered(self))])
    with pytest.raises(espalier.Error) as caught:
        shared_step(model, ROLLOUTS, LOSS, wave_tokens=30, verify=True)
    assert caught.value.kind == "verification" and caught.value.exit_code == 6
    assert all(p.grad is not None for p in model.parameters())


def test_few_rollouts_without_a_shared_prompt_cost_no_row_more():
    apart = batch(groups=((20, (5,)), (11, (9,)), (30, (4,))), stem=0)
    result = shared_step(make("Llama", torch.float32), apart, loss_of(apart))
    assert result.rows <= result.rows_without_sharing and result.waves == 1
