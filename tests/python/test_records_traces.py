"""Traces of agents: verifiers and prime-rl, NeMo Gym, Harbor. Token ids are read; text alone is refused with what to pass instead."""

import base64
import gzip
import json

import numpy as np
import pytest

from espalier import records
from espalier.records import RecordError, UnsupportedRecords


def write(path, *rows):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def read(path):
    reading = records.Reading(path)
    return list(reading.records()), reading.notes


# ---- verifiers ------------------------------------------------------------------------------------------------------


def node(parent, ids, mask, **more):
    sampled = any(mask)
    return {"parent": parent, "message": {"role": "assistant" if sampled else "user", "content": "x"}, "sampled": sampled, "timestamp": 1.0, "token_ids": ids,
            "mask": [bool(m) for m in mask], "is_content": [], "logprobs": [-.5 * i for i in range(1, sum(mask) + 1)], **more}


def trace(nodes, **more):
    return {"id": "t0", "agent": {"name": "solver", "trainable": True}, "nodes": nodes, "ok": True, "rewards": {"right": {"score": 1.0, "weight": .5}, "style": {"score": .25, "weight": 2.0}},
            "calls": [{"node": 1, "sampling": {"temperature": .7}}, {"node": 3, "sampling": {"temperature": .7}}], **more}


def episode(*traces, **more):
    return {"id": "e0", "env": {"id": "gsm8k"}, "task": {"type": "T", "data": {}}, "group": {"id": "g"}, "traces": list(traces),
            "run": {"type": "train", "id": "r", "work": {"type": "train", "step": 7}}, **more}


CHAT = [node(None, [1, 2, 3], [0, 0, 0]), node(0, [4, 5, 6], [0, 1, 1], advantages=[.5, .5]), node(1, [7, 8], [0, 0]), node(2, [9, 10], [0, 1], advantages=[-1.0])]
RECORD = {"prompt_ids": [1, 2, 3, 4], "response_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [1, 1, 0, 0, 0, 1], "group": "g:solver", "step": 7, "trajectory": "t0",
          "reward": 1.0, "temperature": .7, "rollout_logprobs": [-.5, -1.0, 0.0, 0.0, 0.0, -.5], "advantage": [.5, .5, 0.0, 0.0, 0.0, -1.0]}


@pytest.mark.parametrize("name", ["traces.jsonl", "traces.jsonl.gz", "trace.json"])
def test_a_branch_is_a_record(name, tmp_path):
    found, notes = read(write(tmp_path / name, episode(trace(CHAT))))
    assert found == [RECORD] and any("four decimals" in note for note in notes)


def test_branches_of_a_trace_are_those_of_one_trajectory(tmp_path):
    nodes = [*CHAT, node(1, [11], [1])]                                     # the history was rewritten behind the first answer
    found, _ = read(write(tmp_path / "traces.jsonl", episode(trace(nodes))))
    assert found[0] == {**RECORD, "branch": 0}
    assert found[1]["response_ids"] == [5, 6, 11] and found[1]["branch"] == 1 and found[1]["advantage"] == [.5, .5, 0.0]


def test_evaluation_frozen_agents_failures_and_attempts_do_not_train(tmp_path):
    attempt = node(1, [12], [1], semantic_parents=[{"node": 1, "type": "compaction_attempt"}])
    rows = [episode(trace(CHAT), run={"type": "train", "id": "r", "work": {"type": "eval", "step": 7}}),
            episode(trace(CHAT, agent={"name": "judge", "trainable": False})),
            episode(trace([CHAT[0], node(0, [4], [1])], ok=False, rewards={"right": None})), episode(trace([*CHAT, attempt]))]
    found, notes = read(write(tmp_path / "traces.jsonl", *rows))
    assert found == [RECORD]
    for words in ("evaluation", "do not train", "failed without a reward", "attempts of compaction"):
        assert any(words in note for note in notes), words


def array(values, encode):
    values = np.asarray(values)
    return {"__nd__": True, "dtype": str(values.dtype), "shape": list(values.shape), "data": encode(values.tobytes())}


@pytest.mark.parametrize("encode", [lambda data: data.decode("utf-8"), lambda data: base64.b64encode(data).decode()])
def test_recorded_experts_and_sampling_masks_are_read_where_they_are(encode, tmp_path):
    routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    mask = {"ids": array(np.array([5, 9, 6], np.int32), encode), "counts": array(np.array([2, 1], np.int32), encode)}
    nodes = [node(None, [1, 2, 3], [0] * 3, routed_experts=array(routes, encode)), node(0, [4, 5, 6], [0, 1, 1], sampling_mask=mask)]
    found, = read(write(tmp_path / "traces.jsonl", episode(trace(nodes))))[0]
    assert found["routed_experts"] == [*routes.tolist(), None, None, None] and found["kept_ids"] == [[5, 9], [6]]


