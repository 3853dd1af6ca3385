"""Dumps of other systems, written here by the real torch, NumPy and safetensors in the layouts of slime, verl, TRL and ART,
come back as the neutral records that were put in; damaged ones are refused with a place; and pickles that would execute
something are refused with the name of what they call, before it happens."""

import collections
import enum
import gzip
import io
import json
import os
import pickle
import random
import subprocess
import sys
import types
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conftest import ROOT
from dumps import SEED, make_samples, slime_sample, slime_train, trl_batch, verl_tensors
from espalier import records
from espalier.records import RecordError, UnsupportedRecords


def without(samples, *names):
    return [{name: value for name, value in sample.items() if name not in names} for sample in samples]


def read(path):
    return list(records.read(path))


# ---- classes of other packages, under their names -------------------------------------------------------------------


def forget(module):
    """What was foreign is gone before anything is read."""
    for name in [n for n in sys.modules if n == module or n.startswith(module + ".")]:
        del sys.modules[name]


# ---- slime ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
def test_slime_rollout_dump_is_what_was_sampled(legacy, tmp_path):
    samples = make_samples()
    path = tmp_path / "4.pt"
    torch.save({"rollout_id": 4, "samples": [slime_sample(i, s) for i, s in enumerate(samples)]}, path,
               _use_new_zipfile_serialization=not legacy)
    wanted = [{**s, "id": i, "step": 4, "meta": {"status": "completed"}} for i, s in enumerate(
        without(samples, "old_logprobs", "ref_logprobs", "values", "returns", "advantage"))]
    assert read(path) == wanted


@pytest.mark.parametrize("legacy", [False, True])
def test_slime_train_dump_is_what_was_trained_on(legacy, tmp_path):
    samples = make_samples()
    path = tmp_path / "4_0.pt"
    torch.save(slime_train(samples, range(7)), path, _use_new_zipfile_serialization=not legacy)
    assert read(path) == [{**s, "id": i, "step": 4} for i, s in enumerate(without(samples, "group"))]


def test_slime_dumps_of_a_folder_are_joined_by_sample_index(tmp_path):
    samples = make_samples()
    torch.save({"rollout_id": 4, "samples": [slime_sample(i, s) for i, s in enumerate(samples)]}, tmp_path / "rollout_4.pt")
    torch.save(slime_train(samples, [5, 0, 2]), tmp_path / "train_4_0.pt")
    torch.save(slime_train(samples, [1, 3, 5], rank=1), tmp_path / "train_4_1.pt")
    reading = records.Reading(tmp_path)
    found = list(reading.records())
    order = [5, 0, 2, 1, 3]
    assert found == [{**samples[i], "id": i, "step": 4, "meta": {"status": "completed"}} for i in order]
    assert any("2 of 7" in note for note in reading.notes)


def test_slime_routes_pass_through_as_layers_by_experts(tmp_path):
    sample = slime_sample(0, make_samples()[0])
    routes = np.arange((len(sample["tokens"]) - 1) * 2 * 3, dtype=np.int32).reshape(-1, 2, 3)
    torch.save({"rollout_id": 0, "samples": [{**sample, "rollout_routed_experts": routes}]}, tmp_path / "0.pt")
    assert read(tmp_path / "0.pt")[0]["routed_experts"] == routes.tolist()


def top_p_fields(sets, tensor=lambda values: torch.tensor(values, dtype=torch.int32)):
    offsets = [0]
    for one in sets:
        offsets.append(offsets[-1] + len(one or []))
    return {"rollout_top_p_token_ids": tensor([v for one in sets for v in one or []]), "rollout_top_p_token_offsets": tensor(offsets)}


