"""Every class of transformers' mapping for causal language models, built tiny: exact in float64, or refused by name for a reason of the
table. Nothing else, and what is exact today may not be refused tomorrow.

The table (hf_sweep.json) has the tested releases of transformers (espalier/hf/versions.py). `make sweep-transformers` runs this file with the newest
release. `python tests/python/test_hf_sweep.py --write` writes the installed release's part of the table, and docs/python.md, from what it finds.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import hf_every_model as tiny
from hf_every_model import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES, TABLE, table, tables

espalier = pytest.importorskip("espalier")
INSTALLED = tiny.transformers.__version__
DOCS = Path(__file__).parents[2] / "docs/python.md"

# How a refusal reads, and what the documentation says of it.
REASONS = {
    "AttentionInterface": ("the model's own attention, not through transformers' `AttentionInterface`", "with its own attention|none in layers"),
    "arguments": ("a forward that takes no position ids or keyword arguments", "got fixed arguments"),
    "positions": ("positions counted by the model itself", "counts its own"),
    "encoder": ("an encoder-decoder", "got an encoder-decoder"),
    "several": ("several attentions in a layer, or layers that run several times", "expected one attention per layer"),
    "mask": ("a mask made by the model itself, or keys of another layer", "mask of the model's own|keys of the call's own rows"),
    "sparse": ("keys that are chosen or compressed over the whole call", "chooses or compresses"),
    "state": ("a state that passes along the sequence in the model's own way", "state does not pass|a state that espalier passes on|a state from every"),
    "bias": ("an attention bias other than for positions", "position_bias"),
    "window": ("a sliding window shorter than a rollout", "within the window"),
    "sinks": ("attention sinks", "attention sinks"),
    "soft-cap": ("soft-capped attention", "softcapping"),
    "neighbours": ("rows that read earlier rows other than through attention", "only through attention|runs rows of several rollouts"),
}
UNBUILT = {  # what this transformers cannot build tiny, or at all, in this environment
    "gemma3n": "its vision tower needs timm", "gemma4_assistant": "reads another model's keys and values",
    "gemma4_unified_assistant": "reads another model's keys and values",
}


def outcome(name, in_bfloat16=False, **changes):
    """"exact", or the reason of the refusal. `in_bfloat16`: verify=True has to agree in bfloat16, too."""
    torch.manual_seed(1)
    model = tiny.build(name, **changes)
    try:
        found = tiny.shared_error(model)
    except espalier.Unsupported as refusal:
        assert all(p.grad is None for p in model.parameters()), "refused after numbers appeared"
        return reason_of(str(refusal))
    assert max(found.values()) <= tiny.BOUND, found
    if in_bfloat16:
        result = tiny.shared_step(model.to(torch.bfloat16), tiny.ROLLOUTS, tiny.LOSS, verify=True)
        assert result.verification.verdict == "pass"
    return "exact"


def reason_of(text):
    """A refusal that quotes an error of the model's own call says nothing true about the model: it has no reason."""
    return next((reason for reason, (_, pattern) in REASONS.items() if re.search(pattern, text) and not re.search(r"got \w+(Error|Exception): ", text)), text)


def expected(of_release=None):
    return {name: reason for reason, names in (of_release or table()).items() for name in names}


@pytest.mark.parametrize("name", sorted(set(CLASSES) - set(UNBUILT)))
def test_exact_or_refused(name):
    assert outcome(name, in_bfloat16=True) == expected().get(name, "not in the table: python tests/python/test_hf_sweep.py --write")


@pytest.mark.parametrize("name", table()["exact"])
def test_in_torch_s_own_kernels(name, monkeypatch):
    """As on a GPU: blocks merged by their log-sum-exp instead of one call of the engine's kernel."""
    from espalier import kernels
    monkeypatch.setattr(kernels, "serves", lambda tensor: False)
    monkeypatch.setattr(kernels, "attention_forward", None)
    assert outcome(name) == "exact"


