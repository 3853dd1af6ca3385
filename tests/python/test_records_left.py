"""Every reader names the fields that it does not take in one note, and refuses images; verl's batches in the forms that it has today."""

import io
import json
import pickle
import types

import numpy as np
import pytest
import torch

from dumps import make_samples, trl_batch, verl_tensors
from espalier import records
from espalier.records import RecordError, UnsupportedRecords
from test_records import forget, write_art

SAMPLES = make_samples()
IMAGE = {"pixel_values": torch.ones(4, 6), "image_grid_thw": torch.tensor([[1, 2, 2]])}


def read(path):
    reading = records.Reading(path)
    return list(reading.records()), reading.notes


def left(notes):
    return [note.removeprefix("fields that no field of a record takes: ") for note in notes if "no field of a record takes" in note]


def objects(values):
    out = np.empty(len(values), dtype=object)
    for at, value in enumerate(values):
        out[at] = value
    return out


@pytest.fixture
def data_proto(foreign, tmp_path):
    def write(objects=(), meta=(), **tensors):
        buffer = io.BytesIO()
        torch.save({**verl_tensors(SAMPLES), **tensors}, buffer)
        state = buffer.getvalue(), dict(objects), {"global_steps": 3, **dict(meta)}
        kind = foreign("verl.protocol", "DataProto", __getstate__=lambda self: state)
        (tmp_path / "batch.pkl").write_bytes(pickle.dumps(kind()))
        forget("verl")
        return tmp_path / "batch.pkl"
    return write


# ---- images ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, value", [("multi_modal_inputs", IMAGE), ("multi_modal_data", {"image": [1]}), ("images", [b"png"]), ("video", "a.mp4")])
@pytest.mark.parametrize("first", [True, False])
def test_one_sample_with_images_refuses_a_verl_batch(name, value, first, data_proto):
    values = [value if first else {}] + [{}] * 5 + [value]
    with pytest.raises(UnsupportedRecords, match=name):
        read(data_proto({name: objects(values)}))


def test_pictures_of_pil_are_images_whatever_their_class(foreign, data_proto):
    picture = foreign("PIL.PngImagePlugin", "PngImageFile", __getstate__=lambda self: [{}, "RGB", (2, 2), None, b"0" * 12])()
    with pytest.raises(UnsupportedRecords, match="multi_modal_data"):
        read(data_proto({"multi_modal_data": objects([{"images": [picture]}] * 7)}))


@pytest.mark.parametrize("nothing", [None, {}, {"images": []}, {"images": None}])
def test_a_verl_batch_without_images_is_read_whatever_stands_in_their_place(nothing, data_proto):
    assert len(read(data_proto({"multi_modal_inputs": objects([nothing] * 7), "multi_modal_data": objects([nothing] * 7)}))[0]) == 7


def test_positions_of_images_refuse_a_batch_and_those_of_text_do_not(data_proto):
    width = verl_tensors(SAMPLES)["attention_mask"].shape[1]
    text = torch.arange(width).expand(7, 4, width).clone()
    assert len(read(data_proto(position_ids=text))[0]) == 7
    text[3, 2, 1] = 0
    with pytest.raises(UnsupportedRecords, match="position_ids"):
        read(data_proto(position_ids=text))


@pytest.mark.parametrize("batch", [trl_batch, verl_tensors])
def test_dicts_with_images_are_refused_and_marks_of_text_are_not(batch, tmp_path):
    for name in ("pixel_values", "mm_token_type_ids", "image_sizes"):
        torch.save({**batch(SAMPLES), name: torch.ones(7, 2)}, tmp_path / "a.pt")
        with pytest.raises(UnsupportedRecords, match=name):
            read(tmp_path / "a.pt")
    torch.save({**batch(SAMPLES), "pixel_values": None, "mm_token_type_ids": torch.zeros(7, 2)}, tmp_path / "a.pt")
    assert len(read(tmp_path / "a.pt")[0]) == 7


# ---- fields that are left -------------------------------------------------------------------------------------------


def test_verl_s_tensors_objects_and_metadata_are_named_in_one_note(data_proto):
    _, notes = read(data_proto({"raw_prompt": objects([[{"role": "user"}]] * 7), "tools_kwargs": objects([{}] * 7), "data_source": objects(["a"] * 7)},
                               {"timing": {"a": 1.0}, "metrics": {}}, entropys=torch.ones(7, 2)))
    assert left(notes) == ["entropys, raw_prompt, timing"]


def times(records, factors):
    """The advantages of the records with the factors of their response tokens."""
    return [[a * factor for a, factor in zip(r["advantage"], row)] for r, row in zip(records, factors)]


