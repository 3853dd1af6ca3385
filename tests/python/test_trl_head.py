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

import hf_models  # noqa: E402
import trl_batches as data  # noqa: E402
from espalier.trl.tree import Tree  # noqa: E402
from test_trl_batches import settings_of  # noqa: E402
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
    """As in hf_models, and in the backward of TRL's head, where no mode of torch is."""
    kernel.torch, torch.Tensor.float = Torch64(), torch.Tensor.double
    try:
        with hf_models.all_float64():
            yield
    finally:
        kernel.torch = torch
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
            loss = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in (out.log_probs, out.entropy)) + (0 if out.aux_loss is None else out.aux_loss)
            loss.backward()
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