@pytest.mark.parametrize("name", table()["exact"])
def test_rotary_tables_that_a_call_s_length_changes(name):
    """Rollouts on both sides of the original length: longrope is exact, dynamic refused."""
    plain = tiny.build(name)
    half = {module.inv_freq.numel() for module in plain.modules() if isinstance(getattr(module, "rope_type", None), str)
            and hasattr(module, "inv_freq")}
    parameters = getattr(plain.config, "rope_parameters", None)
    if len(half) != 1 or not isinstance(parameters, dict) or "rope_theta" not in parameters:
        pytest.skip("no rotary table with one set of parameters")
    n = half.pop()
    factors = dict(short_factor=[1.0] * n, long_factor=[1.5 + .25 * i for i in range(n)], short_mscale=1.1, long_mscale=1.3)
    long = dict(rope_parameters=dict(parameters, rope_type="longrope", original_max_position_embeddings=tiny.ORIGINAL, factor=2.0, **factors),
                max_position_embeddings=2 * tiny.ORIGINAL)
    assert outcome(name, **long) == "exact"
    if n < 2 or name in ("phi3", "phi4_multimodal", "phimoe"):
        return  # transformers has no dynamic table of one frequency, and none for these
    dynamic = dict(parameters, rope_type="dynamic", factor=2.0)
    assert "changes with a call's longest position" in outcome(name, rope_parameters=dynamic, max_position_embeddings=tiny.ORIGINAL)
    assert outcome(name, rope_parameters=dynamic, max_position_embeddings=512) == "exact"


@pytest.mark.parametrize("name", table()["exact"])
def test_dropout_is_refused_where_it_is_used(name):
    """Every field of the config that a forward may read as a rate, in training."""
    config = tiny.config_of(name)
    rates = {field: .5 for field, value in config.to_dict().items() if "drop" in field and isinstance(value, float)}
    if not rates:
        pytest.skip("a family without dropout")
    model = tiny.build(name, **rates).train()
    try:
        espalier.hf.check(model)
    except espalier.Unsupported:
        return
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        states.append(model(input_ids=torch.tensor([[5, 6, 7, 8, 9]]), use_cache=False).logits)
    assert torch.equal(*states), "dropout in use that check passed"


def test_the_table_is_whole():
    names = expected()
    assert set(names) | set(UNBUILT) == set(CLASSES), sorted((set(names) | set(UNBUILT)) ^ set(CLASSES))
    assert set(table()) <= {"exact", *REASONS}
    assert DOCS.read_text().split("<!-- hf_sweep -->\n")[1].split("<!-- end -->")[0] == documented(tables())


def test_the_tested_range_is_that_of_the_table():
    from espalier.hf import versions
    assert versions.TESTED == (list(tables())[0], list(tables())[-1])


def test_a_newer_minor_version_is_noted(caplog):
    from espalier.hf import versions
    major, minor = Version(versions.TESTED[1]).release[:2]
    for release in (versions.TESTED[0], f"{major}.{minor}.9"):
        versions.note_if_newer(release)
    assert not caplog.records
    for release in (f"{major}.{minor + 1}.0", f"{major}.{minor + 1}.0.dev0", f"{major + 1}.0.0"):
        versions.note_if_newer(release)
        assert release in caplog.records[-1].getMessage() and versions.TESTED[1] in caplog.records[-1].getMessage()


def documented(known):
    """The newest release's table, and in which model types older ones differ."""
    newest = list(known)[-1]
    found, now = known[newest], expected(known[newest])
    words = lambda reason: "exact" if reason == "exact" else REASONS[reason][0]
    rows = [f"| {words(reason)} | {len(found[reason])} | {', '.join(found[reason])} |" for reason in ["exact", *REASONS] if reason in found]
    for release in list(known)[-2::-1]:
        then = expected(known[release])
        other = {}
        for name in sorted(set(now) | set(then)):
            if now.get(name) != then.get(name):
                other.setdefault(words(then[name]) if name in then else "not there yet", []).append(name)
        rows += [f"| in {release}: {reason} | {len(names)} | {', '.join(names)} |" for reason, names in other.items()]
    return "\n".join([f"| transformers {newest} | model types | which |", "| --- | ---: | --- |", *rows]) + "\n"


def write():
    found = {}
    for name in sorted(set(CLASSES) - set(UNBUILT)):
        try:
            found.setdefault(outcome(name), []).append(name)
        except Exception as problem:  # named at the end, with everything else written
            found.setdefault(f"{type(problem).__name__}: {problem}", []).append(name)
    unknown = set(found) - {"exact", *REASONS}
    known = {**tables(), INSTALLED: {reason: found[reason] for reason in ["exact", *REASONS] if reason in found}}
    TABLE.write_text(json.dumps(known, indent=1) + "\n")
    before, rest = DOCS.read_text().split("<!-- hf_sweep -->\n")
    DOCS.write_text(before + "<!-- hf_sweep -->\n" + documented(tables()) + "<!-- end -->" + rest.split("<!-- end -->", 1)[1])
    sys.exit("\n".join(f"{found[text]}: a reason without a row: {text}" for text in sorted(unknown)))


if __name__ == "__main__" and "--write" in sys.argv:
    write()
