"""slime's dumps since August 2026, both kinds and evaluation in one folder, and the raw reward that belongs to a sample."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from dumps import make_samples, slime_sample, slime_train
from espalier import records
from espalier.records import RecordError, UnsupportedRecords

SAMPLES = make_samples()
RAW = [sample["reward"] for sample in SAMPLES]


def read(path):
    reading = records.Reading(path)
    return list(reading.records()), reading.notes


def train_sample(i, position, **more):
    """A sample of a train dump of format_version 2."""
    sample = SAMPLES[i]
    return {"data_parallel_rank": position % 2, "sample_index": i, "rollout_position": position, "tokens": torch.tensor(sample["prompt_ids"] + sample["response_ids"]),
            "response_lengths": len(sample["response_ids"]), "total_lengths": len(sample["prompt_ids"] + sample["response_ids"]), "rewards": 0.25,
            "loss_masks": torch.tensor(sample["loss_mask"], dtype=torch.int), "log_probs": torch.tensor(sample["old_logprobs"]),
            "ref_log_probs": torch.tensor(sample["ref_logprobs"]), "rollout_log_probs": torch.tensor(sample["rollout_logprobs"]),
            "values": torch.tensor(sample["values"]), "returns": torch.tensor(sample["returns"]), "advantages": torch.tensor(sample["advantage"]), **more}


def second_version(order=range(7), **more):
    return {"format_version": 2, "rollout_id": 4, "rank": 0, "samples": [train_sample(i, i) for i in order], "dp_shards": [{"rank": 0}], "raw_reward": RAW, **more}


def wanted(indices, *absent):
    return [{name: value for name, value in {**SAMPLES[i], "id": i, "step": 4}.items() if name not in absent} for i in indices]


def test_the_second_version_is_what_was_trained_on(tmp_path):
    torch.save(second_version([2, 0, 1, 3, 4, 5, 6]), tmp_path / "train_4.pt")
    found, notes = read(tmp_path / "train_4.pt")
    assert found == wanted([2, 0, 1, 3, 4, 5, 6], "group") and not notes


def test_a_folder_of_both_kinds_and_evaluation_is_joined_by_index(tmp_path):
    torch.save({"rollout_id": 4, "samples": [slime_sample(i, s) for i, s in enumerate(SAMPLES)]}, tmp_path / "rollout_4.pt")
    torch.save({"rollout_id": 4, "samples": [{**slime_sample(i, s), "reward": 100.0} for i, s in enumerate(SAMPLES)]}, tmp_path / "rollout_eval_4.pt")
    torch.save(second_version([3, 1, 0]), tmp_path / "train_4.pt")
    found, notes = read(tmp_path)
    assert found == [{**record, "meta": {"status": "completed"}} for record in wanted([3, 1, 0])]
    assert any("1 dumps of evaluation" in note for note in notes) and any("4 of 7 sampled responses" in note for note in notes)
    with pytest.raises(UnsupportedRecords, match="evaluation"):
        read(tmp_path / "rollout_eval_4.pt")


def dump_details(tmp_path):
    for name, file, content in (("rollout_data", "4.pt", {"rollout_id": 4, "samples": [slime_sample(i, s) for i, s in enumerate(SAMPLES)]}),
                                ("rollout_data", "eval_4.pt", {"rollout_id": 4, "samples": [slime_sample(0, SAMPLES[0])]}), ("train_data", "4_0.pt", second_version())):
        (tmp_path / name).mkdir(exist_ok=True)
        torch.save(content, tmp_path / name / file)


def test_the_folders_of_dump_details_are_one(tmp_path):
    dump_details(tmp_path)
    assert read(tmp_path)[0] == [{**record, "meta": {"status": "completed"}} for record in wanted(range(7))]


def test_the_program_reads_the_folders_of_dump_details(tmp_path, espalier):
    dump_details(tmp_path)
    espalier("convert", tmp_path, tmp_path / "out.jsonl")
    assert [json.loads(line)["reward"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == RAW


def old(order, **columns):
    content = slime_train(SAMPLES, order)
    content["rollout_data"].update(columns)
    return content


@pytest.mark.parametrize("columns, right", [
    (dict(raw_reward=RAW, local_raw_reward=[RAW[i] for i in (5, 0, 2)]), True),       # since slime #2234
    (dict(raw_reward=RAW, partition=[5, 0, 2]), True),                                # the samples' positions
    (dict(raw_reward=RAW), False),                                                    # of the whole batch: belongs to no sample for certain
    (dict(raw_reward=[RAW[i] for i in (0, 2, 5)]), False)])                           # as many as samples, in another order
def test_a_raw_reward_is_that_of_its_position(columns, right, tmp_path):
    torch.save(old([5, 0, 2], rewards=[.7, .7, .7], **columns), tmp_path / "4_0.pt")
    found, notes = read(tmp_path / "4_0.pt")
    assert [r["reward"] for r in found] == ([RAW[i] for i in (5, 0, 2)] if right else [.7] * 3)
    assert any("normalised" in note for note in notes) != right
    torch.save(old([5, 0, 2], **columns) | {"rewards": None}, tmp_path / "4_0.pt")
    assert any("raw_reward" in note for note in read(tmp_path / "4_0.pt")[1]) != right


def test_one_rank_in_the_order_of_the_rollout_has_its_raw_rewards(tmp_path):
    torch.save(old(range(7), raw_reward=RAW), tmp_path / "4_0.pt")
    assert [r["reward"] for r in read(tmp_path / "4_0.pt")[0]] == RAW


def one_mean():
    """Two rollouts, the first of two samples."""
    content = second_version([0, 1, 2])
    for sample, name, total in zip(content["samples"], (70, 70, 71), [sum(map(sum, (SAMPLES[0]["loss_mask"], SAMPLES[1]["loss_mask"])))] * 2 + [sum(SAMPLES[2]["loss_mask"])]):
        sample.update(rollout_ids=name, rollout_mask_sums=torch.tensor(float(total)))
    return content


def test_samples_of_one_rollout_have_one_mean(tmp_path):
    torch.save(one_mean(), tmp_path / "train_4.pt")
    found, _ = read(tmp_path / "train_4.pt")
    assert [(r.get("trajectory"), r.get("turn"), r["loss_unit"]) for r in found] == [(70, 0, "trajectory"), (70, 1, "trajectory"), (None, None, "trajectory")]


def test_a_rollout_whose_samples_are_not_all_there_is_refused(tmp_path):
    content = one_mean()
    del content["samples"][1]
    torch.save(content, tmp_path / "train_4.pt")
    with pytest.raises(RecordError, match="rollout_mask_sums: expected .* Samples of this rollout are missing"):
        read(tmp_path / "train_4.pt")


def test_samples_of_one_rollout_may_have_one_index(tmp_path):
    content = one_mean()
    for sample in content["samples"]:
        sample["sample_index"] = 9
    torch.save(content, tmp_path / "train_4.pt")
    assert [r["response_ids"] for r in read(tmp_path / "train_4.pt")[0]] == [SAMPLES[i]["response_ids"] for i in range(3)]


def test_fields_that_no_record_takes_are_named_once(tmp_path):
    samples = [{**slime_sample(i, s), "rollout_topk_token_ids": torch.ones(2, 2), "train_metadata": {"loss": "x"}, "multimodal_inputs": {}, "weight_versions": ["3"]}
               for i, s in enumerate(SAMPLES)]
    torch.save({"rollout_id": 4, "samples": samples, "args": {"a": 1}}, tmp_path / "4.pt")
    found, notes = read(tmp_path / "4.pt")
    assert found[0]["meta"] == {"status": "completed", "weight_versions": ["3"]}
    assert [note for note in notes if "no field of a record takes" in note] == [
        "fields that no field of a record takes: args, metadata, prompt, response, rollout_topk_token_ids, train_metadata"]


def test_a_teachers_log_probs_are_a_field_unless_advantages_hold_them(tmp_path):
    logprobs = [-.5 - i for i in range(len(SAMPLES[0]["response_ids"]))]
    sample = {**slime_sample(0, SAMPLES[0]), "teacher_log_probs": logprobs}
    torch.save({"rollout_id": 4, "samples": [sample]}, tmp_path / "4.pt")
    [record], notes = read(tmp_path / "4.pt")
    assert record["teacher_logprobs"] == logprobs
    assert any("--opd-kl-coef" in note for note in notes)
    torch.save(second_version([0], samples=[train_sample(0, 0, teacher_log_probs=torch.zeros(2))]), tmp_path / "train_4.pt")
    [record, *_], notes = read(tmp_path / "train_4.pt")
    assert "teacher_logprobs" not in record and "teacher_log_probs" in notes[0]
    torch.save({"rollout_id": 4, "samples": [{**sample, "opd_reverse_kl": logprobs}]}, tmp_path / "5.pt")
    with pytest.raises(UnsupportedRecords, match="opd_reverse_kl.*save-debug-train-data"):
        read(tmp_path / "5.pt")


def test_another_version_is_refused_by_its_number(tmp_path):
    torch.save(second_version(format_version=3), tmp_path / "train_4.pt")
    with pytest.raises(UnsupportedRecords, match="format_version: expected 2.*got 3"):
        read(tmp_path / "train_4.pt")


@pytest.fixture
def spilled(foreign, tmp_path):
    """A rollout dump whose recorded experts lie in a safetensors file beside it: (the dump, that file, the experts)."""
    def write(path=None):
        sample = slime_sample(0, SAMPLES[0])
        routes = torch.arange((len(sample["tokens"]) - 1) * 2 * 3, dtype=torch.int32).view(-1, 2, 3)
        file = tmp_path / "4_r3_spill/abc/0_x.safetensors"
        file.parent.mkdir(parents=True)
        save_file({"tensor": routes}, file)
        reference = foreign("slime.utils.tensor_store", "DiskTensorRef")()
        reference.__dict__.update(path=path or f"/elsewhere/4_r3_spill/abc/{file.name}", shape=tuple(routes.shape), dtype="int32")
        torch.save({"rollout_id": 4, "samples": [{**sample, "rollout_routed_experts": reference}]}, tmp_path / "4.pt")
        return tmp_path / "4.pt", file, routes.tolist()
    return write


def test_a_tensor_beside_the_dump_is_read(spilled):
    path, file, routes = spilled()
    assert read(path)[0][0]["routed_experts"] == routes
    file.unlink()
    with pytest.raises(RecordError, match="Copy the folder 4_r3_spill"):
        read(path)


@pytest.mark.parametrize("path", ["/etc/passwd", "/a/4_r3_spill/../passwd", "4_r3_spill/abc/..", "/a/5_r3_spill/abc/0_x.safetensors"])
def test_a_path_out_of_the_dumps_folder_is_not_followed(path, spilled):
    dump, _, _ = spilled(path)
    with pytest.raises(RecordError, match="Only files beside the dump are read"):
        read(dump)


def test_values_without_loss_may_be_anything_and_the_samplers_may_be_missing(tmp_path):
    i = next(i for i, s in enumerate(SAMPLES) if 0 in s["loss_mask"] and 1 in s["loss_mask"])
    sample = copy.deepcopy(train_sample(i, i))
    trained, masked = SAMPLES[i]["loss_mask"].index(1), SAMPLES[i]["loss_mask"].index(0)
    for name in ("log_probs", "ref_log_probs", "advantages", "rollout_log_probs", "values", "returns"):
        sample[name][masked] = float("-inf")
    sample["rollout_log_probs"][trained] = float("nan")
    torch.save(second_version(samples=[sample]), tmp_path / "train_4.pt")
    found = read(tmp_path / "train_4.pt")[0][0]
    assert found["old_logprobs"][masked] == found["advantage"][masked] == found["rollout_logprobs"][masked] == 0 and found["rollout_logprobs"][trained] is None
    sample["log_probs"][trained] = float("nan")
    torch.save(second_version(samples=[sample]), tmp_path / "train_4.pt")
    with pytest.raises(RecordError, match="log_probs.*has loss.*leave out its whole group"):
        read(tmp_path / "train_4.pt")


LONG = max(SAMPLES, key=lambda sample: len(sample["response_ids"]))


def with_sets(tmp_path, **sets):
    kept = {**slime_sample(0, LONG), **sets}
    torch.save({"rollout_id": 0, "samples": [kept]}, tmp_path / "rollout_0.pt")
    return [record.get("kept_ids") for record in read(tmp_path / "rollout_0.pt")[0]]


@pytest.mark.parametrize("kind", [list, torch.tensor], ids=["lists", "tensors"])
def test_kept_sets_may_be_a_list_for_each_token(kind, tmp_path):
    lists = [[token, token + 1] for token in LONG["response_ids"]]
    assert with_sets(tmp_path, rollout_top_p_token_ids=[kind(one) for one in lists]) == [lists]
    assert with_sets(tmp_path, rollout_top_p_token_ids=[None, *lists[1:]]) == [[None, *lists[1:]]]


@pytest.mark.parametrize("sets", [{"rollout_top_p_token_ids": [7, 8]}, {"rollout_top_p_token_offsets": [0, 1]}], ids=["ids", "offsets"])
def test_half_of_the_kept_sets_is_refused(sets, tmp_path):
    with pytest.raises(RecordError) as raised:
        with_sets(tmp_path, **sets)
    assert "rollout_top_p_token_ids" in raised.value.where and "offsets" in raised.value.got
