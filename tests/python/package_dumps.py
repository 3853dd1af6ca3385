"""Dumps that the installed trainers themselves write, of two rollouts below one prompt, and the records that they must become.

    python tests/python/package_dumps.py tests/golden/packages      writes those of the packages that can be imported here

test_package_dumps.py reads fresh ones where a package is installed, and the golden ones everywhere.
"""

import sys
from pathlib import Path

PROMPT, RESPONSES, MASKS = [1, 40, 9], [[7, 50, 11, 2], [33, 2]], [[1, 0, 1, 1], [1, 1]]
OLD, SAMPLED, ADVANTAGES = [[-1.0, -.5, -.25, -.125], [-2.0, -.75]], [[-1.125, -.5, -.5, -.25], [-1.5, -.5]], [.5, -.5]
KEPT = [[[7, 9], None, [11], [2, 3]], [[33], [2]]]
ROUTES = [[[[0, 1], [2, 3]], [[1, 2], [0, 3]], [[3, 0], [1, 2]], [[0, 2], [1, 3]], [[2, 1], [0, 1]], [[1, 0], [3, 2]], None],
          [[[0, 1], [2, 3]], [[1, 2], [0, 3]], [[3, 0], [1, 2]], [[1, 3], [0, 2]], None]]
BASE = [{"prompt_ids": PROMPT, "response_ids": response, "loss_mask": mask, "advantage": [advantage] * len(response)}
        for response, mask, advantage in zip(RESPONSES, MASKS, ADVANTAGES)]


def padded(rows, left=False, fill=0):
    width = max(map(len, rows))
    return [[fill] * (width - len(r)) * left + list(r) + [fill] * (width - len(r)) * (not left) for r in rows]


def verl_tensors():
    import torch
    ones = [[1] * len(r) for r in RESPONSES]
    return {"prompts": torch.tensor([PROMPT] * 2), "responses": torch.tensor(padded(RESPONSES)), "input_ids": torch.tensor([PROMPT + r for r in padded(RESPONSES)]),
            "attention_mask": torch.tensor([[1] * 3 + r for r in padded(ones)]), "position_ids": torch.arange(7).expand(2, 7).contiguous(),
            "response_mask": torch.tensor(padded(MASKS)), "old_log_probs": torch.tensor(padded(OLD)), "rollout_log_probs": torch.tensor(padded(SAMPLED)),
            "advantages": torch.tensor(padded([[a] * len(r) for a, r in zip(ADVANTAGES, RESPONSES)])),
            "token_level_scores": torch.tensor(padded([[0, 0, 0, 1.0], [0, 0.0]]))}


def verl(folder):
    """DataProto.save_to_disk in both serializations, and a TensorDict of nested tensors as the TransferQueue hands it out."""
    import os
    import numpy as np
    import torch
    from tensordict import NonTensorData, NonTensorStack, TensorDict
    from verl import DataProto
    objects = {"uid": np.array(["q", "q"], dtype=object), "multi_modal_inputs": np.array([{}, {}], dtype=object)}
    for method in ("torch", "numpy"):
        os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = method
        DataProto.from_dict(verl_tensors(), non_tensors=objects, meta_info={"temperature": .7, "global_steps": 5}).save_to_disk(folder / f"{method}.pkl")
    del os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"]
    nested = lambda rows: torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
    queue = TensorDict({"prompts": nested([PROMPT] * 2), "responses": nested(RESPONSES), "response_mask": nested(MASKS), "old_log_probs": nested(OLD),
                        "rollout_log_probs": nested(SAMPLED), "advantages": nested([r["advantage"] for r in BASE]),
                        "token_level_scores": nested([[0, 0, 0, 1.0], [0, 0.0]])}, batch_size=[2])
    queue["uid"], queue["temperature"], queue["global_steps"] = NonTensorStack("q", "q"), NonTensorData(.7, batch_size=[2]), NonTensorData(5, batch_size=[2])
    torch.save(queue, folder / "queue.pt")
    torch.save(queue.consolidate(), folder / "consolidated.pt")


