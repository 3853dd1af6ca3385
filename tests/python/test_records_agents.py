"""Step-wise dumps of SkyRL, verl-agent, rLLM on verl and slime become turns of trajectories."""

import io
import json
import pickle

import numpy as np
import pytest
import torch

from dumps import left_padded, right_padded
from espalier import records
from espalier.records import RecordError, UnsupportedRecords

MODULES = ("skyrl_train.training_batch", "skyrl.backends.skyrl_train.training_batch")
TURNS = [  # (trajectory, group, prompt, response, mask, reward)
    ("q_0", "q", [1, 2], [3], [1], 0.0),
    ("q_0", "q", [1, 2, 3, 9], [4, 5, 6], [1, 0, 1], 1.0),
    ("q_1", "q", [1, 2], [7, 8], [1, 1], 0.5),
]


def wanted(turn, at, reward):
    trajectory, group, prompt, response, mask, _ = turn
    return {"prompt_ids": prompt, "response_ids": response, "loss_mask": mask, "group": group, "trajectory": trajectory, "turn": at,
            "step": 4, "old_logprobs": [-0.5] * len(response), **reward}


def aligned(rows, width, left):
    return [[0] * (width - len(r)) + list(r) if left else list(r) + [0] * (width - len(r)) for r in rows]


def skyrl_tensors(turns, left):
    """`left`: prompt and response padded together at the left, as of today; else the older padding on both sides."""
    prompts, responses = [t[2] for t in turns], [t[3] for t in turns]
    width = max(map(len, responses))
    if left:
        sequences = left_padded([p + r for p, r in zip(prompts, responses)])
        attention = left_padded([[1] * len(p + r) for p, r in zip(prompts, responses)], 0)
    else:
        sequences = torch.cat([left_padded(prompts), right_padded(responses)], 1)
        attention = torch.cat([left_padded([[1] * len(p) for p in prompts], 0), right_padded([[1] * len(r) for r in responses], 0)], 1)

    def column(rows):
        return torch.tensor(aligned(rows, width, left), dtype=torch.float32)

    last = [i + 1 == len(turns) or turns[i + 1][0] != t[0] for i, t in enumerate(turns)]
    return {"sequences": sequences, "attention_mask": attention, "response_mask": column([[1] * len(r) for r in responses]).long(),
            "loss_mask": column([t[4] for t in turns]), "rewards": column([[0.0] * (len(t[3]) - 1) + [t[5]] for t in turns]),
            "action_log_probs": column([[-0.5] * len(r) for r in responses]), "values": None, "is_last_step": torch.tensor(last)}


@pytest.fixture
def skyrl_dump(foreign):
    """skyrl_dump(path, tensors, metadata): pickled as a dict's subclass with SkyRL's __getstate__, so items and state both hold the tensors."""

    def state(batch):
        return {"batch_dict": {name: saved(value) for name, value in batch.items()}, "batch_size": len(TURNS), "device": torch.device("cpu"),
                "metadata": batch.metadata}

    def write(path, tensors, metadata, module=MODULES[0]):
        identity = foreign("skyrl_train.generators.base", "TrajectoryID", __init__=lambda self, name: vars(self).update(
            instance_id=name.split("_")[0], repetition_id=int(name.split("_")[1])))
        batch = foreign(module, "TrainingInputBatch", (dict,), __getstate__=state)(tensors)
        batch.metadata = {**metadata, "trajectory_ids": [identity(n[1:]) if n[0] == "!" else n for n in metadata["trajectory_ids"]]}
        path.write_bytes(pickle.dumps(batch))

    return write


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def metadata_of(turns, mark=""):
    return {"uids": [t[1] for t in turns], "trajectory_ids": [mark + t[0] for t in turns], "response_length": 3}


@pytest.mark.parametrize("left, module, mark", [(False, MODULES[0], "!"), (True, MODULES[1], "")])
def test_skyrl_steps_are_turns_and_the_last_ones_reward_is_the_trajectorys(skyrl_dump, left, module, mark, tmp_path):
    path = tmp_path / "global_step_4_training_input.pkl"
    skyrl_dump(path, skyrl_tensors(TURNS, left), metadata_of(TURNS, mark), module)
    assert list(records.read(path)) == [wanted(*parts) for parts in zip(TURNS, (0, 1, 0), ({}, {"reward": 1.0}, {"reward": 0.5}))]


def test_skyrl_filling_rows_and_rewards_of_earlier_turns_are_left_out_with_a_note(skyrl_dump, tmp_path):
    turns = [(*TURNS[0][:5], 0.25), *TURNS[1:], ("pad0_0", "pad0", [1], [2], [0], 0.0)]
    path = tmp_path / "batch.pkl"
    skyrl_dump(path, skyrl_tensors(turns, True), metadata_of(turns))
    reading = records.Reading(path)
    assert [r.get("reward") for r in reading.records()] == [None, 1.0, 0.5]
    assert any("1 rows that SkyRL added" in note for note in reading.notes)
    assert any("rewards of 1 turns" in note for note in reading.notes)


def test_skyrl_without_steps_has_no_trajectories(skyrl_dump, tmp_path):
    tensors = skyrl_tensors(TURNS, True)
    del tensors["is_last_step"]
    path = tmp_path / "batch.pkl"
    skyrl_dump(path, tensors, metadata_of(TURNS))
    got = list(records.read(path))
    assert [r["reward"] for r in got] == [0.0, 1.0, 0.5] and not any("trajectory" in r for r in got)


