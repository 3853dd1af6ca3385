"""verl's real engine on a CPU, under FSDP2 and FSDP1, plain against shared, with one and two ranks (verl_ranks.py runs them; gloo).

Float64: 1e-10 of a parameter's own gradient, as promised everywhere. Narrower types: shared may be twice as far from the float64
gradient as verl's own path in that type is.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conftest import ROOT

pytest.importorskip("verl", reason="verl is not installed (tools/requirements-verl.txt)")
HERE = Path(__file__).resolve().parent
FLOAT64 = 1e-10
PLAIN = {"geo_mean": "geo_mean", "kl_cov": "kl_cov", "batch_normalize": "rollout_is_batch_normalize", "sum_pi_squared": "calculate_sum_pi_squared",
         "temperatures": "several temperatures", "positions": "position ids"}


def environment(**more):
    paths = os.pathsep.join([str(ROOT / "python"), *sys.path])
    return dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=paths, **more)


def written(program, folder, world):
    """What every rank wrote."""
    processes = [subprocess.Popen([sys.executable, str(HERE / program), str(folder), str(rank), str(world)], env=environment(),
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(world)]
    try:
        outputs = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(text[-4000:] for text in outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def results(request, tmp_path_factory):
    return written("verl_ranks.py", tmp_path_factory.mktemp("verl"), request.param)


@pytest.mark.parametrize("name", ["kept_ids", "sampling_mask", "rollout_top_p_token_ids"])
def test_kept_sets_are_refused_by_name(name):
    from espalier.errors import Unsupported
    from espalier.verl import refusals

    refusals.check_sets({"input_ids": None})
    with pytest.raises(Unsupported, match=name) as error:
        refusals.check_sets({"input_ids": None, name: None})
    assert error.value.exit_code == 4


@pytest.mark.parametrize("world", [1, 2], ids=["one rank", "two ranks"])
def test_recorded_experts_are_replayed(tmp_path, world):
    """R3 under FSDP2 and FSDP1, against verl's own engine whose routers are given the record."""
    for rank in written("verl_routes.py", tmp_path, world):
        for strategy in ("fsdp2", "fsdp"):
            case = rank[strategy]
            assert case["gradient"][0] <= FLOAT64 < 1e-2 < case["without"][0] and case["loss"] <= FLOAT64 and case["metrics"] <= FLOAT64
            assert case["log_probs"] <= FLOAT64 and case["rows"][0] < .75 * case["rows"][1]
        assert "no routed_experts" in rank["missing"] and rank["verified"] <= FLOAT64


@pytest.mark.parametrize("world", [1, 2], ids=["one rank", "two ranks"])
def test_images_are_shared(tmp_path, world):
    """Qwen2.5-VL and Qwen3-VL under FSDP2 and FSDP1, against verl's own engine, the vision tower's gradients too: images of prompts and screenshots in
    responses. Position ids that are not the model's own run verl's path."""
    for place, rank in enumerate(written("verl_images.py", tmp_path, world)):
        notes = rank.pop("notes")
        assert len(rank) == 8 and len(notes) == (place == 0) and all("get_rope_index" in note for note in notes)
        for name, case in rank.items():
            assert case["gradient"][0] <= FLOAT64 and case["loss"] <= FLOAT64 and case["metrics"] <= FLOAT64, (name, case)
            assert case["log_probs"] <= FLOAT64 and case["rows"][0] < .75 * case["rows"][1] and not case["notes"], (name, case)


def test_gradients_losses_and_metrics_are_verl_s_own(results):
    for rank in results:
        cases = {name: case for name, case in rank.items() if "parameter" in case}
        assert {"vanilla", "gspo", "cispo", "entropy", "kl_low_var_kl", "token-sum", "seq-mean-token-sum-norm", "lora", "recompute",
                "fsdp1_vanilla", "fsdp1_own_parameters_gspo_all", "fsdp1_small_waves", "fsdp1_lora"} <= set(cases)
        for name, case in cases.items():
            assert case["gradient"] <= FLOAT64, (name, case)
            assert case["loss"] <= FLOAT64 and case["metrics"] <= FLOAT64, (name, case)
            assert case["nonzero"] > 0