def skyrl(folder):
    """TrainingInputBatch.save, with recorded experts and kept sets in packed rows, padded by the trainer's own function."""
    import numpy as np
    import torch
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors, make_router_padding_mask
    routes = [np.array([token for token in rows if token is not None], np.uint8) for rows in ROUTES]
    support = [np.array([((kept or []) + [-1] * 2)[:2] for kept in sets], np.int32) for sets in KEPT]
    sequences, attention, response_mask, rewards, loss_mask, logprobs, experts, kept = convert_prompts_responses_to_batch_tensors(
        0, [PROMPT] * 2, RESPONSES, [[0.0] * len(r) for r in RESPONSES], MASKS, SAMPLED, routes, support)
    right = lambda rows: torch.tensor(padded(rows, left=True))
    batch = TrainingInputBatch({
        "sequences": sequences, "attention_mask": attention, "response_mask": response_mask, "loss_mask": loss_mask, "rollout_logprobs": logprobs,
        "rollout_expert_indices": experts, "router_padding_mask": make_router_padding_mask(attention, [len(r) for r in routes]), "rollout_sample_support": kept,
        "pixel_values": None, "image_grid_thw": None, "action_log_probs": right(OLD), "base_action_log_probs": None, "values": None,
        "advantages": right([r["advantage"] for r in BASE])})
    batch.metadata = {"policy_mini_batch_boundaries": [(0, 2)], "policy_prompt_boundaries": [(0, 2)], "response_length": 4, "avg_response_length": 3.0}
    pad_training_input_batch(batch, 2).save(folder / "global_step_5_training_input.pkl")


def art(folder):
    """Packed tensors of the packer of prefix trees."""
    from art.preprocessing.pack import packed_tensors_from_tokenized_results, packed_tensors_to_dir
    from art.preprocessing.tokenize import TokenizedResult
    results = [TokenizedResult(
        advantage=advantage, chat="", token_ids=PROMPT + response, input_pos=list(range(3 + len(response))), assistant_mask=[0] * 3 + mask,
        logprobs=[float("nan")] * 3 + [lp if counts else float("nan") for lp, counts in zip(sampled, mask)], pixel_values=None, image_grid_thw=None, trajectory=None,
        choice_offsets=[3], extra_logprobs={}, _tokenizer=None, weight=1.0, prompt_id=17, prompt_length=3)
        for response, mask, sampled, advantage in zip(RESPONSES, MASKS, SAMPLED, ADVANTAGES)]
    packed_tensors_to_dir(packed_tensors_from_tokenized_results(results, 32, verbosity=0, min_prefix_tree_shared_segment_length=0), str(folder))


def verifiers(folder):
    """traces.jsonl of two episodes; the second trace has two branches."""
    from verifiers.v1.episode import Episode, GroupInfo, TrainRunInfo, TrainWorkInfo
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Reward
    from verifiers.v1.types import AssistantMessage, UserMessage
    from verifiers.v1.utils.trace_store import write_episode
    for at, (response, mask, sampled, advantage) in enumerate(zip(RESPONSES, MASKS, SAMPLED, ADVANTAGES)):
        kept = [lp for lp, counts in zip(sampled, mask) if counts]
        nodes = [MessageNode(message=UserMessage(content="x"), token_ids=PROMPT, mask=[False] * 3),
                 MessageNode(parent=0, sampled=True, message=AssistantMessage(content="y"), token_ids=response, mask=[bool(m) for m in mask], logprobs=kept,
                             trainer_logprobs=[lp for lp, counts in zip(OLD[at], mask) if counts], advantages=[advantage] * len(kept))]
        made = verifiers_trace(nodes, id=f"t{at}", rewards={"right": Reward(score=1.0 - at)}, ok=True, is_completed=True)
        write_episode(folder, Episode(task=made.task, traces=[made], group=GroupInfo(id="q"), ok=True, run=TrainRunInfo(id="r", work=TrainWorkInfo(step=5))))


def verifiers_trace(nodes, **more):
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.task import TaskData
    return Trace.model_construct(task=TraceTask.model_construct(type="T", data=TaskData.model_construct()), agent=AgentInfo.model_construct(config=None, name="agent", trainable=True),
                                 nodes=nodes, **more)


