"""Windows by depth, chunked attention, sinks, soft-caps, values of another size than keys: the gradients of the unmodified model."""

import pytest
import torch

from hf_layers import CASES, LOSS, ROLLOUTS, WINDOWED, errors, make, model_and_dense
from hf_models import all_float64, gradients, worst

hf = pytest.importorskip("espalier.hf")
from espalier.rows import blocks, by_blocks  # noqa: E402
from espalier.rows.attention import RowAttention  # noqa: E402
from espalier.rows.trunk import RowSet  # noqa: E402
from espalier.rows.visibility import Rule  # noqa: E402


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", WINDOWED)
def test_gradients_are_those_of_the_unmodified_model(family, case):
    assert errors(family, case)[0] <= 1e-10


@pytest.mark.parametrize("family", ["Mistral", "gpt-oss", "Gemma 2", "DeepSeek-V3"])
def test_in_torch_s_own_kernels(family, monkeypatch):
    from espalier import kernels
    monkeypatch.setattr(kernels, "serves", lambda tensor: False)
    assert errors(family, "trees of depth 3")[0] <= 1e-10


@pytest.mark.parametrize("family", ["gpt-oss", "Gemma 2", "Mistral"])
def test_without_a_phase_the_model_is_as_it_was(family):
    """With espalier's attention chosen for good, generation and evaluation are the model's own."""
    model, ids = make(family).eval(), torch.arange(3, 43)[None]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        wanted = model(input_ids=ids, use_cache=False).logits
        model.set_attn_implementation("espalier")
        found = model(input_ids=ids, use_cache=False).logits
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())  # softmax runs in float32 in one of them


@pytest.mark.parametrize("family", ["gpt-oss", "Gemma 2"])
def test_the_dense_schedule_keeps_sinks_and_soft_caps(family):
    model, _, wanted = model_and_dense(family)
    with all_float64():
        hf.phased_step(model, ROLLOUTS, LOSS, schedule="dense")
    assert worst(gradients(model), wanted)[0] <= 1e-10


def test_what_a_row_sees():
    import numpy as np
    depths = np.arange(12)
    assert Rule(window=3).lowest(depths).tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert Rule(chunk=5).lowest(depths).tolist() == [0] * 5 + [5] * 5 + [10] * 2
    assert Rule(window=12).within(12) is None and Rule(window=11).within(12) is not None and Rule(chunk=12).within(12) is None


# Deliberate faults: each is far outside what the tests above allow.

def assert_seen(family, case="trees of depth 3"):
    assert errors(family, case)[0] > 1e-3


@pytest.mark.parametrize("family", ["Mistral", "gpt-oss", "Llama 4"])
def test_a_band_by_row_number_is_seen(family, monkeypatch):
    plain = RowSet.segments.func
    by_number = property(lambda rows: [(begin, length, parent, sum(t.rows for t in rows.trunks) + begin)
                                       for begin, length, parent, _ in plain(rows)])
    monkeypatch.setattr(RowSet, "segments", by_number)
    assert_seen(family, "packed")


@pytest.mark.parametrize("family", ["Mistral", "Gemma 3"])
def test_a_window_off_by_one_at_the_fork_is_seen(family, monkeypatch):
    seen = by_blocks._seen
    monkeypatch.setattr(by_blocks, "_seen", lambda rule, *rest: seen(rule and Rule(rule.window + 1), *rest))
    assert_seen(family)


def test_a_sink_in_every_block_is_seen(monkeypatch):
    sinks, forward, plain = [], RowAttention.forward, blocks.forward

    def remember(ctx, q, k, v, s_aux, *rest):
        sinks[:] = [s_aux]
        return forward(ctx, q, k, v, s_aux, *rest)

    def with_sink(q, *rest):
        out, lse = plain(q, *rest)
        both = torch.logaddexp(lse, sinks[0].detach().to(lse.dtype).reshape(1, -1, q.shape[1], 1).expand(
            q.shape[0] // 2, -1, -1, -1).reshape(q.shape[0], q.shape[1], 1))
        return out * (lse - both).exp()[..., None], both

    from espalier import kernels
    monkeypatch.setattr(kernels, "serves", lambda tensor: False)
    monkeypatch.setattr(RowAttention, "forward", staticmethod(remember))
    monkeypatch.setattr(blocks, "forward", with_sink)
    assert_seen("gpt-oss")


def test_a_sink_without_a_gradient_is_seen(monkeypatch):
    backward = RowAttention.backward

    def without(ctx, go):
        grads = list(backward(ctx, go))
        grads[3] = None if grads[3] is None else torch.zeros_like(grads[3])
        return tuple(grads)

    monkeypatch.setattr(RowAttention, "backward", staticmethod(without))
    assert errors("gpt-oss", "packed")[1].endswith("sinks")
    assert_seen("gpt-oss", "packed")


def test_a_soft_cap_without_its_derivative_is_seen(monkeypatch):
    plain = blocks._plain_backward

    def without(go, q, k, v, out, lse, scale, causal, limits):
        capped = blocks._scores
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "_scores", lambda q, k, scale, causal, l, *rest: capped(q, k, scale, causal, limits, *rest))
            return plain(go, q, k, v, out, lse, scale, causal, blocks.Limits(limits.first, 0.0))

    monkeypatch.setattr(blocks, "_plain_backward", without)
    assert_seen("Gemma 2", "packed")
