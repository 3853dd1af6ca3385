"""torch.ops.espalier.* against autograd of the plain formulas in float64, on the engine's kernels and on torch's own."""

import pytest
import torch

native = pytest.importorskip("espalier.native")
from espalier import ops  # noqa: F401  registers torch.ops.espalier
from espalier.errors import Error  # noqa: E402
from espalier import kernels  # noqa: E402
from espalier.ops import logprob as logprob_op  # noqa: E402
from espalier.rows import blocks, by_efficient, by_flash  # noqa: E402

EPSILON64 = torch.finfo(torch.float64).eps
# Sums of at most a few hundred terms of size one, in another order: a few hundred roundings in the worst case.
FLOAT64_TOLERANCE = 512 * EPSILON64


@pytest.fixture(autouse=True)
def _library():
    try:
        native.library()
    except Error as error:
        pytest.skip(f"the core library is not built: {error}")


@pytest.fixture(params=["kernels", "torch", "plain"])
def way(request, monkeypatch):
    """On which code the attention op runs: the engine's kernels, torch's fused ones, or blocks of plain products."""
    if request.param != "kernels":
        monkeypatch.setattr(kernels, "serves", lambda tensor: False)
    if request.param == "plain":
        monkeypatch.setattr(blocks, "_kernel", lambda *_: None)
        monkeypatch.setattr(blocks, "_CHUNK", 64)
    return request.param


# Forests: (subtree_end of every row). Chains, siblings, a tree of depth three, single rows.
FORESTS = {
    "chain": [6] * 6,
    "siblings": [4] * 4 + [9] * 5 + [10],
    "tree": [12, 12, 7, 7, 5, 7, 7, 12, 12, 12, 12, 12][:2] + [7, 7, 5, 7, 7] + [12] * 5,
    "single": [1],
    "singles": [1, 2, 3],
}


