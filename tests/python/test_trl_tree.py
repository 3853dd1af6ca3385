"""The tree of a padded batch, and a backbone that runs it: against every row alone, in float64."""

import random

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("espalier.trl")

import hf_models  # noqa: E402
from espalier.trl import SharedBatches  # noqa: E402
from espalier.trl.tree import Tree  # noqa: E402

# Hidden states and gradients are sums over some 300 rows and 64 columns of numbers near 1 with roundings of 1e-16.
ALLOWED = 1e-10
CASES = range(12)


def batch(seed):
    """(rows, input ids, attention mask) of rows that share beginnings of all kinds; padded left or right."""
    draw = random.Random(seed)
    tokens = lambda count: [draw.randrange(3, 90) for _ in range(count)]
    rows = [tokens(draw.randint(1, 12))]
    for _ in range(draw.randint(1, 9)):
        other = draw.choice(rows)
        rows.append(other[:draw.randint(0, len(other))] + tokens(draw.randint(0, 9)) or tokens(1))
    if seed % 3 == 0:
        rows += [list(rows[-1]), rows[-1][:1]]
    width = max(map(len, rows)) + draw.randint(0, 3)
    left = seed % 2
    pad = lambda row, filler, value: [filler] * (width - len(row)) * left + [value(x) for x in row] + [filler] * (width - len(row)) * (1 - left)
    return rows, torch.tensor([pad(row, 0, int) for row in rows]), torch.tensor([pad(row, 0, lambda x: 1) for row in rows])


@pytest.mark.parametrize("seed", CASES)
def test_every_beginning_is_one_row_that_sees_what_is_before_it(seed):
    rows, ids, mask = batch(seed)
    tree = Tree.of(ids, mask)
    assert tree.rows == len({tuple(row[:t + 1]) for row in rows for t in range(len(row))})
    assert tree.tokens == sum(map(len, rows)) and tree.longest == max(map(len, rows))
    sees = torch.zeros(tree.rows, tree.rows, dtype=torch.bool)
    covered = []
    for begin, length, end in tree.runs:
        covered += range(begin, begin + length)
        for row in range(begin, begin + length):
            sees[row:begin + length, row] = True
            sees[begin + length:end, row] = True
    assert covered == list(range(tree.rows))
    for row, place, on in zip(rows, tree.place, mask):
        path = place[on.bool()].tolist()
        assert tree.ids[path].tolist() == row and tree.positions[path].tolist() == list(range(len(row)))
        for t, at in enumerate(path):
            assert sees[at].nonzero()[:, 0].tolist() == sorted(path[:t + 1])


def test_what_is_no_plain_padding_has_no_tree():
    ids = torch.arange(8).view(2, 4)
    assert Tree.of(ids, torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])) is None
    assert Tree.of(ids, torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])) is None
    assert Tree.of(ids, None).tokens == 8


class Holder:
    def __init__(self, model):
        self.model = model


class Shared(SharedBatches, Holder):
    pass


def loss_of(hidden, rows, seed):
    """A random linear function of every hidden state of a live token."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(len(row), hidden[0].shape[-1], dtype=torch.float64, generator=generator) for row in rows]
    return sum((h * w).sum() for h, w in zip(hidden, weights))


@pytest.mark.parametrize("family, seed", [(family, seed) for seed, family in enumerate(hf_models.FAMILIES)])
def test_gradients_in_float64_are_those_of_every_row_alone(family, seed):
    with hf_models.all_float64():
        model = hf_models.make(family)
        rows, ids, mask = batch(seed)
        loss_of([model.base_model(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0] for row in rows], rows, seed).backward()
        wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        trainer = Shared(model)
        with trainer._shared_backbones():
            hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        loss_of([h[on.bool()] for h, on in zip(hidden, mask)], rows, seed).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    size = sum(g.square().sum() for g in wanted.values()).sqrt()
    assert max(float((found[name] - g).norm() / size) for name, g in wanted.items()) <= ALLOWED
    tree = Tree.of(ids, mask)
    assert trainer.shared_rows == ({"run": tree.rows, "without_sharing": tree.tokens} if tree.rows < tree.tokens else {"run": 0, "without_sharing": 0})