def harbor(folder):
    """A trajectory in ATIF, whose steps are two calls of the model."""
    from harbor.models.trajectories import Agent, Metrics, Step, Trajectory
    steps = [Step(step_id=1, source="user", message="x")]
    steps += [Step(step_id=at + 2, source="agent", message="y", metrics=Metrics(prompt_token_ids=PROMPT, completion_token_ids=response, logprobs=sampled))
              for at, (response, sampled) in enumerate(zip(RESPONSES, SAMPLED))]
    made = Trajectory(schema_version="ATIF-v1.6", session_id="s", agent=Agent(name="a", version="1"), steps=steps)
    (folder / "trajectory.json").write_text(made.model_dump_json(indent=2, exclude_none=True))


def rllm(folder):
    """An episode of one trajectory of two steps."""
    import json
    from rllm.agents.agent import Episode, Step, Trajectory
    steps = [Step(prompt_ids=PROMPT, response_ids=response, logprobs=sampled, advantage=advantage)
             for response, sampled, advantage in zip(RESPONSES, SAMPLED, ADVANTAGES)]
    (folder / "episode.json").write_text(json.dumps(Episode(id="q:0", trajectories=[Trajectory(name="agent", reward=1.0, steps=steps)]).to_dict()))


def with_rewards(records, *rewards):
    return [{**record, "reward": reward} for record, reward in zip(records, rewards)]


def of_steps(name, **more):
    """The records of two calls of the model in one run."""
    return [{"prompt_ids": PROMPT, "response_ids": response, "loss_mask": [1] * len(response), "rollout_logprobs": sampled, "trajectory": name, "turn": at,
             **{key: values[at] for key, values in more.items() if values[at] is not None}}
            for at, (response, sampled) in enumerate(zip(RESPONSES, SAMPLED))]


_VERL = with_rewards([{**r, "group": "q", "step": 5, "temperature": .7, "old_logprobs": old, "rollout_logprobs": sampled}
                      for r, old, sampled in zip(BASE, OLD, SAMPLED)], 1.0, 0.0)
_MASKED = lambda rows: [[lp if counts else 0.0 for lp, counts in zip(row, mask)] for row, mask in zip(rows, MASKS)]
_ZEROED = [{**r, "advantage": [a * m for a, m in zip(r["advantage"], r["loss_mask"])]} for r in BASE]
_OF_ART = [{**r, "advantage": [2 * a for a in r["advantage"]]} for r in _ZEROED]  # its packer divides by the mean of their sizes, 1/2
# name: (module that must be importable, {file or "": records})
PACKAGES = {
    "verl": ("verl", {name: _VERL for name in ("torch.pkl", "numpy.pkl", "queue.pt", "consolidated.pt")}),
    "skyrl": ("skyrl", {"global_step_5_training_input.pkl": [{**r, "group": "5:0", "step": 5, "old_logprobs": old, "rollout_logprobs": sampled, "routed_experts": routes, "kept_ids": kept}
                             for r, old, sampled, routes, kept in zip(BASE, OLD, SAMPLED, ROUTES, KEPT)]}),
    "art": ("art", {"": [{**r, "old_logprobs": lp, "rollout_logprobs": lp} for r, lp in zip(_OF_ART, _MASKED(SAMPLED))]}),
    "verifiers": ("verifiers.v1", {"traces.jsonl": with_rewards([
        {**r, "group": "q:agent", "trajectory": f"t{at}", "step": 5, "old_logprobs": old, "rollout_logprobs": sampled}
        for at, (r, old, sampled) in enumerate(zip(_ZEROED, _MASKED(OLD), _MASKED(SAMPLED)))], 1.0, 0.0)}),
    "harbor": ("harbor", {"trajectory.json": of_steps("s")}),
    "rllm": ("rllm", {"episode.json": of_steps("q:0:agent:0", group=["q:agent"] * 2, reward=[None, 1.0], advantage=[r["advantage"] for r in BASE])}),
}


def write(name, folder):
    folder.mkdir(parents=True, exist_ok=True)
    globals()[name](folder)


if __name__ == "__main__":
    from importlib import metadata
    for name in PACKAGES:
        try:
            version = metadata.version({"art": "openpipe-art"}.get(name, name))
            write(name, Path(sys.argv[1]) / f"{name}-{version}")
            print(f"{name} {version}")
        except ImportError as missing:
            print(f"{name}: {missing}")
