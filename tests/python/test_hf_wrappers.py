"""phased_step around wrapped models: LoRA, autocast, a frozen base, two processes under DDP and FSDP2 with unequal work."""

import pytest
import torch

from conftest import ROOT
from hf_combinations import AROUND, errors
from hf_models import FAMILIES, batch, dense_step, gradients, loss_of, make, run_ranks, shared_step, worst
from rank_processes import written_by_ranks

hf = pytest.importorskip("espalier.hf")
ROLLOUTS = batch()
LOSS = loss_of(ROLLOUTS)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("around", [name for name in AROUND if name not in ("as it is", "tied")])
def test_gradients_are_those_of_the_dense_step(family, around):
    if "LoRA" in around:
        pytest.importorskip("peft")
    found = errors(AROUND[around](family), {"trees": (ROLLOUTS, 30)})
    assert max(found.values()) <= 1e-10, found


def test_the_tables_of_the_docs_are_whole():
    """bench/phased_errors.py made them: every family with everything around the model, within what is allowed."""
    text = (ROOT / "docs/python.md").read_text().split("<!-- phased_errors -->\n")[1].split("<!-- end -->")[0]
    tables = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in part.strip().splitlines()] for part in text.split("\n\n")]
    assert tables[0][0][1:8] == [*AROUND, "compiled"] and [row[0] for row in tables[0][2:]] == list(FAMILIES)
    for head, _, *rows in tables:
        for row in rows:
            assert all(float(cell) <= (2 if column == "autocast" else 1e-10) for column, cell in zip(head[1:], row[1:], strict=True)), row


def test_what_an_adapter_trains():
    pytest.importorskip("peft")
    model = AROUND["LoRA"]("Qwen3")
    shared_step(model, ROLLOUTS, LOSS, wave_tokens=30)
    assert len(gradients(model)) == 2 * 3 * 3


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="transformers 5.23 itself does not compile under torch 2.6")
def test_a_compiled_model():
    """The graphs of TorchDynamo and AOTAutograd hold for every wave: two shapes are compiled, the second for all lengths."""
    import torch._dynamo
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    model = make("Qwen3", num_hidden_layers=2)
    shared_step(model, ROLLOUTS, LOSS, wave_tokens=30)
    wanted = gradients(model)
    compiled = torch.compile(model, backend="aot_eager")
    shared_step(compiled, ROLLOUTS, LOSS, wave_tokens=30)
    assert worst(gradients(model), wanted)[0] <= 1e-12  # the same operations, some in another order
    graphs = counters["stats"]["unique_graphs"]
    result = shared_step(compiled, ROLLOUTS, LOSS, wave_tokens=40, verify=True)
    assert graphs > 0 and counters["stats"]["unique_graphs"] == graphs, "another wave is another graph"
    assert result.verification.verdict == "pass" and result.verification.worst["floor"] < 1e-5
    torch._dynamo.reset()


@pytest.mark.parametrize("trunk_state", ["keep", "recompute"])
def test_autocast_to_bfloat16(trunk_state):
    """Float32 weights, bfloat16 products. Against float32, shared may be twice as far as dense under the same autocast."""
    model = make("Qwen3", torch.float32)
    dense_step(model, ROLLOUTS, LOSS)
    exact = gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        dense_step(model, ROLLOUTS, LOSS)
        dense = gradients(model)
        shared_step(model, ROLLOUTS, LOSS, wave_tokens=30, trunk_state=trunk_state)
        shared = gradients(model)
    distance = lambda other: (sum((other[n] - exact[n]).square().sum() for n in exact) / sum(g.square().sum() for g in exact.values())).sqrt()
    assert 0 < distance(shared) <= 2 * distance(dense)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("ranks"), ["Qwen3"])


@pytest.mark.parametrize("kind,cases", [("ddp", 5), ("fsdp2", 8), ("fsdp1", 10)])
def test_two_processes(kind, cases, two_processes):
    """Ranks with different numbers of prompts and waves leave the mean of both dense gradients; no_sync leaves the rank's own."""
    for rank in two_processes:
        errors = rank["Qwen3"][kind]
        assert len(errors) == cases and max(errors.values()) <= 1e-10, errors


def test_ranks_meet_over_the_mesh_of_the_model(tmp_path):
    """A process of the world that is outside the mesh, as a rank of a rollout engine is, calls nothing and is not waited for."""
    for rank in run_ranks(tmp_path, ["Qwen3"], "beside"):
        errors = rank["Qwen3"]["fsdp2"]
        assert len(errors) == 2 and max(errors.values()) <= 1e-10, errors


@pytest.fixture(scope="module")
def verified_by_two(tmp_path_factory):
    return written_by_ranks("hf_verify_ranks.py", tmp_path_factory.mktemp("verified"), 2, [], 300)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1"])
def test_a_difference_on_one_rank_is_raised_on_all(verified_by_two, kind):
    """verify=True. Sharded ranks compare together. Replicas compare at steps of their own; one that does not compare is told of a difference, too."""
    for rank, cases in enumerate(verified_by_two):
        found = cases[kind]
        passing = {name: found.pop(name) for name in ("first", "again", "longer", "before a fault", "nobody looks")}
        longer = "not compared" if (kind, rank) == ("ddp", 0) else "pass"
        assert passing == {"first": "pass", "again": "not compared", "longer": longer, "before a fault": "pass", "nobody looks": "not compared"}
        assert len(found) == 7
        for case, verdict in found.items():
            told = kind == "ddp" and not case.endswith(str(rank))
            assert verdict.startswith("verification, ") and (verdict == "verification, another rank") == told, (rank, case, verdict)
            assert kind == "ddp" or verdict == verified_by_two[0][kind][case], "sharded ranks judge different sums"
