"""Delta rule, short convolution, Mamba: every segment starts from its parent's state, and the gradients are those of the unmodified
model."""

import pytest
import torch

from hf_layers import CASES, LOSS, RECURRENT, ROLLOUTS, errors, make, model_and_dense
from hf_models import all_float64, checkpointed, dense_step, gradients, run_ranks, shared_step, worst

hf = pytest.importorskip("espalier.hf")
from espalier.errors import Unsupported  # noqa: E402
from espalier.hf import attention  # noqa: E402
from espalier.hf.mixers import install, mixers, packages  # noqa: E402
from espalier.hf.rollouts import Rollouts  # noqa: E402
from espalier.rows import convolution, scans, segments  # noqa: E402
from espalier.rows.trunk import RowSet, Trunk  # noqa: E402


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", RECURRENT)
def test_gradients_are_those_of_the_unmodified_model(family, case):
    assert errors(family, case)[0] <= 1e-10


def test_the_cases_hold_what_they_say():
    prepared, model, found = Rollouts(ROLLOUTS, 97), make("Qwen3-Next", torch.float32), {}
    for case, how in CASES.items():
        items = prepared.plan(model, gradients=True, **{"trunk_state": "keep", **how}).items
        depths = []  # of open trunks
        for item in items:
            depths.append(0 if item.parent < 0 else depths[item.parent] + 1)
        found[case] = dict(depth=max(depths), trunks=[item.rows for item in items if item.trunk],
                           segments=max(len(item.segments) for item in items),
                           responses=max(len(item.finished) for item in items if not item.trunk))
    assert found["packed"]["depth"] == 0 and found["packed"]["segments"] >= 10
    assert found["phased"] == found["phased, prompts recomputed"] and found["phased"]["depth"] >= 1 and found["phased"]["segments"] >= 3
    assert found["trees of depth 3"]["depth"] >= 3
    one = found["waves of one response"]
    assert one["responses"] == 1 and min(one["trunks"]) == 1 and sum(rows < 3 for rows in one["trunks"]) >= 4  # shorter than any tail


@pytest.mark.parametrize("family", ["Qwen3-Next", "LFM2", "Bamba"])
def test_checkpointed_layers(family):
    """A layer runs again inside the backward, with the phase of its first run."""
    model = checkpointed(make(family))
    with all_float64():
        shared_step(model, ROLLOUTS, LOSS, **CASES["trees of depth 3"])
    assert worst(gradients(model), model_and_dense(family)[2])[0] <= 1e-10


@pytest.mark.parametrize("family", ["Qwen3.5", "Falcon-H1", "Jamba"])
def test_log_probs_alone(family):
    model = make(family).eval()
    with all_float64(), torch.no_grad():
        found = hf.logprobs(model, ROLLOUTS, wave_tokens=20)
        for record, mine in zip(ROLLOUTS, found, strict=True):
            prompt, response = record["prompt_ids"], record["response_ids"]
            logits = model(input_ids=torch.tensor([prompt + response[:-1]]), use_cache=False).logits[0, len(prompt) - 1:]
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
            assert float((mine - wanted).abs().max()) <= 1e-10


@pytest.mark.parametrize("family", ["Qwen3-Next", "Falcon-H1"])
def test_float32_is_within_twice_dense_s_own_distance(family):
    wanted = model_and_dense(family)[2]
    model, runs = make(family, torch.float32), []
    for step in (lambda: dense_step(model, ROLLOUTS, LOSS), lambda: shared_step(model, ROLLOUTS, LOSS, **CASES["trees of depth 3"])):
        step()
        runs.append(gradients(model))
    distance = lambda run: sum((run[n].double() - wanted[n]).square().sum() for n in wanted).sqrt()
    assert distance(runs[1]) <= 2 * distance(runs[0])


def test_what_one_installation_checkpointed_the_next_runs_again():
    """As TRL's windows do, which have the layers replaced a micro-batch at a time."""
    model, ids = checkpointed(make("Qwen3.5")), torch.arange(3, 13)[None]
    trunk = Trunk(6)
    phases = [attention.Phase([RowSet(0, (), [(0, 6, 6)])], 6, captures=trunk),
              attention.Phase([RowSet(0, (trunk,), [(0, 4, 4)])], 10)]
    model.set_attn_implementation("espalier")
    with all_float64():
        for phase, at in zip(phases, (slice(0, 6), slice(6, 10))):
            undo = install(model)
            with phase.forward():
                logits = model(input_ids=ids[:, at], position_ids=torch.arange(10)[None, at], use_cache=False, espalier=phase).logits
            if phase is phases[1]:
                logits.square().sum().backward()
                pairs = trunk.gathered()
                torch.autograd.backward(pairs[0::2], pairs[1::2])
            undo()
        found, plain = gradients(model), make("Qwen3.5")
        plain(input_ids=ids, use_cache=False).logits[:, 6:].square().sum().backward()
    assert worst(found, gradients(plain))[0] <= 1e-10


def test_two_processes(tmp_path):
    """Under DDP, FSDP2 and FSDP1, which runs a prompt's forward twice; ranks have different numbers of prompts."""
    for rank in run_ranks(tmp_path, ["Qwen3.5"], "brief"):
        for kind, found in rank["Qwen3.5"].items():
            assert len(found) == 2 and max(found.values()) <= 1e-10, (kind, found)


