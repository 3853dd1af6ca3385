"""How often the host waits for the device: counted on tensors without memory, and in TRL's grouping by the reads of its tensors."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import hf_layers
from hf_counts import rollouts, step

pytest.importorskip("espalier.hf")
from espalier.hf import step as steps  # noqa: E402
from espalier.rows import transfer  # noqa: E402


@pytest.mark.parametrize("family,responses,wave_tokens", [("Llama", 8, 4096), ("Llama", 8, 64), ("Qwen3", 32, 500)])
def test_a_step_waits_once_whatever_the_number_of_waves(family, responses, wave_tokens):
    """For its loss, at its end."""
    found = step(rollouts(responses), family, wave_tokens=wave_tokens)
    assert found.waits == ["_to_copy"] and (found.waves > 1) == (wave_tokens < 4096)


@pytest.mark.parametrize("how", [dict(dtype=torch.float32), dict(family="Mistral", sliding_window=32), dict(family="Gemma")])
def test_other_kernels_wait_no_more(how):
    assert step(rollouts(8), wave_tokens=64, **how).waits == ["_to_copy"]


@pytest.mark.parametrize("family", ["LFM2", "Gemma 2", "Llama 4", "DeepSeek-V3"])
def test_states_soft_caps_and_chunks_wait_no_more(family):
    """Waits of a mixture are transformers' own: which rows an expert has; here, all."""
    with torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True):
        waits = step(rollouts(8), family, wave_tokens=64, make=hf_layers.make).waits
    assert waits[-1] == "_to_copy" and waits.count("_to_copy") == 1
    assert set(waits) <= {"_to_copy"} or family in ("Llama 4", "DeepSeek-V3")


@pytest.mark.parametrize("trunk_state", ["recompute", "offload"])
def test_other_states_of_a_trunk_wait_no_more(trunk_state):
    assert step(rollouts(8), trunk_state=trunk_state, wave_tokens=64).waits == ["_to_copy"]


def test_a_loss_that_is_read_in_every_wave_is_noticed(monkeypatch):
    monkeypatch.setattr(transfer.Total, "add", lambda total, loss: total.losses.append(torch.tensor(float(loss.detach()))))
    found = step(rollouts(8), wave_tokens=64)
    assert found.waits.count("_local_scalar_dense") == found.waves > 1


def test_index_arrays_that_are_not_queued_are_noticed(monkeypatch):
    monkeypatch.setattr(steps, "to_device", lambda device, *arrays: [torch.as_tensor(array, dtype=torch.long, device=device) for array in arrays])
    found = step(rollouts(8), wave_tokens=64)
    assert len(found.waits) > 5 * found.waves


class Reads(TorchFunctionMode):
    """Methods that bring values of a tensor to the host."""
    NAMES = {"cpu", "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__iter__", "nonzero"}

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in self.NAMES:
            self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


def padded():
    """Two groups, padded on both sides as TRL does."""
    ids, mask = torch.arange(4 * 9).reshape(4, 9) % 7 + 3, torch.ones(4, 9, dtype=torch.long)
    ids[1, :5] = ids[0, :5]
    mask[:2, :2], mask[1, 7:] = 0, 0
    return ids, mask


def test_trl_s_grouping_reads_a_batch_once():
    pytest.importorskip("trl")
    from espalier.trl.rollouts import _Rows
    with Reads() as reads:
        rows = _Rows(*padded(), 4)
        keys = [rows.key(row) for row in range(4)]
        assert [len(rows.prompt(row)) for row in range(4)] == [3, 3, 5, 5] and [len(rows.response(row)) for row in range(4)] == [4, 2, 4, 4]
    assert rows.can_share and keys[0] == keys[1] != keys[2] != keys[3]
    assert reads.seen == ["cpu"]


def test_trl_s_trees_read_a_batch_once():
    pytest.importorskip("trl")
    from espalier.trl.tree import Tree
    ids, mask = padded()
    with Reads() as reads:
        tree = Tree.of(ids, mask, ids.masked_fill(mask == 0, -100))
    assert tree.labelled.rows.numel() > 0
    assert reads.seen == ["cpu"] and tree.tokens == int(mask.sum()) and tree.rows < tree.tokens
