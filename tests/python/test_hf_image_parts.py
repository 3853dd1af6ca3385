"""A processor's dict cut into images, and images that always follow each other."""

import pytest
import torch

from espalier.hf import image_parts


def sizes(tensors, runs):
    return [(len(part["pixel_values"]), size) for part, size in image_parts.of(tensors, runs)]


GRIDS = dict(image_grid_thw=torch.tensor([[1, 4, 4], [1, 8, 4]]), pixel_values=torch.zeros(48, 2))
SIZED = dict(pixel_values=torch.zeros(2, 3, 8, 8), image_sizes=torch.tensor([[8, 8], [8, 4]]))


@pytest.mark.parametrize("tensors, runs, wanted", [
    (GRIDS, [4, 8], [(16, 4), (32, 8)]), (GRIDS, [12], [(16, 4), (32, 8)]),
    (GRIDS, [4, 7], [(48, 11)]),  # no merge of patches gives 11 tokens
    (dict(GRIDS, pixel_values=torch.zeros(47, 2)), [12], [(47, 12)]),
    (dict(pixel_values=torch.zeros(3, 3, 8, 8)), [4, 8], [(1, 4)] * 3),  # two tiles of one image
    (dict(pixel_values=torch.zeros(3, 3, 8, 8)), [4, 7], [(3, 11)]),
    (SIZED, [8, 4], [(1, 8), (1, 4)]),
    (SIZED, [2, 2, 2, 2, 2, 2], [(2, 12)]),  # rows between tokens of breaks: which are whose does not show
    (dict(SIZED, image_sizes=torch.tensor([[8, 8]] * 2)), [2] * 6, [(1, 6), (1, 6)]),
    (dict(SIZED, more=torch.zeros(5)), [8, 4], [(2, 12)]), (dict(pixel_values=torch.zeros(1, 2, 3, 8, 8)), [4, 4], [(1, 8)]),
])
def test_a_dict_is_cut_where_it_shows_its_images(tensors, runs, wanted):
    parts = image_parts.of(tensors, runs)
    assert sizes(tensors, runs) == wanted
    joined = image_parts.joined([part for part, _ in parts])
    assert all(torch.equal(joined[name], x) for name, x in tensors.items())


@pytest.mark.parametrize("sequences, wanted", [
    ([[0, 1, 2], [0, 1, 2]], [[0, 1, 2]]), ([[0, 1, 2], [0, 1]], [[0, 1], [2]]), ([[0, 1], [0, 2]], [[0], [1], [2]]), ([[0, 0]], [[0]]),
    ([[0, 1, 0, 1]], [[0, 1]]), ([[], [3]], [[3]]), ([[1, 0], [0]], [[0], [1]]), ([], []),
])
def test_images_that_always_follow_each_other(sequences, wanted):
    assert image_parts.chains(sequences) == wanted
