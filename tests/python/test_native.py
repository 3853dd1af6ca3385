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