@pytest.mark.parametrize("change, message", [
    (lambda t, m: m["trajectory_ids"].__setitem__(1, "q_1"), "up to its last step"),
    (lambda t, m: m["trajectory_ids"].__setitem__(2, "q_0"), "consecutive steps"),
    (lambda t, m: t["is_last_step"].__setitem__(2, False), "is_last_step"),
    (lambda t, m: m["uids"].pop(), "3 entries"),
    (lambda t, m: t["response_mask"].__setitem__((0, 0), 1), "ones without gaps"),
    (lambda t, m: t["attention_mask"].__setitem__((0, -1), 0), "ends where attention_mask ends"),
    (lambda t, m: t.pop("response_mask"), "response_mask"),
])
def test_a_skyrl_batch_that_contradicts_itself_is_refused(skyrl_dump, change, message, tmp_path):
    tensors, metadata = skyrl_tensors(TURNS, True), metadata_of(TURNS)
    change(tensors, metadata)
    skyrl_dump(tmp_path / "batch.pkl", tensors, metadata)
    with pytest.raises(RecordError, match=message):
        list(records.read(tmp_path / "batch.pkl"))


def test_skyrl_images_are_refused_by_name(skyrl_dump, tmp_path):
    skyrl_dump(tmp_path / "batch.pkl", {**skyrl_tensors(TURNS, True), "pixel_values": torch.zeros(3, 1)}, metadata_of(TURNS))
    with pytest.raises(UnsupportedRecords, match="pixel_values"):
        list(records.read(tmp_path / "batch.pkl"))


def verl_dump(path, foreign, objects):
    """verl-agent's reward manager gives the reward to the last token of the response."""
    prompts, responses = [t[2] for t in TURNS], [t[3] for t in TURNS]
    attention = torch.cat([left_padded([[1] * len(p) for p in prompts], 0), right_padded([[1] * len(r) for r in responses], 0)], 1)
    batch = {"prompts": left_padded(prompts), "responses": right_padded(responses), "attention_mask": attention,
             "response_mask": right_padded([t[4] for t in TURNS], 0), "token_level_scores": right_padded([[*[0] * (len(t[3]) - 1), t[5]] for t in TURNS], 0)}
    kind = foreign("verl.protocol", "DataProto", __getstate__=lambda self: (saved(batch), objects, {}))
    path.write_bytes(pickle.dumps(kind()))


def array(values):
    return np.array(values, dtype=object)


def test_verl_agents_traj_uid_is_the_trajectory(foreign, tmp_path):
    verl_dump(tmp_path / "b.pkl", foreign, {"uid": array([t[1] for t in TURNS]), "traj_uid": array([t[0] for t in TURNS])})
    got = list(records.read(tmp_path / "b.pkl"))
    assert [(r["group"], r["trajectory"], r["reward"]) for r in got] == [(t[1], t[0], t[5]) for t in TURNS]
    assert not any("turn" in r or "meta" in r for r in got)


def test_rllm_on_verl_has_trajectories_by_episode_and_no_padding_rows(foreign, tmp_path):
    verl_dump(tmp_path / "b.pkl", foreign, {
        "episode_ids": array(["q:0:1", "q:0:1", "q:1:1"]), "trajectory_ids": array(["q_solver"] * 3),
        "step_ids": array(["q_solver_step0", "q_solver_step1", "q_solver_step0"]), "is_pad_step": array([False, False, True])})
    got = list(records.read(tmp_path / "b.pkl"))
    assert [(r["group"], r["trajectory"], r["turn"]) for r in got] == [("q_solver", "q:0:1:q_solver", 0), ("q_solver", "q:0:1:q_solver", 1)]


@pytest.mark.parametrize("train", [False, True])
def test_slime_samples_of_one_rollout_are_turns(train, tmp_path):
    ids = [5, 5, 6]
    if train:
        content = {"rollout_id": 2, "rank": 0, "rollout_data": {
            "tokens": [t[2] + t[3] for t in TURNS], "response_lengths": [len(t[3]) for t in TURNS], "loss_masks": [t[4] for t in TURNS],
            "raw_reward": [t[5] for t in TURNS], "rollout_ids": ids}}
    else:
        content = {"rollout_id": 2, "samples": [
            {"tokens": t[2] + t[3], "response_length": len(t[3]), "loss_mask": t[4], "reward": t[5], "group_index": 0, "rollout_id": i}
            for t, i in zip(TURNS, ids)]}
    torch.save(content, tmp_path / "d.pt")
    got = list(records.read(tmp_path / "d.pt"))
    assert [r.get("trajectory") for r in got] == [5, 5, None] and {r["step"] for r in got} == {2}


def test_the_program_reads_turns_of_a_step_wise_dump(skyrl_dump, espalier, tmp_path):
    skyrl_dump(tmp_path / "batch.pkl", skyrl_tensors(TURNS, True), metadata_of(TURNS))
    report = json.loads(espalier("inspect", tmp_path / "batch.pkl", "--json").stdout)
    assert (report["trajectories"], report["tokens"]["logical"], report["tokens"]["physical"]) == (2, 14, 9)
    assert [turn["physical"] for turn in report["by_turn"]] == [5, 4]