def test_weights_of_the_policy_loss_are_masks_and_factors(tmp_path):
    nodes = [CHAT[0], node(0, [4, 5, 6], [0, 1, 1], advantages=[.5, .5], loss_weights={"rl": [0.0, 0.0, 2.0], "ce": [0.0] * 3})]
    found, = read(write(tmp_path / "a.jsonl", episode(trace(nodes))))[0]
    assert found["loss_mask"] == [0, 1] and found["advantage"] == [0.0, 1.0]
    nodes[1]["loss_weights"] = {"ce": [0.0, 1.0, 1.0]}
    with pytest.raises(UnsupportedRecords, match="loss_weights.ce"):
        read(write(tmp_path / "b.jsonl", episode(trace(nodes))))
    nodes[1].update(loss_weights={"rl": [1.0, 1.0, 2.0]}, advantages=None)
    with pytest.raises(UnsupportedRecords, match="loss_weights.rl"):
        read(write(tmp_path / "c.jsonl", episode(trace(nodes))))


@pytest.mark.parametrize("change, error, message", [
    (lambda n: n[1].update(token_ids=[], mask=[], logprobs=[]) or n[3].update(token_ids=[], mask=[], logprobs=[]), UnsupportedRecords, "text only.*client for training"),
    (lambda n: n[1].update(mask=[True]), RecordError, "mask: expected 3 entries"),
    (lambda n: n[1].update(logprobs=[-.5]), RecordError, "logprobs: expected 2 entries"),
    (lambda n: n[3].update(parent=9), RecordError, "parents that are earlier"),
    (lambda n: n[0].update(message={"role": "user", "content": [{"type": "image_url"}]}), UnsupportedRecords, "images")])
def test_traces_that_cannot_be_trained_are_refused(change, error, message, tmp_path):
    nodes = json.loads(json.dumps(CHAT))
    change(nodes)
    with pytest.raises(error, match=message):
        read(write(tmp_path / "traces.jsonl", episode(trace(nodes))))


# ---- NeMo Gym -------------------------------------------------------------------------------------------------------


def gym_row(*items, **more):
    return {"responses_create_params": {"input": "x"}, "response": {"output": list(items)}, "reward": 1.0, "_ng_task_index": 3, "_ng_rollout_index": 1, **more}


def call(prompt, answer, **more):
    return {"type": "message", "prompt_token_ids": prompt, "generation_token_ids": answer, "generation_log_probs": [-.5] * len(answer), **more}


def test_gym_calls_are_turns(tmp_path):
    found, notes = read(write(tmp_path / "rollouts.jsonl", gym_row({"type": "reasoning"}, call([1, 2], [3]), {"type": "function_call_output"}, call([1, 2, 3, 4], [5, 6]), agent_ref="a")))
    common = {"group": 3, "trajectory": "3:1"}
    assert found == [{"prompt_ids": [1, 2], "response_ids": [3], "loss_mask": [1], "rollout_logprobs": [-.5], **common, "turn": 0},
                     {"prompt_ids": [1, 2, 3, 4], "response_ids": [5, 6], "loss_mask": [1, 1], "rollout_logprobs": [-.5, -.5], **common, "turn": 1, "reward": 1.0}]
    assert any("agent_ref, responses_create_params" in note for note in notes)


@pytest.mark.parametrize("tokens", [3, 2])
def test_gym_s_recorded_experts_are_lists_or_nemo_rl_s_text(tokens, tmp_path):
    routes = np.arange(tokens * 4, dtype=np.uint8).reshape(tokens, 2, 2)
    text = f"nrlre1:uint8:{tokens}x2x2:" + base64.b64encode(routes.tobytes()).decode()
    for form in (routes.tolist(), text):
        assert read(write(tmp_path / "a.jsonl", gym_row(call([1, 2], [3], routed_experts=form))))[0][0]["routed_experts"] == routes.tolist()
    with pytest.raises(UnsupportedRecords, match="routed_experts"):
        read(write(tmp_path / "a.jsonl", gym_row(call([1, 2], [3], routed_experts="other"))))
    with pytest.raises(RecordError, match="3 or 2 entries"):
        read(write(tmp_path / "a.jsonl", gym_row(call([1, 2], [3], routed_experts=routes.tolist()[:1]))))


def test_gym_rows_of_text_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(UnsupportedRecords, match="text only.*model server for training"):
        read(write(tmp_path / "a.jsonl", gym_row({"type": "message", "content": "x"})))


# ---- Harbor ---------------------------------------------------------------------------------------------------------


def trial(*details, **more):
    return {"task_name": "fix", "trial_name": "fix__1", "agent_result": {"rollout_details": list(details)}, "verifier_result": {"rewards": {"reward": 1.0, "style": .5}}, **more}


MAIN = {"prompt_token_ids": [[1, 2], [1, 2, 3, 4]], "completion_token_ids": [[3], [5, 6]], "logprobs": [[-.5], [-.25, -.125]]}