def trained(records, series):
    return [[value for value, counts in zip(row, r["loss_mask"]) if counts] for r, row in zip(records, series)]


@pytest.mark.parametrize("name, batch", [("rollout_is_weights", verl_tensors), ("importance_sampling_ratio", trl_batch)])
def test_weights_of_the_policy_loss_go_into_the_advantages(name, batch, tmp_path):
    whole = batch(SAMPLES)
    width = whole["responses" if "responses" in whole else "completion_ids"].shape[1]
    for weights in (torch.rand(7, width, dtype=torch.float64) + .5, torch.tensor([[.25]] * 7)):
        if name == "rollout_is_weights":
            weights = weights.expand(7, width).contiguous()
        torch.save(whole, tmp_path / "plain.pt")
        torch.save({**whole, name: weights}, tmp_path / "a.pt")
        (plain, _), (found, notes) = read(tmp_path / "plain.pt"), read(tmp_path / "a.pt")
        assert trained(found, [r["advantage"] for r in found]) == trained(plain, times(plain, weights.expand(7, width).tolist()))
        assert any(name in note and "--rollout-is" in note for note in notes)
    torch.save({**whole, name: torch.ones(7, width)}, tmp_path / "a.pt")
    found, notes = read(tmp_path / "a.pt")
    assert found == plain and not any(name in note for note in notes)
    del whole["advantages"]
    torch.save({**whole, name: torch.full((7, width), .5)}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedRecords, match=name):
        read(tmp_path / "a.pt")


def test_members_of_a_dict_of_verl_are_taken_or_named(tmp_path):
    torch.save({**verl_tensors(SAMPLES), "uid": list("aabbccd"), "temperature": .5, "data_source": ["x"] * 7, "note": [1, 2]}, tmp_path / "a.pt")
    found, notes = read(tmp_path / "a.pt")
    assert [r["group"] for r in found] == list("aabbccd") and {r["temperature"] for r in found} == {.5} and found[0]["meta"] == {"data_source": "x"}
    assert left(notes) == ["note"]


def test_a_batch_of_validation_is_not_trained_on(data_proto):
    with pytest.raises(UnsupportedRecords, match="validate"):
        read(data_proto(meta={"validate": True}))


def test_trl_s_fields_are_named(tmp_path):
    torch.save({**trl_batch(SAMPLES), "forward_seconds": torch.ones(7, 2), "num_images": None}, tmp_path / "a.pt")
    assert left(read(tmp_path / "a.pt")[1]) == ["forward_seconds"]


def test_art_s_files_are_named_and_images_refused(tmp_path):
    write_art(tmp_path / "packed", [[([5, 6, 7], 1, 1, 0, [0, 1, 1], [0.0, -1.0, -1.0], 1.0, 1)]])
    (tmp_path / "packed/original_logprobs.pt").write_bytes(b"")
    assert left(read(tmp_path / "packed")[1]) == ["original_logprobs"]
    (tmp_path / "packed/pixel_values.pt").write_bytes(b"")
    with pytest.raises(UnsupportedRecords, match="pixel_values"):
        read(tmp_path / "packed")


def test_rllm_s_fields_are_named_and_its_recorded_experts_refused(tmp_path):
    step = {"prompt_ids": [1, 2], "response_ids": [3], "logprobs": [-.5], "thought": "x", "model_output": {"finish_reason": "stop"}, "info": {}, "weight_version": 3}
    episode = {"id": "q:0", "is_correct": True, "trajectories": [{"name": "solver", "reward": 1.0, "steps": [step]}]}
    path = tmp_path / "e.json"
    path.write_text(json.dumps(episode))
    found, notes = read(path)
    assert left(notes) == ["is_correct, model_output, thought"] and found[0]["meta"] == {"weight_version": 3}
    for where in (step, step["model_output"]):
        where["routing_matrices"] = ["AAE="]
        path.write_text(json.dumps(episode))
        with pytest.raises(UnsupportedRecords, match="routing_matrices"):
            read(path)
        del where["routing_matrices"]


def table(path, row):
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    return path


NAN, INF = float("nan"), float("inf")
VERL_ROW = {"prompts": [1, 2], "responses": [3, 4, 5], "response_mask": [1, 0, 1]}
NEUTRAL_ROW = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "loss_mask": [1, 0, 1]}