def test_a_model_is_as_it_was_after_a_step():
    model = make("Qwen3-Next", torch.float32)
    before = {name: type(module).forward for name, module in model.named_modules()}
    shared_step(model, ROLLOUTS, LOSS, wave_tokens=14)
    assert len(mixers(model)) == 2
    for name, module in model.named_modules():
        assert "forward" not in vars(module) and type(module).forward is before[name]
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_states_are_held_in_float32_where_weights_are_narrow():
    """A trunk's state, and the sums of what came back for it."""
    held, gathered = [], Trunk.gathered

    def look(trunk):
        held.extend((key[1], trunk.states[key].dtype, sums.dtype) for key, sums in trunk.dstates.items())
        return gathered(trunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trunk, "gathered", look)
        shared_step(make("Qwen3-Next", torch.bfloat16), ROLLOUTS, LOSS, wave_tokens=14)
    assert {kind for kind, *_ in held} == {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"}
    for kind, state, sums in held:
        assert sums == torch.float32 and state == (torch.bfloat16 if kind == "causal_conv1d_fn" else torch.float32)


def test_segments_of_several_sets_of_rows():
    """As TRL's micro-batches have them: rows below different trunks, and below none, in one call."""
    rows = [RowSet(0, (Trunk(4),), [(0, 2, 5), (2, 3, 5)]), RowSet(5, (), [(5, 1, 6)])]
    found = segments.Segments(rows, "key")
    assert found.all == [(0, 2, -1), (2, 3, 0), (5, 1, -2)] and found.kept() == [True, False, False]
    columns = found.columns(3)  # inputs 0-2 and 3-5 were left above, 6 is the first row
    assert columns.gather.tolist() == [0, 1, 2, 6, 7, 2, 6, 7, 8, 9, 10, 3, 4, 5, 11]
    assert columns.own.tolist() == [3, 4, 8, 9, 10, 14]
    assert found.generations(64) == [[0, 2], [1]]


# Deliberate faults: each is far outside what the tests above allow.

EVERYWHERE = pytest.mark.parametrize("family", ["Qwen3-Next", "Nemotron-H"])
SCANS = ("torch_chunk_gated_delta_rule", "mamba2_chunk_scan")


def assert_seen(family, case="trees of depth 3"):
    """By the check of a family that is new to this process, or by the step's numbers."""
    try:
        error = errors(family, case)[0]
    except Unsupported as told:
        assert "differ by" in str(told)
    else:
        assert error > 1e-4


def without_gradient(monkeypatch, functions):
    add = Trunk.add_state_gradient
    monkeypatch.setattr(Trunk, "add_state_gradient", lambda trunk, key, go: add(trunk, key, go * 0 if key[1] in functions else go))


@EVERYWHERE
def test_a_state_without_its_gradient_is_seen(family, monkeypatch):
    without_gradient(monkeypatch, SCANS)
    assert_seen(family)


@EVERYWHERE
def test_a_tail_without_its_gradient_is_seen(family, monkeypatch):
    without_gradient(monkeypatch, ("causal_conv1d_fn",))
    assert_seen(family)


def changed_states(monkeypatch, functions, change):
    above = segments.Segments.above
    monkeypatch.setattr(segments.Segments, "above", lambda self: [
        change(state) if self.key[1] in functions and state is not None else state for state in above(self)])


@EVERYWHERE
def test_a_tail_left_out_is_seen(family, monkeypatch):
    changed_states(monkeypatch, ("causal_conv1d_fn",), torch.zeros_like)
    assert_seen(family)


@EVERYWHERE
def test_a_reversed_tail_is_seen(family, monkeypatch):
    changed_states(monkeypatch, ("causal_conv1d_fn",), lambda tail: tail.flip(-1))
    assert_seen(family)


@EVERYWHERE
def test_a_state_left_out_is_seen(family, monkeypatch):
    changed_states(monkeypatch, SCANS, torch.zeros_like)
    assert_seen(family)


@EVERYWHERE
@pytest.mark.parametrize("function", [convolution.over_segments, scans.over_segments])
def test_a_segment_that_follows_the_row_before_it_is_seen(family, function, monkeypatch):
    """One run over a packed wave: chunks and convolutions straddle segments."""
    make_segments = segments.Segments.__init__

    def one_run(self, sets, key, leave):
        make_segments(self, sets, key, leave)
        if (key[1] == "causal_conv1d_fn") == (function is convolution.over_segments):
            self.all = [(0, self.all[-1][0] + self.all[-1][1], -1)]

    monkeypatch.setattr(segments.Segments, "__init__", one_run)
    assert_seen(family, "packed")


def test_a_gpu_without_kernels_for_recurrent_layers_is_told_once(caplog):
    of_delta, of_convolution = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
    found = {"fla": None, "causal_conv1d": object()}.get
    assert packages.missing({of_delta, of_convolution}, found) == ("fla",) and packages.missing({of_convolution}, found) == ()
    packages._note.cache_clear()
    for device in ("cpu", "cuda", "cuda"):
        packages.note_missing(device, {of_delta, of_convolution})
    wanted = packages.missing({of_delta, of_convolution})
    assert len(caplog.records) == (1 if wanted else 0)
    assert all("espalier[linear]" in record.message for record in caplog.records)
    packages._note.cache_clear()


def test_a_model_tells_which_functions_its_layers_call(monkeypatch):
    told = []
    monkeypatch.setattr(packages, "note_missing", lambda device, functions: told.append((device, functions)))
    install(make("Qwen3-Next", torch.float32))()
    assert told == [("cpu", {"torch_chunk_gated_delta_rule", "causal_conv1d_fn"})]
