"""Attention on a GPU (by_calls.py, by_gather.py): the rows, runs and merges in float64 with the kernels' documented meaning written plainly,
and on tensors without memory the number of operations, whatever the number of responses, and that the host waits for none of them."""

import contextlib

import pytest
import torch

import hf_layers
from hf_counts import Counted, attention_operations, layer_operations
from hf_models import all_float64, batch, dense_step, gradients, loss_of, make, worst

hf = pytest.importorskip("espalier.hf")
from espalier.rows import blocks, by_calls, by_efficient, by_flash, by_gather, by_kernel  # noqa: E402
from espalier.rows.visibility import Rule  # noqa: E402


def sequences(q, k, ends_q, ends_k):
    """Rows of the queries and of the keys of every sequence."""
    if ends_q is None:
        return [(slice(0, len(q)), slice(0, len(k)))]
    ends_q, ends_k = ends_q.tolist(), ends_k.tolist()
    return [(slice(*rows), slice(*keys)) for rows, keys in zip(zip(ends_q, ends_q[1:]), zip(ends_k, ends_k[1:]))]


def hidden(rows, keys, causal, left, right):
    """[rows, keys], what a row does not see. The last row stands at the last key; it sees `left` keys before its own and `right` behind it, -1: all."""
    distance = torch.arange(keys)[None] - (torch.arange(rows)[:, None] + keys - rows)
    right = 0 if causal else right
    return (distance > right if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)) | (distance < -left if left >= 0 else False)


