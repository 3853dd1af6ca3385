"""SkyRL's dumps of 2026: tensors as dicts of bytes, lists and packed rows, padding, prompt boundaries, recorded experts and kept sets."""

import io
import pickle
import types

import pytest
import torch

from espalier import records
from espalier.records import RecordError, UnsupportedRecords

MODULE = "skyrl.backends.skyrl_train.training_batch"
T, F = torch.tensor, lambda rows: torch.tensor(rows, dtype=torch.float32)
# Two rows and one of padding, a copy of row 0 without loss; prompts of 3, responses of 3 and 2, all padded at the left.
BATCH = {"sequences": T([[1, 40, 9, 7, 11, 2], [0, 1, 40, 9, 33, 2], [1, 40, 9, 7, 11, 2]]), "attention_mask": T([[1] * 6, [0] + [1] * 5, [1] * 6]),
         "response_mask": T([[1, 1, 1], [0, 1, 1], [1, 1, 1]]), "loss_mask": F([[1, 0, 1], [0, 1, 1], [0, 0, 0]]),
         "rollout_logprobs": F([[-.5, 0, -.25], [0, -1, -.125], [-.5, 0, -.25]]), "action_log_probs": F([[-.5, -2, -.25], [0, -1, -.5], [-.5, -2, -.25]]),
         "base_action_log_probs": None, "values": None, "advantages": F([[.5] * 3, [0, -.5, -.5], [.5] * 3])}
METADATA = {"policy_mini_batch_boundaries": [(0, 2)], "policy_prompt_boundaries": [(0, 1), (1, 2)], "response_length": 3, "avg_response_length": 2.5, "pad_size": 1}
# Of six columns, one layer, two of four experts; the last token of each row was not run.
ROUTES = torch.tensor([[[[0, 1]], [[2, 3]], [[1, 2]], [[3, 0]], [[1, 3]], [[0, 1]]]] * 3, dtype=torch.uint8)
UNROUTED = T([[False] * 5 + [True], [True] + [False] * 4 + [True], [True] * 6])
WANTED = [[[[0, 1]], [[2, 3]], [[1, 2]], [[3, 0]], [[1, 3]], None], [[[2, 3]], [[1, 2]], [[3, 0]], [[1, 3]], None]]


def numpy(tensor):
    return {"format": "numpy", "data": tensor.numpy().tobytes(), "shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def legacy(tensor):
    return {name: value for name, value in numpy(tensor).items() if name != "format"}


def saved(tensor):
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return {"format": "torch", "data": stream.getvalue()}


def view(tensor):
    return {"format": "numpy_view", "data": tensor.numpy()}


def packed(rows, form=numpy):
    """A PackedTensor: rows end to end, and where each begins."""
    return {"format": "packed_tensor", "values": form(torch.cat(rows)), "cu_seqlens": numpy(torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0)], dtype=torch.int32))}


@pytest.fixture
def dump(foreign, tmp_path):
    """dump(batch, metadata, form): the path of a batch in SkyRL's pickle, by _rebuild_tensor_batch or as the object's state."""
    def write(batch=BATCH, metadata=METADATA, form=numpy, rebuilt=True, name="global_step_4_training_input.pkl"):
        kind = foreign(MODULE, "TrainingInputBatch", (dict,))
        rebuild = types.FunctionType((lambda cls, state: None).__code__, {}, "_rebuild_tensor_batch")
        rebuild.__module__, rebuild.__qualname__ = MODULE, "_rebuild_tensor_batch"
        import sys
        sys.modules[MODULE]._rebuild_tensor_batch = rebuild
        state = {"batch_dict": {key: form(value) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}, "batch_size": 3,
                 "device": torch.device("cpu"), "metadata": metadata}
        if rebuilt:
            kind.__reduce__ = lambda self: (rebuild, (kind, state))
        else:
            kind.__getstate__ = lambda self: state
        (tmp_path / name).write_bytes(pickle.dumps(kind()))
        return tmp_path / name
    return write


def read(path):
    reading = records.Reading(path)
    return list(reading.records()), reading.notes