@pytest.mark.parametrize("tensor", [list, lambda values: torch.tensor(values, dtype=torch.int32)])
def test_slime_top_p_sets_are_kept_ids(tensor, tmp_path):
    samples = make_samples()
    sets = [[[v, 90 + t] if t != 1 else None for t, v in enumerate(s["response_ids"])] for s in samples]
    torch.save({"rollout_id": 4, "samples": [{**slime_sample(i, s), **top_p_fields(one, tensor)} for i, (s, one) in enumerate(zip(samples, sets))]},
               tmp_path / "rollout_4.pt")
    assert [r.get("kept_ids") for r in read(tmp_path / "rollout_4.pt")] == [one or None for one in sets]
    dump = slime_train(samples, [5, 0, 2])
    columns = [top_p_fields(sets[i]) for i in (5, 0, 2)]
    dump["rollout_data"].update({name: [column[name] for column in columns] for name in columns[0]})
    torch.save(dump, tmp_path / "train_4_0.pt")
    assert [r["kept_ids"] for r in read(tmp_path / "train_4_0.pt")] == [sets[i] for i in (5, 0, 2)]


@pytest.mark.parametrize("offsets,expected", [
    ([0, 1], "entries, one more than response tokens"), ([0, 2, 1, 3], "ascending integers"), ([0, 1, 2, 4], "ascending integers"),
    ([0, 1, 2, 2], "a range from 0 to 3"), ([1, 1, 2, 3], "a range from 0 to 3")])
def test_slime_top_p_offsets_cut_all_ids_into_one_set_a_token(offsets, expected, tmp_path):
    sample = {**slime_sample(0, make_samples()[0]), "tokens": [1, 7, 8, 9], "response_length": 3, "loss_mask": [1, 1, 1],
              "rollout_log_probs": [0.0, 0.0, 0.0], "rollout_top_p_token_ids": [7, 8, 9], "rollout_top_p_token_offsets": offsets}
    torch.save({"rollout_id": 0, "samples": [sample]}, tmp_path / "0.pt")
    with pytest.raises(records.RecordError) as error:
        read(tmp_path / "0.pt")
    assert "sample 0: offsets of rollout_top_p_token_ids" in str(error.value) and expected in str(error.value)


def test_slime_objects_of_its_class_are_data(foreign, tmp_path):
    sample = make_samples()[0]
    status = enum.Enum("Status", {"COMPLETED": "completed"}, module="slime.utils.types", qualname="Sample.Status")
    kind = foreign("slime.utils.types", "Sample", Status=status)
    held = kind()
    held.__dict__.update(slime_sample(0, sample), status=status.COMPLETED)
    path = tmp_path / "0.pt"
    torch.save({"rollout_id": 0, "samples": [held]}, path, pickle_protocol=4)
    forget("slime")
    found, = read(path)
    assert found["response_ids"] == sample["response_ids"] and found["meta"] == {"status": "completed"}


def test_slime_samples_removed_from_training_have_no_loss(tmp_path):
    sample = {**slime_sample(0, make_samples()[0]), "remove_sample": True, "loss_mask": None}
    torch.save({"rollout_id": 0, "samples": [sample]}, tmp_path / "0.pt")
    assert set(read(tmp_path / "0.pt")[0]["loss_mask"]) == {0}


# ---- verl -----------------------------------------------------------------------------------------------------------


def verl_wanted(samples, step=12):
    wanted = [{**s, "step": step, "temperature": 0.5, "meta": {"data_source": "gsm8k"}} for s in samples]
    for sample in wanted:
        if not sample["response_ids"]:
            sample["reward"] = 0.0
    return wanted


def packed_as_torch(define, tensors):
    """io.BytesIO of torch.save(batch): the TensorDict pickles as _make_td(class, state)."""
    strings = define("tensordict.utils", "_StringOnlyDict", (dict,))
    make = types.FunctionType((lambda cls, state: None).__code__, {}, "_make_td")
    make.__module__, make.__qualname__ = "tensordict._reductions", "_make_td"
    define("tensordict._reductions", "_placeholder")
    sys.modules["tensordict._reductions"]._make_td = make
    state = {"_tensordict": strings(tensors), "_batch_size": torch.Size([7]), "_device": torch.device("cpu"), "_is_locked": False}
    kind = define("tensordict._td", "TensorDict", __reduce__=lambda self: (make, (type(self), state)))
    buffer = io.BytesIO()
    torch.save(kind(), buffer)
    return buffer.getvalue()


