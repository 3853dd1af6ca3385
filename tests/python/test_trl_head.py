"""TRL's fused head in a shared batch: it runs every different labelled row once, and what TRL reads of it is what it reads of the padded batch.

Everything in float64, TRL's buffers too, against TRL's own trainers and TRL's own call. Fields, gradients and metrics are sums over some 300 rows,
64 columns and 96 tokens of numbers near 1 with roundings of 1e-16.
"""

import contextlib

import pytest
import torch

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
shared = pytest.importorskip("espalier.trl")
utils = pytest.importorskip("trl.trainer.utils")
kernel = pytest.importorskip("trl.kernels.chunked_logprob")
divergence = pytest.importorskip("trl.kernels.chunked_divergence")

import hf_models  # noqa: E402
import trl_batches as data  # noqa: E402
from espalier.errors import Unsupported  # noqa: E402
from espalier.trl import batches  # noqa: E402
from espalier.trl.tree import Tree  # noqa: E402
from test_trl_batches import KINDS  # noqa: E402
from test_trl_trainer import mixture  # noqa: E402
from test_trl_tree import Shared, batch  # noqa: E402

ALLOWED = 1e-10
SEEDS = [seed for seed in range(24) if (tree := Tree.of(*batch(seed)[1:])).rows < tree.tokens]
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def labels_of(rows, ids, mask, seed):
    """Labels of every kind: none, the next tokens, other ones. Those of the first two rows are equal where the rows are."""
    generator = torch.Generator().manual_seed(seed)
    other = torch.randint(3, 90, (200,), generator=generator)
    kept = torch.rand(200, generator=generator) < .6
    labels = ids.clone()
    for row, on in zip(labels, mask):
        at = on.nonzero()[:, 0]
        depth = torch.arange(len(at))
        own = torch.where(torch.rand(len(at), generator=generator) < .2, other[:len(at)], row[at])
        row.fill_(-100)
        row[at] = torch.where(kept[depth] & (depth > 0), own, -100)
    return labels


def pairs_of(rows, ids, mask, labels):
    """The different pairs of a beginning of a row and the label behind it."""
    found = []
    for row, on, label in zip(rows, mask, labels):
        label = label[on.bool()].tolist()
        found += [(tuple(row[:t]), label[t]) for t in range(1, len(row)) if label[t] != -100]
    return found


class Torch64:
    """torch, whose float32 is float64: the type of the buffers of TRL's head."""
    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def all_float64():
    """As in hf_models, and in the backwards of TRL's heads, where no mode of torch is."""
    kernel.torch, divergence.torch, torch.Tensor.float = Torch64(), Torch64(), torch.Tensor.double
    try:
        with hf_models.all_float64():
            yield
    finally:
        kernel.torch = divergence.torch = torch
        del torch.Tensor.float


@contextlib.contextmanager
def counted_head():
    """The numbers of rows of all calls of TRL's head."""
    counts, own = [], utils._ChunkedLogProbFunction.apply
    utils._ChunkedLogProbFunction.apply = lambda hidden, *more: (counts.append(len(hidden)), own(hidden, *more))[1]
    try:
        yield counts
    finally:
        del utils._ChunkedLogProbFunction.apply


@pytest.mark.parametrize("seed", range(12))
def test_every_different_pair_of_a_row_and_its_label_is_one(seed):
    rows, ids, mask = batch(seed)
    labels = labels_of(rows, ids, mask, seed)
    labelled, wanted = Tree.of(ids, mask, labels).labelled, pairs_of(rows, ids, mask, labels)
    assert len(labelled.rows) == len(set(wanted)) and len(labelled.which) == len(wanted)
    assert labelled.repeats == (len(set(wanted)) < len(wanted))
    tree = Tree.of(ids, mask)
    assert torch.equal(labelled.rows[labelled.which], tree.place[:, :-1][labels[:, 1:] != -100])
    assert torch.equal(labelled.whole(labelled.labels[None]), labels[:, 1:].clamp(min=0))
    assert Tree.of(ids, mask, torch.full_like(ids, -100)).labelled is None