@pytest.mark.parametrize("form", [numpy, legacy, saved, view])
@pytest.mark.parametrize("rebuilt", [True, False])
def test_every_form_of_a_tensor_is_read(form, rebuilt, dump):
    found, notes = read(dump(form=form, rebuilt=rebuilt))
    assert found == [
        {"prompt_ids": [1, 40, 9], "response_ids": [7, 11, 2], "loss_mask": [1, 0, 1], "step": 4, "group": "4:0", "old_logprobs": [-.5, -2, -.25],
         "rollout_logprobs": [-.5, 0, -.25], "advantage": [.5] * 3},
        {"prompt_ids": [1, 40, 9], "response_ids": [33, 2], "loss_mask": [1, 1], "step": 4, "group": "4:1", "old_logprobs": [-1, -.5],
         "rollout_logprobs": [-1, -.125], "advantage": [-.5, -.5]}]
    assert any("1 rows that SkyRL added" in note for note in notes)


@pytest.mark.parametrize("routes, more", [
    (ROUTES, {}),                                                                                     # padded like the sequences
    (packed([ROUTES[0], ROUTES[1, 1:], ROUTES[2]]), {})])                                             # packed to real tokens
def test_recorded_experts_are_those_of_real_tokens(routes, more, dump):
    found, _ = read(dump({**BATCH, "rollout_expert_indices": routes, "router_padding_mask": UNROUTED}))
    assert [r["routed_experts"] for r in found] == WANTED


def test_kept_sets_are_those_of_response_tokens(dump):
    support = packed([T([[7, 9, -1], [11, -1, -1], [-1, -1, -1]]), T([[33, 1, 5], [2, 0, -1]]), T([[7, 9, -1], [11, -1, -1], [-1, -1, -1]])])
    found, _ = read(dump({**BATCH, "rollout_sample_support": support}))
    assert [r["kept_ids"] for r in found] == [[[7, 9], [11], None], [[33, 1, 5], [2, 0]]]


def test_images_are_refused_and_empty_lists_of_them_are_not(dump):
    pictures = {"format": "tensor_list", "items": [numpy(torch.ones(1, 2)), numpy(torch.ones(0, 2)), numpy(torch.ones(0, 2))]}
    with pytest.raises(UnsupportedRecords, match="pixel_values"):
        read(dump({**BATCH, "pixel_values": pictures}))
    none = {"format": "tensor_list", "items": [numpy(torch.ones(0, 2))] * 3}
    assert len(read(dump({**BATCH, "pixel_values": none, "image_grid_thw": None}))[0]) == 2


def test_what_is_left_is_named_once(dump):
    found, notes = read(dump({**BATCH, "kl": F([[0.0] * 3] * 3), "entropy": F([[0.0] * 3] * 3)}, {**METADATA, "policy_mini_batch_boundaries": [(0, 1), (1, 2)], "x": 1}))
    assert [note for note in notes if "no field" in note] == ["fields that no field of a record takes: entropy, kl, x"]
    assert any("2 optimizer steps" in note for note in notes)


@pytest.mark.parametrize("change, message", [
    (dict(pad_size=2), "rows without loss"), (dict(pad_size=3), "below 3"), (dict(policy_prompt_boundaries=[(0, 1)]), "cover the first 2"),
    (dict(policy_prompt_boundaries=[(1, 2), (0, 1)]), "cover the first 2")])
def test_metadata_that_contradicts_the_batch_is_refused(change, message, dump):
    with pytest.raises(RecordError, match=message):
        read(dump(metadata={**METADATA, **change}))


def test_packed_sequences_and_unknown_forms_are_refused(dump):
    lengths = {"format": "tensor_list", "items": [numpy(T([3, 3])), numpy(T([5])), numpy(T([6]))]}
    with pytest.raises(UnsupportedRecords, match="sub_seq_lengths"):
        read(dump({**BATCH, "sub_seq_lengths": lengths}))
    with pytest.raises(UnsupportedRecords, match="values: expected a tensor in one of the forms.*format zip"):
        read(dump({**BATCH, "values": {"format": "zip"}}))


def test_steps_in_the_metadata_are_turns(dump):
    found, _ = read(dump(metadata={"pad_size": 1, "uids": ["q", "q", "pad0"], "is_last_step": [False, True, True], "trajectory_ids": ["a", "a", "b"]}))
    assert [(r["trajectory"], r["turn"], r["group"]) for r in found] == [("a", 0, "q"), ("a", 1, "q")]