def packed_as_storage(define, tensors):
    """A consolidated TensorDict: one uint8 storage, and where each tensor lies in it."""
    def rebuild(metadata, storage):
        return None

    rebuild.__module__, rebuild.__qualname__, rebuild.__name__ = (
        "tensordict._reductions", "_rebuild_tensordict_files_consolidated", "_rebuild_tensordict_files_consolidated")
    define("tensordict._reductions", "_placeholder")
    setattr(sys.modules["tensordict._reductions"], rebuild.__name__, rebuild)
    leaves, parts, at = {}, [], 0
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(torch.uint8).flatten()
        pad = -len(data) % 8
        leaves[name] = (str(tensor.dtype), list(tensor.shape), at, at + len(data), pad)
        parts += [data, torch.zeros(pad, dtype=torch.uint8)]
        at += len(data) + pad
    metadata = {"leaves": leaves, "non_tensors": {}, "cls": "TensorDict", "cls_metadata": {"batch_size": [7]}}
    storage = torch.cat(parts)
    kind = define("tensordict._td", "TensorDict", __reduce__=lambda self: (rebuild, (metadata, storage)))
    buffer = io.BytesIO()
    torch.save(kind(), buffer)
    return buffer.getvalue()


def packed_as_arrays(_, tensors):
    return pickle.dumps({name: tensor.numpy() for name, tensor in tensors.items()})


def packed_as_bytes(_, tensors):
    """verl's VERL_DATAPROTO_SERIALIZATION_METHOD=numpy."""
    return (7,), None, {name: (str(t.dtype).removeprefix("torch."), t.shape, t.flatten().contiguous().view(torch.uint8).numpy())
                        for name, t in tensors.items()}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("pack", [packed_as_torch, packed_as_storage, packed_as_arrays, packed_as_bytes])
def test_verl_data_proto_is_what_was_put_in(pack, protocol, foreign, tmp_path):
    samples = make_samples()
    objects = {"uid": np.array([s["group"] for s in samples], dtype=object), "data_source": np.array(["gsm8k"] * 7),
               "raw_prompt": np.array([[{"role": "user", "content": "x"}]] * 7, dtype=object)}
    meta = {"temperature": 0.5, "global_steps": 12, "timing": collections.defaultdict(list), "global_token_num": [3, 4],
            "eos": np.int64(2)}
    state = (pack(foreign, verl_tensors(samples)), objects, meta)
    kind = foreign("verl.protocol", "DataProto", __getstate__=lambda self: state)
    path = tmp_path / "batch.pkl"
    with open(path, "wb") as file:
        pickle.dump(kind(), file, protocol)
    forget("verl"), forget("tensordict")
    assert read(path) == verl_wanted(samples)


def test_verl_rewards_of_tokens_keep_their_tokens(tmp_path):
    """A list where a token before the last one with loss has a reward; a number elsewhere."""
    samples = make_samples()
    tensors = verl_tensors(samples)
    tensors["token_level_rewards"] = tensors["token_level_scores"].clone()
    long = max(range(7), key=lambda i: len(samples[i]["response_ids"]))
    tensors["token_level_rewards"][long, 0] = 0.25
    torch.save(tensors, tmp_path / "batch.pt")
    for i, (found, sample) in enumerate(zip(read(tmp_path / "batch.pt"), samples)):
        length = len(sample["response_ids"])
        row = tensors["token_level_rewards"][i, :length].tolist()
        assert found["reward"] == (row if i == long else pytest.approx(sum(row)))


def test_a_dict_of_verl_tensors_is_read_with_the_step_of_its_name(tmp_path):
    samples = make_samples()
    torch.save(verl_tensors(samples), tmp_path / "batch_step_12.pt")
    assert read(tmp_path / "batch_step_12.pt") == [
        {k: v for k, v in s.items() if k not in ("group", "temperature", "meta")} for s in verl_wanted(samples)]


def test_dumps_of_a_folder_come_in_the_order_of_their_steps(tmp_path):
    samples = make_samples()
    for step in (10, 2, 1):
        torch.save(verl_tensors(samples), tmp_path / f"step{step}.pt")
    assert [r["step"] for r in read(tmp_path)] == [1] * 7 + [2] * 7 + [10] * 7