def test_columns_of_parquet_are_taken_or_named_and_images_refused(tmp_path):
    row = {**VERL_ROW, "routed_experts": [[[1, 2]], [[0, 3]], [[1, 2]], [[0, 3]], [[0, 0]]], "reward_model": {"ground_truth": "4"}, "messages": ["a"], "data_source": "x"}
    found, notes = read(table(tmp_path / "a.parquet", row))
    assert left(notes) == ["messages, reward_model"] and found[0]["meta"] == {"data_source": "x"} and found[0]["routed_experts"] == row["routed_experts"]
    for row, name in ((VERL_ROW, "multi_modal_inputs"), (NEUTRAL_ROW, "images")):
        with pytest.raises(UnsupportedRecords, match=name):
            read(table(tmp_path / "b.parquet", {**row, name: {"image_grid_thw": [[1, 2, 2]]}}))


def test_values_of_parquet_follow_the_rule_of_json_lines(tmp_path):
    series = {"old_logprobs": [-1.0, NAN, -2.0], "ref_logprobs": [-1.0, -INF, -2.0], "rollout_logprobs": [NAN, INF, -2.0], "advantage": [1.0, NAN, 1.0]}
    found, _ = read(table(tmp_path / "a.parquet", {**NEUTRAL_ROW, **series}))
    assert [found[0][name] for name in series] == [[-1.0, 0.0, -2.0], [-1.0, 0.0, -2.0], [None, 0.0, -2.0], [1.0, 0.0, 1.0]]
    for name in ("old_logprobs", "advantage"):
        with pytest.raises(RecordError, match=rf"{name}\[0\].*has loss.*leave out its whole group"):
            read(table(tmp_path / "b.parquet", {**NEUTRAL_ROW, name: [NAN, 0.0, 1.0]}))
    with pytest.raises(RecordError, match="reward.*leave out its whole group"):
        read(table(tmp_path / "c.parquet", {**NEUTRAL_ROW, "reward": NAN}))


# ---- TensorDicts as verl's TransferQueue has them -------------------------------------------------------------------


def jagged(rows):
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


@pytest.fixture
def tensor_dict(foreign, tmp_path):
    """tensor_dict(members): the path of a TensorDict of the queue's form, saved by torch.save. `members`: tensors, lists of values, values of the batch."""
    def write(members):
        make = types.FunctionType((lambda cls, state: None).__code__, {}, "_make_td")
        make.__module__, make.__qualname__ = "tensordict._reductions", "_make_td"
        foreign("tensordict._reductions", "_placeholder")
        import sys
        sys.modules["tensordict._reductions"]._make_td = make
        data, stack = foreign("tensordict.tensorclass", "NonTensorData"), foreign("tensordict.tensorclass", "NonTensorStack")

        def held(value, kind=data):
            one = kind()
            one.__dict__.update({"tensordict": None, "non_tensordict": {"data": value}} if kind is data else {"stack_dim": 0, "tensordicts": [held(v) for v in value]})
            return one

        state = {"_tensordict": {name: value if isinstance(value, torch.Tensor) else held(value, stack if isinstance(value, list) else data)
                                 for name, value in members.items()}, "_batch_size": torch.Size([7])}
        kind = foreign("tensordict._td", "TensorDict", __reduce__=lambda self: (make, (type(self), state)))
        torch.save(kind(), tmp_path / "step_12.pt")
        forget("tensordict")
        return tmp_path / "step_12.pt"
    return write


def test_nested_tensors_need_no_attention_mask(tensor_dict):
    rows = [s for s in SAMPLES if s["response_ids"]]
    members = {"prompts": jagged([s["prompt_ids"] for s in rows]), "responses": jagged([s["response_ids"] for s in rows]),
               "response_mask": jagged([s["loss_mask"] for s in rows]), "old_log_probs": jagged([s["old_logprobs"] for s in rows]),
               "advantages": jagged([s["advantage"] for s in rows]), "uid": [s["group"] for s in rows], "temperature": .5, "raw_prompt": [[{"role": "user"}]] * len(rows)}
    found, notes = read(tensor_dict(members))
    names = ("prompt_ids", "response_ids", "loss_mask", "group", "old_logprobs", "advantage")
    assert found == [{**{name: s[name] for name in names}, "temperature": .5, "step": 12} for s in rows]
    assert left(notes) == ["raw_prompt"]


def test_values_of_a_tensor_dict_with_images_are_seen(tensor_dict):
    members = {name: tensor for name, tensor in verl_tensors(SAMPLES).items()}
    with pytest.raises(UnsupportedRecords, match="multi_modal_inputs"):
        read(tensor_dict({**members, "multi_modal_inputs": [{}] * 6 + [IMAGE]}))
    assert len(read(tensor_dict({**members, "multi_modal_inputs": [{}] * 7}))[0]) == 7
