"""Files that trainers' own packages write become the records that they hold: fresh ones of the installed version, and golden ones of the newest
version that was tried. A new layout is met here first.

Most packages need Python 3.12 or newer and much beside: where one is absent, its golden files are still read."""

import importlib
import json

import package_dumps
import pytest
from conftest import ROOT

from espalier import records

GOLDEN = ROOT / "tests/golden/packages"


def compare(name, folder):
    for file, wanted in package_dumps.PACKAGES[name][1].items():
        assert list(records.read(folder / file)) == wanted, file or name


@pytest.mark.parametrize("name", package_dumps.PACKAGES)
def test_the_installed_package_s_files_are_read(name, tmp_path):
    module = package_dumps.PACKAGES[name][0]
    try:
        importlib.import_module(module)
        package_dumps.write(name, tmp_path)
    except ImportError as missing:
        pytest.skip(f"{module} cannot be imported here: {missing}")
    compare(name, tmp_path)


@pytest.mark.parametrize("folder", sorted(path.name for path in GOLDEN.iterdir()))
def test_golden_files_of_packages_are_read(folder):
    compare(folder.rsplit("-", 1)[0], GOLDEN / folder)


def test_every_package_but_those_without_a_release_has_golden_files():
    assert {path.name.rsplit("-", 1)[0] for path in GOLDEN.iterdir()} == set(package_dumps.PACKAGES) - {"rllm"}


def test_the_program_reads_them(espalier, tmp_path):
    for folder in sorted(GOLDEN.iterdir()):
        name = folder.name.rsplit("-", 1)[0]
        for file, wanted in package_dumps.PACKAGES[name][1].items():
            espalier("convert", folder / file, tmp_path / "out.jsonl", "--overwrite")
            found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
            assert [record["response_ids"] for record in found] == [record["response_ids"] for record in wanted], (name, file)


def test_a_batch_of_the_installed_trl_is_read(tmp_path):
    """The dict that GRPOTrainer makes of a generation, with old and reference log-probs."""
    trl = pytest.importorskip("trl")
    torch = pytest.importorskip("torch")
    from test_trl_trainer import load_example, run
    batches = []

    class Saving(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batches.append(super()._generate_and_score_completions(inputs))
            return batches[-1]

    run(load_example(), Saving, trl.GRPOConfig, tmp_path, max_steps=1, max_completion_length=6, num_iterations=2, beta=.1)
    torch.save(batches[0], tmp_path / "batch.pt")
    reading = records.Reading(tmp_path / "batch.pt")
    found = list(reading.records())
    assert len(found) == len(batches[0]["prompt_ids"]) == 8
    for record, ids, mask, advantage in zip(found, *(batches[0][name] for name in ("completion_ids", "completion_mask", "advantages"))):
        assert record["response_ids"] == ids[mask.bool()].tolist() and record["advantage"] == float(advantage)
        assert {"old_logprobs", "ref_logprobs", "num_items_in_batch"} <= record.keys()
    assert not any("no field of a record takes" in note for note in reading.notes)