@pytest.mark.parametrize("name, spoil, field", [
    ("hole in the attention mask", lambda t: t["attention_mask"][0].copy_(torch.tensor([1] + [0] * (t["attention_mask"].shape[1] - 1))), "attention_mask"),
    ("loss on padding", lambda t: t["response_mask"][3].fill_(1), "sample 3: response_mask"),
    ("reward in padding", lambda t: t["token_level_scores"][3].fill_(1), "sample 3: token_level_scores"),
    ("NaN where there is loss", lambda t: t["old_log_probs"].fill_(float("nan")), "old_log_probs"),
    ("rows missing", lambda t: t.update(advantages=t["advantages"][:3]), "advantages"),
    ("columns missing", lambda t: t.update(values=t["values"][:, :1]), "sample 0: values"),
    ("mask of weights", lambda t: t.update(response_mask=t["response_mask"] * 0.5), "response_mask"),
])
def test_verl_batches_that_contradict_themselves_are_refused(name, spoil, field, tmp_path):
    tensors = verl_tensors(make_samples())
    spoil(tensors)
    torch.save(tensors, tmp_path / "a.pt")
    with pytest.raises(RecordError, match="a.pt") as caught:
        read(tmp_path / "a.pt")
    assert field in caught.value.where, caught.value


# ---- TRL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_trl_batch_is_what_was_put_in(ending, tmp_path):
    samples = make_samples(step=3)
    path = tmp_path / f"inputs_step_3{ending}"
    (torch.save if ending == ".pt" else save_file)(trl_batch(samples), path)
    items = sum(sum(s["loss_mask"]) for s in samples)
    assert read(path) == [{**r, "num_items_in_batch": items} for r in without(samples, "group", "values", "returns", "reward")]


def test_trl_num_items_in_batch_is_kept(tmp_path):
    """It counts the generation batch of all processes, of which a dump may be a slice."""
    samples = make_samples()
    torch.save({**trl_batch(samples), "num_items_in_batch": torch.tensor(91.0)}, tmp_path / "a.pt")
    assert [r["num_items_in_batch"] for r in read(tmp_path / "a.pt")] == [91] * len(samples)
    torch.save({**trl_batch(samples), "num_items_in_batch": torch.tensor(-1)}, tmp_path / "b.pt")
    with pytest.raises(RecordError, match="num_items_in_batch"):
        read(tmp_path / "b.pt")


def test_trl_advantages_may_be_one_number_a_sample(tmp_path):
    samples = make_samples()
    batch = {**trl_batch(samples), "advantages": torch.arange(7, dtype=torch.bfloat16), "old_per_token_logps": None}
    torch.save(batch, tmp_path / "a.pt")
    found = read(tmp_path / "a.pt")
    assert [r["advantage"] for r in found] == list(range(7)) and "old_logprobs" not in found[0]


def test_trl_prompts_padded_at_the_right_are_refused(tmp_path):
    batch = trl_batch(make_samples())
    batch["prompt_mask"] = batch["prompt_mask"].flip(1)
    torch.save(batch, tmp_path / "a.pt")
    with pytest.raises(RecordError, match="sample 0: prompt_mask"):
        read(tmp_path / "a.pt")


def test_views_transposes_and_half_precision_are_the_same_numbers(tmp_path):
    batch = trl_batch(make_samples())
    batch["advantages"] = torch.randn(9, 7, dtype=torch.float16)[2:].T[:, :1].expand(7, batch["completion_ids"].shape[1])
    batch["completion_ids"] = batch["completion_ids"].T.contiguous().T
    torch.save(batch, tmp_path / "a.pt")
    found, wanted = read(tmp_path / "a.pt"), batch["advantages"].double()
    for i, record in enumerate(found):
        count = len(record["response_ids"])
        assert record["response_ids"] == batch["completion_ids"][i, :count].tolist()
        assert record["advantage"] == wanted[i, :count].tolist()


# ---- ART ------------------------------------------------------------------------------------------------------------