@pytest.mark.parametrize("family, seed", list(zip([*hf_models.FAMILIES, "mixture", "mixture"], SEEDS)))
def test_every_field_and_gradient_is_that_of_trl_s_own_call(family, seed):
    with all_float64():
        model = mixture().double() if family == "mixture" else hf_models.make(family)
        trl.trainer.utils.add_fused_lm_head(model, temperature=.7, outputs=FIELDS)
        rows, ids, mask = batch(seed)
        labels = labels_of(rows, ids, mask, seed)
        given = dict(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, output_router_logits=family == "mixture")
        trainer = Shared(model)

        def run(context):
            model.zero_grad(set_to_none=True)
            with context, counted_head() as counts:
                out = model(**given)
            generator = torch.Generator().manual_seed(seed)
            loss = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in (out.log_probs, out.entropy))
            (loss if out.aux_loss is None else loss + out.aux_loss).backward()
            return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, counts

        (plain, wanted, _), (ours, found, counts) = run(contextlib.nullcontext()), run(trainer._shared_backbones())
    pairs = pairs_of(rows, ids, mask, labels)
    assert trainer.shared_rows["run"] > 0 and counts == [len(set(pairs))]
    for name in FIELDS + ("label_mask", "aux_loss"):
        a, b = getattr(plain, name), getattr(ours, name)
        assert (a is None) == (b is None) == (name == "aux_loss" and family != "mixture")
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype and float((a.double() - b.double()).detach().abs().max()) <= ALLOWED, name
    if len(set(pairs)) < len(pairs):
        assert ours.loss is None
    else:
        assert abs(ours.loss.item() - plain.loss.item()) <= ALLOWED
    size = sum(g.square().sum() for g in wanted.values()).sqrt()
    assert found.keys() == wanted.keys() and max(float((found[name] - g).norm() / size) for name, g in wanted.items()) <= ALLOWED


def test_the_loss_of_labels_that_do_not_repeat_is_given():
    rows, ids, mask = batch(3)
    labels = torch.full_like(ids, -100)
    labels[0, -1] = 5
    with all_float64():
        model = mixture().double()
        trl.trainer.utils.add_fused_lm_head(model)
        given = dict(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        trainer = Shared(model)
        for more in ({}, {"num_items_in_batch": 7}):
            plain = model(**given, **more).loss
            with trainer._shared_backbones():
                ours = model(**given, **more).loss
            assert abs(plain.item() - ours.item()) <= ALLOWED


def adapted():
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    return peft.get_peft_model(data.example.small_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))


CASES = {
    "sft": [{}, dict(completion_only_loss=False), dict(dataset=data.texts), dict(dataset=data.chats, chat=True, assistant_only_loss=True),
            dict(loss_type="dft"), dict(label_smoothing_factor=.1), dict(label_smoothing_factor=.1, completion_only_loss=False),
            dict(dataset=data.texts, make=mixture, router_aux_loss_coef=1.0), dict(make=adapted),
            dict(dataset=data.texts, average_tokens_across_devices=False, max_length=30)],
    "dpo": [{}, dict(use_weighting=True)],
    "kto": [{}]}
RUNTIMES = ("_runtime", "_per_second")


def train(kind, trainer_class, folder, case):
    """A run in float64 with every step logged, an evaluation, and the rows of the head's calls."""
    _, _, config, common, _ = KINDS[kind]
    settings = {"make": data.example.small_model, **common, **case, "logging_strategy": "steps", "logging_steps": 1}
    make, dataset = settings.pop("make"), settings.pop("dataset")
    with all_float64(), counted_head() as rows:
        trainer = data.run(trainer_class, config, dataset, folder, make=lambda: make().double(), **settings)
        trainer.evaluate({"again": trainer.train_dataset} if kind == "sft" else trainer.train_dataset)
    return trainer, sum(rows)


@pytest.mark.parametrize("kind, case", [(kind, case) for kind, cases in CASES.items() for case in cases],
                         ids=[f"{kind} {' '.join(case) or 'as is'}" for kind, cases in CASES.items() for case in cases])