def plain(q, k, v, causal, scale, left=-1, right=-1):
    """One sequence: out [T, H, E], lse [H, T]; J heads of keys and values for H of queries."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    scores = scores.masked_fill(hidden(len(q), len(k), causal, left, right), float("-inf"))
    assert scores.amax(-1).isfinite().all(), "a row that sees nothing: kernels differ in what they return"
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


def plain_forward(q, k, v, ends_q, ends_k, longest_q, longest_k, causal, scale, window_size_left=-1, window_size_right=-1):
    batched = ends_q is None
    if batched:
        q, k, v = q[0], k[0], v[0]
    parts = [plain(q[rows], k[keys], v[keys], causal, scale, window_size_left, window_size_right) for rows, keys in sequences(q, k, ends_q, ends_k)]
    assert (longest_q, longest_k) == tuple(max(s.stop - s.start for s in side) for side in zip(*sequences(q, k, ends_q, ends_k)))
    out, lse = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], 1)
    return (out[None], lse[None]) if batched else (out, lse)


def plain_backward(go, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, causal, scale, window_size_left=-1, window_size_right=-1):
    """By the formula at the top of blocks.py: out and lse are those of the merged softmax."""
    batched = ends_q is None
    if batched:
        go, q, k, v, out, lse = (x[0] for x in (go, q, k, v, out, lse))
    assert lse.is_contiguous() and lse.shape == (q.shape[1], len(q))
    dq, dk, dv, shared = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), q.shape[1] // k.shape[1]
    for rows, keys in sequences(q, k, ends_q, ends_k):
        kk, vv = (x[keys].repeat_interleave(shared, 1) for x in (k, v))
        p = (torch.einsum("thd,shd->hts", q[rows], kk) * scale - lse[:, rows, None]).exp()
        p = p.masked_fill(hidden(len(q[rows]), len(kk), causal, window_size_left, window_size_right), 0)
        ds = p * (torch.einsum("thd,shd->hts", go[rows], vv) - (go[rows] * out[rows]).sum(-1).T[..., None]) * scale
        dq[rows] += torch.einsum("hts,shd->thd", ds, kk)
        dk[keys] += torch.einsum("hts,thd->shd", ds, q[rows]).unflatten(1, (-1, shared)).sum(2)
        dv[keys] += torch.einsum("hts,thd->shd", p, go[rows]).unflatten(1, (-1, shared)).sum(2)
    return [x[None] for x in (dq, dk, dv)] if batched else [dq, dk, dv]


def padded_rows(longest):
    return -(-longest // 32) * 32


def expect_mask(ends_q, ends_k, mask):
    """0: none; 1: causal from the first row and key on; 2: from the last ones back."""
    assert mask in ((0,) if ends_q is None else (0, 1, 2)) and (mask != 1 or torch.equal(ends_q, ends_k))


def efficient_forward(q, k, v, ends_q, ends_k, longest_q, longest_k, mask, scale):
    """As the memory-efficient kernel: a batch of one, equal heads, lse [runs, H, rows up to whole warps] filled with infinity."""
    assert len(q) == len(k) == len(v) == 1 and q.shape[2] == k.shape[2] == v.shape[2]
    expect_mask(ends_q, ends_k, mask)
    if ends_q is None:
        longest_q, longest_k = q.shape[1], k.shape[1]
    out, lse = plain_forward(q[0], k[0], v[0], *(torch.tensor([0, n]) if ends is None else ends for ends, n in ((ends_q, longest_q), (ends_k, longest_k))),
                             longest_q, longest_k, mask > 0, scale)
    rows = [rows for rows, _ in sequences(q[0], k[0], ends_q, ends_k)]
    return out[None], torch.stack([torch.nn.functional.pad(lse[:, at], (0, padded_rows(longest_q) - (at.stop - at.start)), value=float("inf")) for at in rows])


def efficient_backward(go, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, mask, scale):
    assert q.shape[2] == k.shape[2] and lse.is_contiguous()
    expect_mask(ends_q, ends_k, mask)
    rows = [rows for rows, _ in sequences(q[0], k[0], ends_q, ends_k)]
    assert lse.shape == (len(rows), q.shape[2], padded_rows(longest_q))
    for at, own in zip(rows, lse):
        assert (own[:, at.stop - at.start:] == float("inf")).all()
    lse = torch.cat([own[:, :at.stop - at.start] for at, own in zip(rows, lse)], 1)
    ends = [torch.tensor([0, n]) if ends is None else ends for ends, n in ((ends_q, longest_q), (ends_k, longest_k))]
    return [x[None] for x in plain_backward(go[0], q[0], k[0], v[0], out[0], lse, *ends, longest_q, longest_k, mask > 0, scale)]


@pytest.fixture(params=["flash", "efficient"])
def calls(request, monkeypatch):
    """Runs attention as on a GPU, in plain products; the calls of its kernels."""
    return as_on_a_gpu(monkeypatch, request.param)


def as_on_a_gpu(monkeypatch, kernels):
    seen = []

    def counted(plain):
        return lambda *operands, **window: seen.append(plain.__name__) or plain(*operands, **window)

    monkeypatch.setattr(by_kernel, "serves", lambda q, v=None: False)
    fits = lambda q, v: v is None or q.shape[-1] == v.shape[-1]
    monkeypatch.setattr(by_flash, "serves", lambda q, v=None: kernels == "flash" and fits(q, v))
    monkeypatch.setattr(by_efficient, "serves", lambda q, v=None: True)
    monkeypatch.setattr(by_flash, "_forward", counted(plain_forward))
    monkeypatch.setattr(by_flash, "_backward", counted(plain_backward))
    monkeypatch.setattr(by_efficient, "_forward", counted(efficient_forward))
    monkeypatch.setattr(by_efficient, "_backward", counted(efficient_backward))
    return seen


@pytest.mark.parametrize("family,trunk_state,wave_tokens", [("Llama", "keep", 7), ("Qwen3", "recompute", 40), ("Qwen3Moe", "keep", 4096)])
def test_the_gradient_is_that_of_the_dense_step(family, trunk_state, wave_tokens, calls):
    model, rollouts = make(family), batch()
    loss = loss_of(rollouts)
    with all_float64():
        dense_step(model, rollouts, loss)
        wanted = gradients(model)
        hf.phased_step(model, rollouts, loss, schedule="shared", wave_tokens=wave_tokens, trunk_state=trunk_state)
        assert worst(gradients(model), wanted)[0] <= 1e-10
    assert {"plain_forward", "plain_backward"} == set(calls) or {"efficient_forward", "efficient_backward"} == set(calls)


@pytest.mark.parametrize("case", ["phased", "trees of depth 3"])
def test_values_of_another_size_than_keys(case, monkeypatch):
    """In FlashAttention's types, too, where it does not serve them."""
    calls = as_on_a_gpu(monkeypatch, "flash")
    assert hf_layers.errors("DeepSeek-V3", case)[0] <= 1e-10
    assert set(calls) == {"efficient_forward", "efficient_backward"}