def write_art(folder, rows):
    """rows: lists of (tokens, group, parent, first position, mask, logprobs, advantage, weight), padded to the longest."""
    width = max(sum(len(node[0]) for node in row) for row in rows) + 1
    kinds = {"tokens": (np.int64, -100), "group_ids": (np.int64, -1), "parent_ids": (np.int64, -1), "input_pos": (np.int64, 0),
             "assistant_mask": (np.bool_, False), "logprobs": (np.float32, np.nan), "advantages": (np.float32, 0), "weights": (np.float32, 0)}
    columns = {name: np.full((len(rows), width), pad, dtype) for name, (dtype, pad) in kinds.items()}
    for r, row in enumerate(rows):
        at = 0
        for tokens, group, parent, first, mask, logprobs, advantage, weight in row:
            n = len(tokens)
            values = (tokens, [group] * n, [parent] * n, range(first, first + n), mask, logprobs, [advantage] * n, [weight] * n)
            for name, value in zip(columns, values):
                columns[name][r, at : at + n] = list(value)
            at += n
    folder.mkdir(exist_ok=True)
    for name, values in columns.items():
        values.tofile(folder / f"{name}.pt")


NAN = float("nan")


def test_art_rows_unfold_into_one_record_a_branch(tmp_path):
    prompt, other = [5, 6, 7], [8, 9]
    rows = [
        # a prompt with two branches; the second branches again, after a tool's token
        [(prompt, -77, -77, 0, [0] * 3, [NAN] * 3, 0, 0), ([1, 2], 11, -77, 3, [1, 1], [-0.5, -1.0], 2.0, 0.5),
         ([3, 4], 12, -77, 3, [1, 0], [-2.0, NAN], 0, 1), ([20], 13, 12, 5, [1], [-0.25], -1.0, 1), ([21], 14, 12, 5, [1], [-0.75], 3.0, 1)],
        # ids begin again in another row; prompt and response are one node
        [(other + [1, 1], 11, 11, 0, [0, 0, 1, 1], [NAN, NAN, -0.125, -4.0], 1.0, 1)]]
    write_art(tmp_path / "packed", rows)
    found = read(tmp_path / "packed")
    wanted = [
        (prompt, [1, 2], [1, 1], [-0.5, -1.0], [1.0, 1.0]),
        (prompt, [3, 4, 20], [1, 0, 1], [-2.0, 0.0, -0.25], [0.0, 0.0, -1.0]),
        (prompt, [3, 4, 21], [1, 0, 1], [-2.0, 0.0, -0.75], [0.0, 0.0, 3.0]),
        (other, [1, 1], [1, 1], [-0.125, -4.0], [1.0, 1.0])]
    names = ("prompt_ids", "response_ids", "loss_mask", "old_logprobs", "advantage")
    assert [tuple(record[name] for name in names) for record in found] == wanted
    assert all(record["rollout_logprobs"] == record["old_logprobs"] for record in found)


def test_art_branches_at_a_wrong_position_are_refused(tmp_path):
    write_art(tmp_path / "a", [[([5, 6], 1, 1, 0, [0, 0], [NAN] * 2, 0, 0), ([7], 2, 1, 3, [1], [-1.0], 1, 1)]])
    with pytest.raises(RecordError, match="token 2: input_pos"):
        read(tmp_path / "a")
    (tmp_path / "a/weights.pt").write_bytes(b"1234")
    with pytest.raises(RecordError, match="weights.pt"):
        read(tmp_path / "a")


# ---- pickles that mean harm -----------------------------------------------------------------------------------------


class Calls:
    """Pickles as a call of `function` with `arguments`, and then a state."""

    def __init__(self, function, arguments, state=None):
        self.call = (function, arguments) + ((state,) if state is not None else ())

    def __reduce__(self):
        return self.call