def test_harbor_turns_of_a_trial(tmp_path):
    path = write(tmp_path / "result.json", trial(MAIN))
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))    # over several lines
    found, _ = read(path)
    common = {"group": "fix", "trajectory": "fix__1"}
    assert found == [{"prompt_ids": [1, 2], "response_ids": [3], "loss_mask": [1], "rollout_logprobs": [-.5], **common, "turn": 0},
                     {"prompt_ids": [1, 2, 3, 4], "response_ids": [5, 6], "loss_mask": [1, 1], "rollout_logprobs": [-.25, -.125], **common, "turn": 1, "reward": 1.0}]


def test_harbor_s_further_chats_are_branches(tmp_path):
    side = {"prompt_token_ids": [[8]], "completion_token_ids": [[9]], "logprobs": [[-1.0]], "extra": {"routed_experts": [[[[0, 1]], [[2, 3]]]], "other": [1]}}
    found, notes = read(write(tmp_path / "result.json", trial(MAIN, side)))
    assert [(r["branch"], r["turn"], r.get("reward")) for r in found] == [(0, 0, None), (0, 1, 1.0), (1, 0, None)]
    assert found[2]["routed_experts"] == [[[0, 1]], [[2, 3]]] and any("takes: other" in note for note in notes)


def step(prompt, answer, **more):
    return {"source": "agent", "message": "x", "metrics": {"prompt_token_ids": prompt, "completion_token_ids": answer, "logprobs": [-.5] * len(answer)}, **more}


def test_atif_steps_are_turns_but_copied_ones_are_not(tmp_path):
    steps = [{"source": "user", "message": "x"}, step([1], [2], is_copied_context=True), step([1, 2], [3]), {"source": "agent", "message": "x", "llm_call_count": 0}, step([1, 2, 3], [4])]
    found, notes = read(write(tmp_path / "trajectory.json", {"schema_version": "ATIF-v1.6", "session_id": "s", "steps": steps}))
    assert [(r["trajectory"], r["turn"], r["response_ids"]) for r in found] == [("s", 0, [3]), ("s", 1, [4])] and any("is_copied_context" in note for note in notes)
    steps[2]["llm_call_count"] = 2
    with pytest.raises(UnsupportedRecords, match="one call of the model"):
        read(write(tmp_path / "trajectory.json", {"schema_version": "ATIF-v1.6", "session_id": "s", "steps": steps}))


@pytest.mark.parametrize("row", [trial(), trial({"extra": {}}), {"schema_version": "ATIF-v1.6", "steps": [{"source": "agent", "message": "x"}]}])
def test_harbor_s_text_is_refused_with_what_to_do(row, tmp_path):
    with pytest.raises(UnsupportedRecords, match="collect_rollout_details"):
        read(write(tmp_path / "result.json", row))


# ---- other JSON -----------------------------------------------------------------------------------------------------


def test_other_json_is_named(tmp_path):
    for content, message in (([{"prompt_ids": [1]}], "jq"), ([{"prompt": "a", "completion": "b"}], "text only"), ([{"x": 1}], "Supported formats"), ([1], "Supported formats")):
        (tmp_path / "a.json").write_text(json.dumps(content))
        with pytest.raises(UnsupportedRecords, match=message):
            read(tmp_path / "a.json")


# ---- by the program -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, row, count", [("traces.jsonl", episode(trace(CHAT)), 1), ("traces.jsonl.gz", episode(trace(CHAT)), 1), ("rollouts.jsonl", gym_row(call([1, 2], [3])), 1),
                                              ("result.json", trial(MAIN), 2)])
def test_the_program_reads_traces_by_their_fields(name, row, count, espalier, tmp_path):
    path = write(tmp_path / name, row)
    if name.endswith(".json"):
        path.write_text(json.dumps(row, indent=2))
    outcome = espalier("convert", path, tmp_path / "out.jsonl")
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == count
    assert ("no field of a record takes: responses_create_params" in outcome.stderr) == (name == "rollouts.jsonl")
    refused = espalier("inspect", "-", expect=None, stdin=path.open("rb")) if not name.endswith(".json") else None
    assert refused is None or refused.status == 4 and "an agent's trace" in refused.stderr


def test_a_record_with_a_field_of_a_trace_is_a_record(espalier, tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "traces": [], "env": 1})
    assert 'unknown field "traces" is kept' in espalier("inspect", path).stderr


def test_other_json_is_refused_by_the_program_as_before(espalier, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"prompt_ids": [1], "response_ids": [2]}], indent=1))
    assert "jq -c" in espalier("inspect", tmp_path / "a.json", expect=4).stderr
    (tmp_path / "b.json").write_text(json.dumps({"prompt_ids": [1], "response_ids": [2], "reward": 1.0}) + "\n")
    espalier("inspect", tmp_path / "b.json")