def test_a_merge_left_out_is_noticed(calls, monkeypatch):
    """By the comparison with the model's own logits that comes before a model's first step."""
    rollouts = batch()
    monkeypatch.setattr(by_calls, "_merge", lambda *operands: None)
    with pytest.raises(hf.Unsupported, match="logits of shared rows that differ"):
        hf.phased_step(make("Qwen3"), rollouts, loss_of(rollouts), schedule="shared")


# ---- forks ----

def forked():
    """A group with forks at three depths, and one whose responses begin alike."""
    generator = torch.Generator().manual_seed(4)
    draw = lambda n: torch.randint(3, 97, (n,), generator=generator).tolist()
    prompt, out = draw(30), []
    for _ in range(3):
        first = draw(4)
        for _ in range(2):
            second = first + draw(3)
            out += [dict(prompt_ids=prompt, response_ids=second + draw(5 + i)) for i in range(2)]
    other, begin = draw(9), draw(2)
    return out + [dict(prompt_ids=other, response_ids=begin + draw(n)) for n in (3, 8)]


@pytest.mark.parametrize("wave_tokens", [4096, 60, 25])
@pytest.mark.parametrize("copies", [0, 40, None, 10 ** 9])
def test_forks_have_the_gradient_of_the_dense_step(copies, wave_tokens, calls, monkeypatch):
    """Keys above a fork copied for all runs below, or a call for each level of forks, or both. 40: the rows of the deepest forks alone."""
    chosen = by_calls._chosen
    monkeypatch.setattr(by_calls, "_chosen", lambda forks, most: chosen(forks, most if copies is None else copies))
    model, rollouts = make("Qwen3"), forked()
    loss = loss_of(rollouts)
    with all_float64():
        dense_step(model, rollouts, loss)
        wanted = gradients(model)
        hf.phased_step(model, rollouts, loss, schedule="shared", wave_tokens=wave_tokens)
        assert worst(gradients(model), wanted)[0] <= 1e-10


@pytest.mark.parametrize("forks", [3, 300])
@pytest.mark.parametrize("copies,levels", [(0, 3), (12, 2), (36, 1), (10 ** 4, 0)])
def test_a_call_for_each_level_of_forks_whatever_their_number(forks, copies, levels, monkeypatch):
    """A prompt of 30 rows, below it forks of 4 rows with six runs below, and below each of these two of 3 rows with two runs each."""
    runs, at = [(0, 30, 30 + forks * 30)], 30
    for _ in range(forks):
        runs.append((at, 4, at + 30))
        for begin in (at + 4, at + 17):
            runs += [(begin, 3, begin + 13), (begin + 3, 5, begin + 8), (begin + 8, 5, begin + 13)]
        at += 30
    chosen = by_calls._chosen
    cheap, rest = chosen(by_calls._forks(runs), at)
    assert sum(fork.copies for fork in cheap) <= at and rest[0].copies == 30 * 7 * forks
    monkeypatch.setattr(by_calls, "_chosen", lambda forks_, most: chosen(forks_, copies * forks))
    assert by_calls.count(runs, 2) == 1 + 2 + levels


# ---- windows and chunks ----

WINDOWS = [("Mistral", case) for case in hf_layers.CASES] + [("Llama 4", case) for case in hf_layers.CASES] + [
    (family, "trees of depth 3") for family in ("Qwen 3", "OLMo 3", "Gemma 3", "gpt-oss")]


def no_blocks(*_):
    raise AssertionError("block by block")


@pytest.mark.parametrize("family,case", WINDOWS)
def test_a_window_is_one_call(family, case, monkeypatch):
    """Windows of 8 rows and chunks of 8, cut at forks of every kind."""
    calls = as_on_a_gpu(monkeypatch, "flash")
    monkeypatch.setattr(blocks, "forward", no_blocks)
    assert hf_layers.errors(family, case)[0] <= 1e-10
    assert set(calls) == {"plain_forward", "plain_backward"}


def test_gathered_keys_in_parts(monkeypatch):
    as_on_a_gpu(monkeypatch, "flash")
    monkeypatch.setattr(by_gather, "_KEYS", 20)
    assert hf_layers.errors("Mistral", "trees of depth 3")[0] <= 1e-10