def harmful(mark):
    command = f"touch {mark}"
    call = Calls(os.system, (command,))
    source = f"open({str(mark)!r}, 'w').close()"
    return {
        "posix.system": call,
        "builtins.eval": Calls(eval, (source,)),
        "builtins.exec": {"samples": [Calls(exec, (source,))]},
        "builtins.getattr": Calls(getattr, ("x", "upper")),
        "subprocess.Popen": [1, {"deep": (Calls(subprocess.Popen, (["touch", str(mark)],)),)}],
        "io.open": Calls(open, (str(mark), "w")),
        "importlib.import_module": Calls(__import__("importlib").import_module, ("antigravity",)),
        "torch.serialization.load": Calls(torch.load, (str(mark),)),
        "torch.hub.load": Calls(torch.hub.load, ("owner/repository", "model")),
        "functools.partial": Calls(__import__("functools").partial, (os.system, command)),
        "types.SimpleNamespace": types.SimpleNamespace(samples=[]),
        "numpy.load": Calls(np.load, (str(mark),)),
    }


def by_hand(module, name, mark, how):
    """The same call with other opcodes: GLOBAL, INST, OBJ, STACK_GLOBAL through the memo, NEWOBJ, BUILD."""
    text = f"touch {mark}".encode()
    unicode = b"X" + len(text).to_bytes(4, "little") + text
    found = b"c" + module + b"\n" + name + b"\n"
    return {
        "GLOBAL": found + unicode + b"\x85R.",
        "INST": b"(" + unicode + b"i" + module + b"\n" + name + b"\n.",
        "OBJ": b"(" + found + unicode + b"o.",
        "STACK_GLOBAL": b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x94\x8c" + bytes([len(name)]) + name
                        + b"\x940h\x00h\x01\x93" + unicode + b"\x85R.",
        "NEWOBJ": b"\x80\x02" + found + unicode + b"\x85\x81.",
        "BUILD": b"\x80\x02ctorch\nSize\n(tR}X\x0c\x00\x00\x00__setstate__" + found + b"sb.",
    }[how]


@pytest.mark.parametrize("name", list(harmful("")))
@pytest.mark.parametrize("wrap", ["pickle", "torch", "legacy", "inner"])
def test_a_pickle_that_calls_anything_is_refused_by_name_and_does_nothing(name, wrap, foreign, tmp_path):
    mark, path = tmp_path / "mark", tmp_path / "evil.pt"
    value = harmful(mark)[name]
    if wrap in ("torch", "legacy"):
        torch.save(value, path, _use_new_zipfile_serialization=wrap == "torch", pickle_protocol=4)
    elif wrap == "pickle":
        path.write_bytes(pickle.dumps(value, 4))
    else:
        kind = foreign("verl.protocol", "DataProto", __getstate__=lambda self: (pickle.dumps(value, 4), {}, {}))
        path.write_bytes(pickle.dumps(kind(), 4))
        forget("verl")
    with pytest.raises(RecordError) as caught:
        read(path)
    assert name in caught.value.got and str(path) in caught.value.where, caught.value
    assert not mark.exists()


@pytest.mark.parametrize("how", ["GLOBAL", "INST", "OBJ", "STACK_GLOBAL", "NEWOBJ", "BUILD"])
def test_every_opcode_that_names_a_global_goes_through_the_list(how, tmp_path):
    mark, path = tmp_path / "mark", tmp_path / "evil.pkl"
    data = by_hand(b"os", b"system", mark, how)
    path.write_bytes(data if data.startswith(b"\x80") else b"\x80\x02" + data)
    with pytest.raises(RecordError, match="os.system"):
        read(path)
    assert not mark.exists()