@pytest.mark.parametrize("case", ["small_waves", "fsdp1_small_waves"])  # a plan without trunks would run a prompt once a wave
def test_prompts_run_once(results, case):
    for rank in results:
        run, without = rank[case]["rows"]
        print(f"{run} rows run instead of {without}")
        # FSDP1 recomputes trunks, so that its plan may leave a start alone that few rollouts of a rank share.
        assert run < (without if case.startswith("fsdp1") else without / 3 if len(results) == 1 else without / 2)


STRATEGIES = ["", "fsdp1_", "fsdp1_own_parameters_"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_old_and_reference_log_probs(results, strategy):
    for rank in results:
        distance = rank[f"{strategy}log_probs"]
        assert distance["log_probs"] <= FLOAT64 * distance["largest"] and distance["entropies"] <= FLOAT64 * distance["largest"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_after_verl_s_own_clipping_and_optimizer(results, strategy):
    for rank in results:
        assert rank[f"{strategy}steps"]["weights"] <= FLOAT64 < rank[f"{strategy}steps"]["moved"]


@pytest.mark.rounding
@pytest.mark.parametrize("kind", ["float32", "checkpointing", "bfloat16", "fsdp1_bfloat16"])
def test_narrower_types_are_as_exact_as_plain(results, kind):
    for rank in results:
        assert 0 < rank[kind]["shared"] <= 2 * rank[kind]["plain"]
        assert rank[kind]["checkpointing"] == (kind in ("checkpointing", "fsdp1_bfloat16"))


@pytest.mark.parametrize("case", PLAIN)
def test_what_cannot_be_shared_runs_plain_with_one_note(results, case):
    """Positions are odd on the last rank alone, and yet all ranks fall back."""
    for rank in results:
        assert rank["plain"][case]["same"]
    notes = results[0]["plain"][case]["notes"]
    assert len(notes) == 1 and ("another rank" if case == "positions" and len(results) > 1 else PLAIN[case]) in notes[0]


@pytest.mark.parametrize("case,parameters", [("verified", 25), ("verified_fsdp1", 3)])
def test_verify_compares_the_first_update_with_verl_s_own(results, case, parameters):
    """FSDP1 has one flat parameter for each of two layers, and one for the rest."""
    assert len(results[0][case]["table"]) == 1 and f"pass: {parameters} parameters" in results[0][case]["table"][0]
    for rank in results:
        kind, text = rank[case]["error"]
        assert kind == "verification" and "dense step's gradient" in text


SWITCH = """
import verl
from verl.workers.engine import EngineRegistry
print("engine", EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__, EngineRegistry.get_engine_cls("value_model", "fsdp2").__name__)
try:
    EngineRegistry.new("language_model", "veomni")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("vendor", ["espalier", ""])
def test_one_environment_variable_switches_it_on(tmp_path, vendor):
    """Through the entry point of an installed package, made here from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "espalier-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: espalier\nVersion: 0\n")
    points = project["entry-points"]["verl.plugins"]
    (info / "entry_points.txt").write_text("[verl.plugins]\n" + "".join(f"{name} = {target}\n" for name, target in points.items()))
    env = environment(VERL_PLATFORM="cpu", VERL_ENGINE_VENDOR=vendor, VERL_USE_EXTERNAL_MODULES="verl_cpu")
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT / "examples"), env["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", SWITCH], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    own, critic = next(line for line in done.stdout.splitlines() if line.startswith("engine")).split()[1:]
    assert own == ("SharedPromptsEngine" if vendor else "FSDPEngineWithLMHead") and critic == "FSDPEngineWithValueHead"
    if vendor:
        assert "Unsupported VERL_ENGINE_VENDOR=espalier: expected actor.strategy=fsdp, fsdp2 or megatron" in done.stdout