def test_losses_gradients_and_every_logged_number_are_the_plain_trainer_s(kind, case, tmp_path):
    plain_class, our_class, *_ = KINDS[kind]
    (plain, plain_rows), (ours, our_rows) = train(kind, plain_class, tmp_path / "plain", case), train(kind, our_class, tmp_path / "ours", case)
    assert 0 < our_rows < .75 * plain_rows and ours.shared_rows["run"] > 0
    for a, b in zip(plain.grads, ours.grads, strict=True):
        size = sum(g.square().sum() for g in a.values()).sqrt()
        assert set(a) == set(b) and size > 0 and max(float((a[n] - b[n]).norm() / size) for n in a) <= ALLOWED
    assert max(abs(a - b) / (1 + abs(a)) for a, b in zip(plain.losses, ours.losses, strict=True)) <= ALLOWED
    numbers = 0
    for a, b in zip(plain.state.log_history, ours.state.log_history, strict=True):
        assert set(a) == set(b)
        for name in {name for name in a if not name.endswith(RUNTIMES)}:
            numbers += 1
            assert abs(a[name] - b[name]) <= ALLOWED * (1 + abs(a[name])), (name, a[name], b[name])
    assert numbers > 20, plain.state.log_history
    if kind == "sft":
        names = {name.removeprefix("eval_again_") for entry in ours.state.log_history for name in entry}
        assert {"entropy", "mean_token_accuracy", "num_tokens", "loss"} <= names and ("aux_loss" in names) == ("router_aux_loss_coef" in case)


@pytest.mark.parametrize("case", [dict(padding_free=True, max_length=None), dict(packing=True, max_length=64)], ids=["padding free", "packing"])
def test_batches_without_padding_are_bitwise_the_plain_trainer_s(case, tmp_path):
    plain_class, our_class, *_ = KINDS["sft"]
    (plain, plain_rows), (ours, our_rows) = train("sft", plain_class, tmp_path / "plain", case), train("sft", our_class, tmp_path / "ours", case)
    assert plain_rows == our_rows and plain.losses == ours.losses
    assert all(torch.equal(a[n], b[n]) for a, b in zip(plain.grads, ours.grads, strict=True) for n in a)


def test_a_label_behind_padding_runs_trl_s_own_path(caplog):
    """TRL predicts it from a row of padding, which no tree has."""
    rows, ids, mask = batch(3)
    labels = ids.masked_fill(mask == 0, -100)
    assert labels[(mask == 1).int().argmax(1).nonzero()[0, 0]].ne(-100).any()
    with all_float64():
        model = mixture().double()
        trl.trainer.utils.add_fused_lm_head(model)
        given = dict(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        trainer, plain = Shared(model), model(**given).log_probs
        with trainer._shared_backbones():
            assert torch.equal(model(**given).log_probs, plain)
    assert trainer.shared_rows["run"] == 0 and "behind padding" in caplog.text


@pytest.mark.parametrize("kind", CASES)
def test_a_model_that_refuses_within_a_call_trains_as_the_plain_trainer_s(kind, tmp_path, monkeypatch, caplog):
    """TRL's head then gets the padded batch and its labels again."""
    def refused(*_):
        raise Unsupported("layer 1", "rows that share", "none")

    monkeypatch.setattr(batches, "_run", refused)
    plain_class, our_class, *_ = KINDS[kind]
    (plain, plain_rows), (ours, our_rows) = train(kind, plain_class, tmp_path / "plain", {}), train(kind, our_class, tmp_path / "ours", {})
    assert plain_rows == our_rows and plain.losses == ours.losses and ours.shared_rows["run"] == 0
    assert all(torch.equal(a[n], b[n]) for a, b in zip(plain.grads, ours.grads, strict=True) for n in a)
    assert sum("layer 1" in record.message for record in caplog.records) == 1
    assert ours.model.config._attn_implementation == plain.model.config._attn_implementation