@pytest.mark.parametrize("data", [
    b"\x80\x02ctorch\nFloatStorage\n(tR}X\x05\x00\x00\x00dtypeX\x01\x00\x00\x00xsb.",     # state on an instance
    b"\x80\x02ctorch\nFloatStorage\n}X\x05\x00\x00\x00dtypeX\x01\x00\x00\x00xsb.",        # state on the class itself
    b"\x80\x02ctorch\nFloatStorage\nN}X\x05\x00\x00\x00dtypeX\x01\x00\x00\x00xs\x86b.",   # attributes of the class
    b"\x80\x02ccollections\nOrderedDict\nN}X\x06\x00\x00\x00updateX\x01\x00\x00\x00xs\x86b.",
    b"\x80\x02cnumpy\nndarray\nX\x01\x00\x00\x00xa.",                                     # append to a class
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02K\x03tR.",
    b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x05\x00\x00\x00rot13\x86R.",
    b"\x80\x02cverl.protocol\nDataProto\n)\x81K\x01b.",
    b"\x80\x02U\x01aQ.",                                                                  # a reference to something outside
    b"\x80\x02\x82\x01.",                                                                 # the extension registry
    b"\x80\x05\x97.",                                                                     # a buffer from outside
])
def test_pickles_made_to_mislead_are_refused_and_change_nothing(data, tmp_path):
    before = pickle.dumps({"a": collections.OrderedDict(x=1), "t": torch.ones(2).numpy()})
    (tmp_path / "a.pkl").write_bytes(data)
    with pytest.raises(RecordError):
        read(tmp_path / "a.pkl")
    samples = make_samples()
    torch.save(trl_batch(samples), tmp_path / "good.pt")  # the reader still reads
    assert len(read(tmp_path / "good.pt")) == 7 and pickle.loads(before)["a"] == {"x": 1}


def test_a_tensor_that_reaches_beyond_its_storage_is_refused(tmp_path):
    batch = trl_batch(make_samples())
    torch.save(batch, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data[:8] if name.endswith("data/0") else data)
    with pytest.raises(RecordError, match="b.pt"):
        read(tmp_path / "b.pt")


@pytest.mark.parametrize("ending", [".pt", ".pkl", ".safetensors", "legacy"])
def test_files_cut_anywhere_are_refused_with_their_name(ending, tmp_path):
    whole, path = tmp_path / f"whole{ending}", tmp_path / f"cut{'.pt' if ending == 'legacy' else ending}"
    batch = trl_batch(make_samples())
    if ending == ".safetensors":
        save_file(batch, whole)
    elif ending == ".pkl":
        whole.write_bytes(pickle.dumps({k: v.numpy() for k, v in batch.items()}))
    else:
        torch.save(batch, whole, _use_new_zipfile_serialization=ending == ".pt")
    data = whole.read_bytes()
    assert len(read(whole)) == 7
    for share in (0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(RecordError, match="cut"):
            read(path)


def test_random_damage_never_ends_in_anything_but_records_or_an_error(tmp_path):
    rng = random.Random(SEED)
    path = tmp_path / "a.pt"
    torch.save({"rollout_id": 4, "samples": [slime_sample(i, s) for i, s in enumerate(make_samples())]}, tmp_path / "whole.pt",
               _use_new_zipfile_serialization=False)
    data = (tmp_path / "whole.pt").read_bytes()
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            assert all(len(r["response_ids"]) == len(r["loss_mask"]) for r in read(path)), f"seed {SEED}"
        except RecordError:
            refused += 1
    assert refused > 30, f"seed {SEED}"


# ---- what is not read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [{"prompt": ["a"], "completion": ["b"]}, {"weights": torch.ones(2)}, [1, 2], 5])
def test_dumps_without_token_ids_are_not_supported(value, tmp_path):
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(UnsupportedRecords, match="a.pt"):
        read(tmp_path / "a.pt")


def test_convert_writes_the_records_or_nothing(tmp_path):
    samples = make_samples()
    torch.save(trl_batch(samples), tmp_path / "a.pt")
    assert records.convert(tmp_path / "a.pt", tmp_path / "out.jsonl.gz") == 7
    with pytest.raises(records.RecordError, match="overwrite"):
        records.convert(tmp_path / "a.pt", tmp_path / "out.jsonl.gz")
    assert records.convert(tmp_path / "a.pt", tmp_path / "out.jsonl.gz", overwrite=True) == 7
    with gzip.open(tmp_path / "out.jsonl.gz", "rt") as lines:
        assert [json.loads(line) for line in lines] == read(tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"nothing of that kind")
    with pytest.raises(UnsupportedRecords):
        records.convert(tmp_path / "b.pt", tmp_path / "out.jsonl")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "b.pt", "out.jsonl.gz"]


def run_module(path):
    return subprocess.run([sys.executable, "-S", "-m", "espalier.records", str(path)], capture_output=True, text=True,
                          env={"PYTHONPATH": str(ROOT / "python"), "PYTHONSAFEPATH": "1"})


