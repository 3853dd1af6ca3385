"""The C interface of the core: groups, plans and errors come back as the engine has them."""

import gc

import numpy as np
import pytest

import espalier

native = pytest.importorskip("espalier.native")
SHAPE = dict(layers=2, hidden=64, inner=128, heads=4, kv_heads=2, head_dim=16, vocabulary=97)


@pytest.fixture(autouse=True)
def library():
    try:
        native.library()
    except espalier.Error as error:
        pytest.skip(str(error))


def drawn(*lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(3, 97, n) for n in lengths]


def test_groups_are_equal_prompts_in_order_of_appearance():
    a, b, c = drawn(5, 5, 3)
    assert native.group([a, b, a, c, b, a[:4]]).tolist() == [0, 1, 0, 2, 1, 3]
    assert native.group([]).tolist() == []


@pytest.mark.parametrize("wave_tokens", [4, 30, 1000])
@pytest.mark.parametrize("share", ["auto", "prompt", "off"])
def test_a_plan_has_every_response_token_once_and_keeps_its_budget(wave_tokens, share):
    prompts = [p for p, n in zip(drawn(50, 30), (4, 3)) for _ in range(n)]
    responses = drawn(10, 12, 0, 9, 7, 7, 30, seed=1)
    plan = native.Plan(prompts, responses, SHAPE, wave_tokens=wave_tokens, share=share)
    edges = np.concatenate([plan.edges(i) for i in range(len(plan.items))])
    assert sorted(map(tuple, edges[:, 2:].tolist())) == [(i, t) for i, r in enumerate(responses) for t in range(len(r))]
    assert all(responses[rollout][position] == target for _, target, rollout, position in edges.tolist())
    assert sorted(np.concatenate([item.finished for item in plan.items]).tolist()) == [0, 1, 3, 4, 5, 6]
    assert all(item.rows <= wave_tokens and item.parent < i for i, item in enumerate(plan.items))
    assert plan.json["rows"]["logical"] == sum(map(len, prompts)) + sum(map(len, responses))
    assert plan.json["rows"]["physical"] == sum(item.rows for item in plan.items)
    if share == "off":
        assert plan.json["rows"]["physical"] == plan.json["rows"]["logical"]


def plans():
    prompts = [p for p, n in zip(drawn(50, 30), (4, 3)) for _ in range(n)]
    return [native.Plan(prompts, drawn(10, 12, 0, 9, 7, 7, 30, seed=1), SHAPE, wave_tokens=w, schedule=s) for w in (4, 30, 1000) for s in ("packed", "phased")]


def test_a_program_opens_a_trunk_before_and_closes_it_behind_all_that_stands_below_it():
    for plan in plans():
        items, steps = plan.items, plan.program()
        assert sorted(steps) == sorted((forward, i) for i in range(len(items)) for forward in (True, False))
        at = {step: place for place, step in enumerate(steps)}
        for i, item in enumerate(items):
            assert at[True, i] < at[False, i]
            assert item.trunk or at[False, i] == at[True, i] + 1
            if item.parent >= 0:
                assert at[True, item.parent] < at[True, i] and at[False, i] < at[False, item.parent]
        assert [i for forward, i in steps if forward] == list(range(len(items)))


def seen(runs):
    """(row, key) of every pair in a square or a rectangle, as often as it is in one."""
    return sorted([(row, key) for begin, length, end in runs
                   for key in range(begin, begin + length) for row in range(key, end)])


def test_runs_hold_every_pair_of_a_row_and_a_row_that_it_sees_once():
    ends = [10, 3, 3, 7, 6, 6, 7, 10, 10, 10]
    assert seen(native.causal_runs(ends)) == [(row, key) for row in range(10) for key in range(row + 1) if row < ends[key]]
    assert native.causal_runs([]) == []
    for plan in plans():
        for item in plan.items:
            ends = [end for _, begin, to, _, end, *_ in item.segments.tolist() for _ in range(begin, to)]
            assert seen(item.runs) == [(row, key) for row in range(item.rows) for key in range(row + 1) if row < ends[key]]


def test_tables_are_copies():
    plan = native.Plan(drawn(8), drawn(4, seed=1), SHAPE, wave_tokens=100)
    segments, edges = plan.items[0].segments, plan.edges(0)
    kept = edges.copy()
    del plan
    gc.collect()
    assert (edges == kept).all() and segments.shape[1] == 8


@pytest.mark.parametrize("change,kind,code", [
    (dict(schedule="fast"), "option", 2), (dict(trunk_state="offload"), "unsupported", 4), (dict(dtype="int8"), "option", 2),
    (dict(wave_tokens=-1), "option", 2)])
def test_errors_of_the_core_keep_their_fields(change, kind, code):
    with pytest.raises(espalier.Error) as caught:
        native.Plan(drawn(5), drawn(3), SHAPE, **{"wave_tokens": 10, **change})
    assert (caught.value.kind, caught.value.exit_code) == (kind, code) and caught.value.where and caught.value.expected
    assert isinstance(caught.value, espalier.Unsupported) == (kind == "unsupported")


def test_an_empty_prompt_is_named():
    with pytest.raises(espalier.Error, match="rollout 1: expected at least one prompt token") as caught:
        native.Plan(drawn(5, 0), drawn(3, 3), SHAPE, wave_tokens=10)
    assert caught.value.exit_code == 3


def test_a_missing_library_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("ESPALIER_CORE_LIBRARY", str(tmp_path / "absent.so"))
    native.library.cache_clear()
    try:
        with pytest.raises(espalier.Error, match="Run `make`") as caught:
            native.library()
        assert caught.value.exit_code == 8
    finally:
        native.library.cache_clear()
