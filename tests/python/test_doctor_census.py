"""`doctor` on twenty dumps with a fault and their healthy twins, some of them too weak to find: the table of docs/doctor.md says what it found.

The dumps are of another model and of other sizes than those of test_doctor.py, with faults as weak as they occur."""

import copy
import random
import re

import pytest
from conftest import ROOT

from make_model import make_model
from test_doctor import SIZES, VOCABULARY, Place, branched, changed, cumulative, divided, drawn, in_batch, loaded, moved, scored, shifted, turns_of, with_votes
from text_model import write_lines


class Other(Place):
    def __init__(self, folder):
        self.directory = make_model("llama3_tied", folder / "model", **SIZES)
        self.model = loaded(self.directory)
        draw = random.Random(11)
        self.prompts = [[draw.randrange(VOCABULARY) for _ in range(6)] for _ in range(3)]

    def kept(self, with_sets, **rule):
        return [{**record, **({"kept_ids": sets} if with_sets else {})} for record, sets in self.dump(seed=21, **rule)]

    def of_weights(self, by, where, own):
        """Rows that slightly other weights drew."""
        other, out = moved(self.model, by, 5), copy.deepcopy(self.base)
        for at in where:
            [(ids, logprobs, _)] = drawn(other, [out[at]["prompt_ids"]], 20, 70 + at)
            out[at].update(response_ids=ids, rollout_logprobs=logprobs)
            if own:
                out[at]["rollout_logprobs"] = scored(self.model, out[at])
        return out

    def greedy(self, at, length, greedy):
        out = copy.deepcopy(self.base)
        [(ids, _, _)] = drawn(self.model, [out[at]["prompt_ids"]], length, 3, greedy=greedy)
        out[at]["response_ids"] = ids
        out[at]["rollout_logprobs"] = scored(self.model, out[at])
        return out


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = Other(tmp_path_factory.mktemp("census"))
    made.base = made.dump(seed=9)
    return made


def without(record, name):
    return {key: value for key, value in record.items() if key != name}


def short_branches(place, declared):
    """Two responses with their first five tokens in common."""
    out = copy.deepcopy(place.base)
    for series in ("response_ids", "rollout_logprobs"):
        out[5][series] = out[4][series][:5] + out[5][series][5:]
    out[5]["rollout_logprobs"] = scored(place.model, out[5])
    if declared:
        for name, at in (("a", 4), ("b", 5)):
            out[at].update(trajectory="one", branch=name)
    return out


def advantage_zero(base, sick):
    return [{**r, "advantage": 0.0 if sick and r["trajectory"] == "t3" and r["turn"] == 1 else .6 - r["reward"]} for r in turns_of(base)]


def dr_grpo(base, per_record):
    """Advantages without deviations, of votes per record or per trajectory."""
    out = with_votes(turns_of(base), per_record)
    for record in out:
        members = [r for r in out if r["group"] == record["group"]]
        votes = [r["reward"] for r in members] if per_record else list({r["trajectory"]: r["reward"] for r in members}.values())
        record["advantage"] = record["reward"] - sum(votes) / len(votes)
    return out


def ones(record):
    return sum(record["loss_mask"])


# name in the table: (fault, dump(place, sick))
DUMPS = {
    "three rows twice": ("trained_n_times", lambda p, s: p.base + copy.deepcopy(p.base[2:5] if s else [])),
    "branches with 5 tokens in common": ("trained_n_times", lambda p, s: short_branches(p, not s)),
    "later branch cut at 18 tokens": ("trained_n_times", lambda p, s: branched(p.base, not s)),
    "turns that repeat the first turn with loss": ("trained_n_times", lambda p, s: cumulative(p.base, not s)),
    "divisor with tool tokens": ("wrong_divisor", lambda p, s: divided(p.base, (lambda r: len(r["response_ids"])) if s else ones)),
    "divisor of the batch with prompts": ("wrong_divisor", lambda p, s: in_batch(p.base, (lambda r: len(r["prompt_ids"] + r["response_ids"])) if s else ones)),
    "dr_grpo with a vote for each turn": ("votes_per_record", lambda p, s: dr_grpo(p.base, s)),
    "one turn of advantage 0": ("zero_advantages", lambda p, s: advantage_zero(p.base, s)),
    "one row of an evaluation": ("evaluation_rows", lambda p, s: changed(p.base, lambda r: {"meta": {"validate": s}}, {4})),
    "a version two behind": ("stale_policy", lambda p, s: changed(
        changed(p.base, lambda r: {"meta": {"policy_version": 7}}), lambda r: {"meta": {"policy_version": 5 if s else 7}}, {8})),
    "temperature 0.95, not recorded": ("other_temperature", lambda p, s: [without(r, "temperature") if s else r for r in p.dump(0.95, seed=13)]),
    "temperature 1.2 in one row of old log-probs": ("other_temperature", lambda p, s: changed(
        p.base, lambda r: {"old_logprobs": scored(p.model, r, 1.2 if s and r["response_ids"] == p.base[6]["response_ids"] else 1.0)})),
    "top-p 0.9 without sets": ("kept_sets_missing", lambda p, s: p.kept(not s, top_p=.9)),
    "top-p 0.9999 without sets": ("kept_sets_missing", lambda p, s: p.kept(not s, top_p=.9999)),
    "top-k 60 of 96 without sets": ("kept_sets_missing", lambda p, s: p.kept(not s, top_k=60)),
    "one row shifted by a token": ("shifted_logprobs", lambda p, s: changed(
        p.base, lambda r: {"rollout_logprobs": shifted(r["rollout_logprobs"], 1)}, {10} if s else ())),
    "two rows of weights a step away": ("stale_policy", lambda p, s: p.of_weights(.15, (1, 7), not s)),
    "two rows of nearly equal weights": ("stale_policy", lambda p, s: p.of_weights(.002, (1, 7), not s)),
    "a greedy row of 40 tokens": ("evaluation_rows", lambda p, s: p.greedy(3, 40, s)),
    "a greedy row of 4 tokens": ("evaluation_rows", lambda p, s: p.greedy(3, 4, s)),
}


NOTHING = "nothing"
ROWS = {cells[0]: cells[1:] for cells in (
    [cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in (ROOT / "docs/doctor.md").read_text().splitlines() if line.count("|") == 5)
    if cells[0] in DUMPS}


def found(espalier, place, dump, folder):
    done = espalier("doctor", write_lines(dump, folder / "dump.jsonl"), "--json", "--model", place.directory, expect=None)
    assert done.status in (0, 6), done.stderr
    return ", ".join(sorted(finding["kind"] for finding in done.json["findings"])) or NOTHING


@pytest.mark.parametrize("name", DUMPS)
def test_the_table_says_what_is_found(name, espalier, place, tmp_path):
    fault, make = DUMPS[name]
    assert ROWS[name] == [fault, found(espalier, place, make(place, True), tmp_path), found(espalier, place, make(place, False), tmp_path)]


def test_the_numbers_are_those_of_the_table():
    said = re.search(r"(\d+) of (\d+) faults are found, (\d+) are not, and of (\d+) healthy twins (\d+)", (ROOT / "docs/doctor.md").read_text())
    right = sum(fault == sick for fault, sick, _ in ROWS.values())
    missed = sum(sick == NOTHING for _, sick, _ in ROWS.values())
    alarms = sum(healthy != NOTHING for *_, healthy in ROWS.values())
    assert len(ROWS) == len(DUMPS) == right + missed and list(map(int, said.groups())) == [right, len(ROWS), missed, len(ROWS), alarms]