def operands(forest, path_rows, heads, kv_heads, size, dtype=torch.float64, seed=0):
    random = torch.Generator().manual_seed(seed)
    rows = len(FORESTS[forest])

    def draw(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_()

    return [draw(rows, heads, size), draw(rows, kv_heads, size), draw(rows, kv_heads, size),
            draw(path_rows, kv_heads, size), draw(path_rows, kv_heads, size),
            torch.tensor(FORESTS[forest], dtype=torch.int32)]


def plain_weights(q, k, path_k, subtree_end, scale):
    """Keys with heads repeated [K, H, D] and softmax weights [H, T, K], with their log-sum-exp [H, T]."""
    rows, heads, _ = q.shape
    keys = torch.cat((path_k, k)).repeat_interleave(heads // k.shape[1], 1)
    i, j = torch.arange(rows)[:, None], torch.arange(rows)[None]
    seen = torch.cat([torch.ones(rows, path_k.shape[0], dtype=torch.bool), (j <= i) & (i < subtree_end[None])], 1)
    scores = (torch.einsum("thd,khd->htk", q, keys) * scale).masked_fill(~seen, float("-inf"))
    return keys, scores.softmax(-1), scores.logsumexp(-1)


def plain_attention(q, k, v, path_k, path_v, subtree_end, scale):
    _, weights, lse = plain_weights(q, k, path_k, subtree_end, scale)
    values = torch.cat((path_v, v)).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.einsum("htk,khd->thd", weights, values), lse


def cancelling_terms(q, k, v, path_k, path_v, subtree_end, scale, slope):
    """Norms of the gradients with every term taken absolutely, in the order of the operands.

    dS = A (dO v - dO out) is a difference, exactly 0 where a row sees one key: its rounding is that of its terms."""
    with torch.no_grad():
        keys, weights, _ = plain_weights(q, k, path_k, subtree_end, scale)
        values = torch.cat((path_v, v)).repeat_interleave(q.shape[1] // k.shape[1], 1).abs()
        out = torch.einsum("htk,khd->thd", weights, values)
        slope = slope.abs()
        terms = weights * (torch.einsum("thd,khd->htk", slope, values) + (slope * out).sum(-1).t()[..., None]) * scale
        of_q = torch.einsum("htk,khd->thd", terms, keys.abs()).norm()
        of_k = torch.einsum("htk,thd->khd", terms, q.abs()).norm()
        of_v = torch.einsum("htk,thd->khd", weights, slope).norm()
    return of_q, of_k, of_v, of_k, of_v


def relative(found, wanted, terms=0.0):
    return ((found.double() - wanted).norm() / max(wanted.norm().item(), float(terms))).item()


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("path_rows,heads,kv_heads,size", [(0, 2, 2, 64), (5, 4, 2, 64), (19, 6, 1, 80), (33, 2, 2, 128)])
def test_attention_is_the_plain_formula(way, forest, path_rows, heads, kv_heads, size):
    given = operands(forest, path_rows, heads, kv_heads, size)
    out, lse = torch.ops.espalier.shared_prefix_attention(*given, None, None, 0.3)
    wanted_out, wanted_lse = plain_attention(*given, 0.3)
    assert relative(out, wanted_out) <= FLOAT64_TOLERANCE and relative(lse, wanted_lse) <= FLOAT64_TOLERANCE
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    found = torch.autograd.grad(out, given[:5], slope)
    wanted = torch.autograd.grad(wanted_out, given[:5], slope)
    for name, got, want, terms in zip("q k v path_k path_v".split(), found, wanted, cancelling_terms(*given, 0.3, slope)):
        assert got.shape == want.shape and relative(got, want, terms) <= FLOAT64_TOLERANCE, name


def test_path_gradients_of_several_waves_meet_in_the_buffers(way):
    path = operands("single", 9, 4, 2, 64)[3:5]
    buffers, wanted = ([torch.zeros_like(x) for x in path] for _ in range(2))
    for wave, forest in enumerate(("siblings", "tree", "single")):
        own = operands(forest, 9, 4, 2, 64, seed=10 + wave)
        inputs = [*own[:3], *path, own[5]]
        torch.ops.espalier.shared_prefix_attention(*inputs, *buffers)[0].square().sum().backward()
        plain = plain_attention(*inputs, 64 ** -0.5)[0]
        for into, grad in zip(wanted, torch.autograd.grad(plain.square().sum(), path)):
            into += grad
    for leaf, got, want in zip(path, buffers, wanted):
        assert leaf.grad is None and relative(got, want) <= FLOAT64_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_lower_dtypes_is_as_exact_as_torch(dtype):
    given = operands("tree", 40, 4, 2, 64, dtype)
    exact = [x.detach().double().requires_grad_() for x in given[:5]] + [given[5]]
    wanted, _ = plain_attention(*exact, 0.125)
    slope = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    wanted_grads = torch.autograd.grad(wanted, exact[:5], slope.double())

    def errors(function):
        out, _ = function(*given)
        return [relative(out.detach(), wanted.detach())] + [
            relative(got, want) for got, want in zip(torch.autograd.grad(out, given[:5], slope), wanted_grads)]

    ours = errors(lambda *x: torch.ops.espalier.shared_prefix_attention(*x, None, None, 0.125))
    theirs = errors(lambda *x: plain_attention(*x, 0.125))
    # The ladder: twice what the plain form in the same dtype has against float64.
    assert all(own <= 2 * plain for own, plain in zip(ours, theirs)), (ours, theirs)


def test_threads_are_torch_s():
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.ops.espalier.shared_prefix_attention(*operands("chain", 3, 2, 2, 64))
            assert native.library().omp_get_max_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_lse_has_no_gradient():
    given = operands("chain", 3, 2, 2, 64)
    _, lse = torch.ops.espalier.shared_prefix_attention(*given)
    assert not lse.requires_grad


@pytest.mark.parametrize("subtree_end", [[6, 6, 6, 6, 6, 7], [0] * 6, [6, 6, 2, 6, 6, 6]])
def test_a_wrong_tree_is_refused(subtree_end):
    given = operands("chain", 3, 2, 2, 64)
    with pytest.raises(Error, match="subtree_end"):
        torch.ops.espalier.shared_prefix_attention(*given[:5], torch.tensor(subtree_end, dtype=torch.int32))


def test_wrong_shapes_are_refused_by_name():
    q, k, v, path_k, path_v, ends = operands("chain", 3, 4, 2, 64)
    for arguments, name in [((q, k[:, :, :32], v, path_k, path_v, ends), "k"), ((q, k, v[:3], path_k, path_v, ends), "v"),
                            ((q, k, v, path_k[:, :1], path_v, ends), "path_k"), ((q, k, v, path_k, path_v, ends.long()), "subtree_end"),
                            ((q, k.float(), v, path_k, path_v, ends), "k"),
                            ((q, k, v, path_k, path_v, ends, torch.zeros(3, 2, 64, dtype=torch.float64)), "path_grad_k")]:
        with pytest.raises(Error, match=f"shared_prefix_attention: .*{name}"):
            torch.ops.espalier.shared_prefix_attention(*arguments)


def head_operands(rows=37, width=24, vocabulary=301, dtype=torch.float64):
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, width, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), generator=random)
    temperature = 0.5 + torch.rand(rows, generator=random, dtype=torch.float64)
    return hidden, weight, targets, temperature


def plain_logprob(hidden, weight, targets, temperature):
    logp = (hidden @ weight.t() / temperature[:, None].to(hidden.dtype)).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("block_rows", [256, 5])
def test_linear_logprob_is_the_plain_formula(monkeypatch, own, block_rows):
    monkeypatch.setattr(logprob_op, "BLOCK_ROWS", block_rows)
    if not own:
        monkeypatch.setattr(kernels, "serves", lambda tensor: False)
    hidden, weight, targets, temperature = head_operands()
    slopes = torch.randn(2, hidden.shape[0], generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = torch.ops.espalier.linear_logprob(hidden, weight, targets, temperature)
    wanted = plain_logprob(hidden, weight, targets, temperature)
    for got, want in zip(found, wanted):
        assert relative(got.detach(), want.detach()) <= FLOAT64_TOLERANCE
    for used in [(0,), (1,), (0, 1)]:
        loss, plain = (sum((x[i] * slopes[i]).sum() for i in used) for x in (found, wanted))
        for got, want in zip(torch.autograd.grad(loss, (hidden, weight), retain_graph=True),
                             torch.autograd.grad(plain, (hidden, weight), retain_graph=True)):
            assert relative(got, want) <= FLOAT64_TOLERANCE


def test_linear_logprob_never_holds_all_logits(monkeypatch):
    hidden, weight, targets, temperature = head_operands(rows=600, vocabulary=1000)
    monkeypatch.setattr(logprob_op, "BLOCK_BYTES", 1000 * 8 * 16)
    seen = []
    sums = kernels.head_row_sums
    monkeypatch.setattr(kernels, "head_row_sums", lambda logits, inverse: seen.append(logits.shape[0]) or sums(logits, inverse))
    torch.ops.espalier.linear_logprob(hidden, weight, targets, temperature)[0].sum().backward()
    assert max(seen) == 16 and sum(seen) == 2 * 600


@pytest.fixture
def by_columns(monkeypatch):
    """The code of other devices, in blocks of 8 rows by 50 columns."""
    monkeypatch.setattr(kernels, "serves", lambda tensor: False)
    monkeypatch.setattr(logprob_op, "LARGE_BLOCK_ROWS", 8)
    monkeypatch.setattr(logprob_op, "BLOCK_LOGITS", 400)
    return monkeypatch


def test_linear_logprob_by_columns_is_the_plain_formula(by_columns):
    hidden, weight, targets, temperature = head_operands()
    slopes = torch.randn(2, hidden.shape[0], generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = torch.ops.espalier.linear_logprob(hidden, weight, targets, temperature)
    wanted = plain_logprob(hidden, weight, targets, temperature)
    loss, plain = (sum((x * slope).sum() for x, slope in zip(of, slopes)) for of in (found, wanted))
    for got, want in zip((*found, *torch.autograd.grad(loss, (hidden, weight))), (*wanted, *torch.autograd.grad(plain, (hidden, weight)))):
        assert relative(got.detach(), want.detach()) <= FLOAT64_TOLERANCE


def test_a_maximum_that_does_not_move_the_sums_is_noticed(by_columns):
    """A later block of columns with a larger logit."""
    hidden, weight, targets, temperature = head_operands()
    with torch.no_grad():
        weight[250:] *= 20
    by_columns.setattr(logprob_op.torch, "addcmul", lambda here, *_: here)
    found = torch.ops.espalier.linear_logprob(hidden, weight, targets, temperature)
    assert relative(found[0].detach(), plain_logprob(hidden, weight, targets, temperature)[0].detach()) > 1e-3


@pytest.mark.parametrize("block_rows", [8, 64])
def test_bfloat16_products_are_within_the_bound_of_their_roundings(by_columns, block_rows):
    """Operands are bfloat16 values, which products take as they are; with u = 2^-8 (bfloat16) and e = 2^-23 (float32):

    a logit is a sum of M products in float32, M e sum |h w| off at most, and temperature and normalizer add a few e |z|: in all (M + 8) e Z with
    Z = max_rv sum_m |h_rm w_vm| / temperature_r, and a log-prob twice that. A gradient of a logit is rounded once to bfloat16 and has the logit's
    error in its exponent and in log p: |d slope| <= (u + 2 (M + 8) e Z (2 + |log p|)) |slope|-terms. Sums over it add (R or V) e, and its result is
    rounded once more: u."""
    by_columns.setattr(logprob_op, "LARGE_BLOCK_ROWS", block_rows)
    hidden, weight, targets, temperature = head_operands(rows=37, width=24, vocabulary=301, dtype=torch.bfloat16)
    slopes = torch.randn(2, hidden.shape[0], generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = torch.ops.espalier.linear_logprob(hidden, weight, targets, temperature)
    grads = torch.autograd.grad(sum((x * slope.float()).sum() for x, slope in zip(found, slopes)), (hidden, weight))
    h, w = (x.detach().double() for x in (hidden, weight))
    slopes = slopes.float().double()
    u, e = 2.0**-8, 2.0**-23
    size = ((h.abs() @ w.abs().t()) / temperature[:, None]).max()
    off = (h.shape[1] + 8) * e * size
    z = h @ w.t() / temperature[:, None]
    logp = z.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    assert (found[0].double() - logp.gather(1, targets[:, None])[:, 0]).abs().max() <= 2 * off + 301 * e
    assert (found[1].double() - entropy).abs().max() <= (2 * off + 301 * e) * (1 + logp.abs().max())
    p, a, b = logp.exp(), slopes[0][:, None], slopes[1][:, None]
    slope = (a * (torch.nn.functional.one_hot(targets, 301) - p) - b * p * (logp + entropy[:, None])) / temperature[:, None]
    terms = (a.abs() * (torch.nn.functional.one_hot(targets, 301) + p) + b.abs() * p * (logp.abs() + entropy[:, None])) / temperature[:, None]
    wrong = (u + 2 * off * (2 + logp.abs().max())) * terms
    for got, want, bound, count in ((grads[0], slope @ w, wrong @ w.abs(), 301), (grads[1], slope.t() @ h, wrong.t() @ h.abs(), 37)):
        assert got.dtype == torch.bfloat16
        assert ((got.double() - want).abs() <= bound * (1 + count * e) + u * (want.abs() + bound) + count * e * bound / u).all()


def test_linear_logprob_on_a_gpu_widens_no_head_and_waits_for_nothing():
    """The head of an 8B model and 16,384 rows, on tensors without memory: beside its operands and results at most three blocks of 2^26 logits
    in float32 and one in bfloat16, and a float32 gradient of the rows."""
    from hf_counts import Counted, as_on_a_gpu
    from espalier.hf.live_bytes import LiveBytes
    rows, width, vocabulary = 16384, 4096, 128256
    with as_on_a_gpu():
        draw = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        hidden, weight, targets = draw(rows, width), draw(vocabulary, width), torch.zeros(rows, dtype=torch.int64, device="meta")
        with LiveBytes("meta") as live, Counted() as counted:
            logprob, entropy = torch.ops.espalier.linear_logprob(hidden, weight, targets)
            (logprob.sum() + entropy.sum()).backward()
    assert counted.waits == []
    head, results = vocabulary * width * 2, rows * width * 2
    assert live.peak <= head + results + rows * width * 8 + 2**26 * (3 * 4 + 2) + 2**20 * 64
    assert live.peak < head * 2 + 2**30, "a float32 copy of the head or of its gradient"


def test_targets_outside_the_vocabulary_are_refused():
    hidden, weight, targets, temperature = head_operands()
    targets[3] = 301
    with pytest.raises(Error, match="from 0 to 300"):
        torch.ops.espalier.linear_logprob(hidden, weight, targets, temperature)


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def test_the_ops_pass_torchs_own_checks():
    torch.library.opcheck(torch.ops.espalier.shared_prefix_attention.default, tuple(operands("tree", 5, 4, 2, 64)), test_utils=CHECKS)
    torch.library.opcheck(torch.ops.espalier.linear_logprob_rows.default, head_operands(), test_utils=CHECKS)


@pytest.mark.parametrize("with_buffers", [False, True])
def test_a_model_with_the_ops_compiles_without_a_break(with_buffers):
    given = operands("tree", 5, 4, 2, 64)
    hidden_weight, targets = torch.randn(101, 4 * 64, dtype=torch.float64, requires_grad=True), torch.arange(12)

    def loss(q, k, v, path_k, path_v, ends, weight, *buffers):
        out, _ = torch.ops.espalier.shared_prefix_attention(q * 2, k, v, path_k, path_v, ends, *buffers)
        logprob, entropy = torch.ops.espalier.linear_logprob(out.flatten(1), weight, targets)
        return (logprob - 0.1 * entropy).sum()

    def run(function):
        buffers = [torch.zeros_like(x) for x in given[3:5]] if with_buffers else []
        leaves = given[:3] if with_buffers else given[:5]
        function(*given, hidden_weight, *buffers).backward()
        grads = [x.grad.clone() for x in (*leaves, hidden_weight)] + buffers
        for x in (*given[:5], hidden_weight):
            x.grad = None
        return grads

    torch._dynamo.reset()
    for got, want in zip(run(torch.compile(loss, fullgraph=True, backend="aot_eager")), run(loss)):
        assert torch.equal(got, want) and want.abs().sum() > 0


@pytest.mark.skipif(torch.__version__.startswith("2.6.") and not torch.cuda.is_available(), reason="torch 2.6 asks fake CUDA tensors for a driver")
def test_calls_on_other_devices_match_torchs_signatures():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        for kernels, dtype in ((by_flash, torch.bfloat16), (by_efficient, torch.float32)):
            q, k = (torch.empty(9, 4, 64, device="cuda", dtype=dtype) for _ in range(2))
            out, lse = kernels.attend(q, k, k, None, 0.125)
            assert out.shape == q.shape and lse.shape == (4, 9)
            if kernels is by_flash:  # torch's own shape function of the other backward does not take the operation's arguments
                assert [g.shape for g in kernels.attend_backward(out, q, k, k, out, lse, None, 0.125)] == [q.shape] * 3