@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_off_by_one_is_seen(by, monkeypatch):
    as_on_a_gpu(monkeypatch, "flash")
    window = by_flash._window
    monkeypatch.setattr(by_flash, "_window", lambda rows: window(rows + by))
    assert hf_layers.errors("Mistral", "trees of depth 3")[0] > 1e-3


def test_a_key_less_at_the_fork_is_seen(monkeypatch):
    """The first row of a run then sees one key less than its window has."""
    as_on_a_gpu(monkeypatch, "flash")
    lowest = Rule.lowest
    monkeypatch.setattr(Rule, "lowest", lambda rule, depths: lowest(rule, depths) + (len(depths) == 1) * (depths >= rule.window))
    assert hf_layers.errors("Mistral", "trees of depth 3")[0] > 1e-3


def test_what_a_window_is_not_for_runs_block_by_block(monkeypatch):
    as_on_a_gpu(monkeypatch, "flash")
    q = torch.empty(1, 4, 3, 16)
    assert by_gather.serves(q, q, Rule(window=8)) and by_gather.serves(q, q, Rule(chunk=8))
    assert not by_gather.serves(q, q, Rule(window=8, softcap=2.0)) and not by_gather.serves(q, q[..., :8], Rule(window=8))
    assert hf_layers.errors("Gemma 2", "packed")[0] <= 1e-10


# ---- operations ----

KINDS = {"bfloat16": dict(), "float32": dict(dtype=torch.float32), "a window": dict(rule=Rule(window=16)), "chunks": dict(rule=Rule(chunk=16)),
         "values of another size": dict(sizes=(64, 32))}
# Two calls of a kernel each way, about ten operations that merge their results, and as many around gradients and their sums; more copies where heads
# are repeated or folded into rows.
AT_MOST = {"bfloat16": 30, "float32": 60, "a window": 40, "chunks": 40, "values of another size": 70}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_takes_as_many_operations_whatever_the_number_of_responses(kind):
    one, *more = (attention_operations(responses, **KINDS[kind]) for responses in (1, 8, 32, 128))
    assert len({counted.launched for counted in more[1:]}) == 1
    assert all(abs(counted.launched - one.launched) <= 2 for counted in more)  # copies of what lies in order already if there is one
    assert one.launched <= AT_MOST[kind]
    assert not any(counted.waits for counted in (one, *more))


def test_a_layer_takes_as_many_operations_whatever_the_number_of_responses():
    """105 are transformers' own. A group's prompt is one more call each way, merged: 15. Responses that begin alike, 38 pairs of 128: keys and values
    gathered for both directions, and gradients added up."""
    alone, *more = (layer_operations(responses) for responses in (1, 8, 32, 128))
    assert alone <= 110 and more[0] == more[1] <= alone + 15 and more[2] <= more[1] + 12


def test_block_by_block_it_takes_more():
    """The counter counts: a block for each length of a run."""
    assert attention_operations(32, by_blocks=True).launched > 10 * attention_operations(1, by_blocks=True).launched


def test_a_trunk_s_keys_are_not_repeated():
    """Bytes that a longer trunk adds, in float32 with four query heads a head of keys: the kernel's two gradients of its keys and values, no more."""
    at = lambda prompt: attention_operations(4, torch.float32, prompt=prompt).bytes
    assert at(1100) - at(100) <= 1000 * 2 * (64 + 64) * 4


@pytest.mark.parametrize("waits,how", [
    (["_to_copy"], lambda x: torch.ones(2).to("meta")), (["_to_copy"], lambda x: torch.as_tensor([1, 2], device="meta")),
    (["_to_copy"], lambda x: x.cpu()), (["_local_scalar_dense"], float), (["_local_scalar_dense"], lambda x: x.item()),
    (["nonzero"], torch.nonzero), (["index"], lambda x: x[x > 0]), (["masked_select"], lambda x: x.masked_select(x > 0)),
    ([], lambda x: torch.ones(2).to("meta", non_blocking=True)), ([], lambda x: x[None][:, 0] + 1)])
def test_what_the_host_waits_for_is_noticed(waits, how):
    x = torch.ones(1, device="meta")
    with Counted() as counted, contextlib.suppress(NotImplementedError, RuntimeError):  # shapes that depend on values are unknown
        how(x)
    assert counted.waits == waits