def test_the_module_prints_records_and_needs_neither_torch_nor_numpy(tmp_path):
    torch.save(trl_batch(make_samples()), tmp_path / "a.pt")
    done = run_module(tmp_path / "a.pt")  # -S: without site-packages
    assert done.returncode == 0 and [json.loads(line) for line in done.stdout.splitlines()] == read(tmp_path / "a.pt")
    assert json.loads(done.stderr)["format"] == "TRL batch"


def test_the_module_ends_with_the_code_of_its_error(tmp_path):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Calls(os.system, ("false",))))
    torch.save({"prompt": ["a"]}, tmp_path / "b.pt")
    for path, code in ((tmp_path / "a.pkl", 3), (tmp_path / "b.pt", 4), (tmp_path / "absent.pt", 3)):
        done = run_module(path)
        said = json.loads(done.stderr)
        assert (done.returncode, done.stdout) == (code, "") and set(said) == {"where", "expected", "got", "remedy"}
        assert str(path) in said["where"]


# ---- Parquet --------------------------------------------------------------------------------------------------------


def parquet_file(path, rows):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow, which writes the file, is not in this Python")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


def test_parquet_with_neutral_columns_comes_back(tmp_path):
    rows = [{"prompt_ids": [1, 2], "response_ids": [3, 4 + i], "reward": 0.5 * i, "old_logprobs": [-1.0, -2.0] if i else None,
             "loss_mask": [1, 0], "meta": {"k": i}} for i in range(600)]
    found = read(parquet_file(tmp_path / "a.parquet", rows))
    assert found == [{name: value for name, value in row.items() if value is not None} for row in rows]


def test_parquet_with_columns_of_verl_comes_back_as_the_pickle_does(tmp_path):
    samples = make_samples()[:6]
    tensors = verl_tensors(samples)
    torch.save(tensors, tmp_path / "a.pt")
    rows = [{name: values[i].tolist() for name, values in tensors.items()} for i in range(len(samples))]
    assert read(parquet_file(tmp_path / "a.parquet", rows)) == read(tmp_path / "a.pt")
    plain = read(parquet_file(tmp_path / "b.parquet", [{"prompts": [1, 2], "responses": [3], "uid": "a", "step": 4}]))
    assert plain == [{"prompt_ids": [1, 2], "response_ids": [3], "loss_mask": [1], "group": "a", "step": 4}]


def test_parquet_columns_of_one_number_a_token_take_the_rule_for_numbers_that_are_not_finite(tmp_path):
    """Whatever their names are: a series that a later loss brings needs nothing here."""
    row = {"prompt_ids": [1], "response_ids": [3, 4], "loss_mask": [1, 0], "some_series": [-1.0, float("nan")], "rollout_logprobs": [float("nan"), 0.0]}
    assert read(parquet_file(tmp_path / "a.parquet", [row])) == [{**row, "some_series": [-1.0, 0.0], "rollout_logprobs": [None, 0.0]}]
    with pytest.raises(RecordError, match=r"some_series\[0\].*because the token has loss"):
        read(parquet_file(tmp_path / "b.parquet", [{**row, "some_series": [float("inf"), 0.0]}]))


@pytest.mark.parametrize("rows, error, said", [
    ([{"prompt": "text", "response": "text"}], UnsupportedRecords, "columns prompt, response"),
    ([{"prompts": "text", "responses": "text"}], RecordError, "sample 0: prompts"),
    ([{"prompt_ids": [1], "response_ids": [2], "reward": float("nan")}], RecordError, "sample 0: reward")])
def test_parquet_that_cannot_be_trained_on_is_refused(rows, error, said, tmp_path):
    with pytest.raises(error, match=said):
        read(parquet_file(tmp_path / "a.parquet", rows))


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = parquet_file(tmp_path / "a.parquet", [{"prompt_ids": [1], "response_ids": [2]}])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RecordError, match="complete Parquet"):
        read(path)


def test_pyarrow_is_named_where_it_is_missing(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedRecords, match="pip install pyarrow"):
        read(tmp_path / "a.parquet")
