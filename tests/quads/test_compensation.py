"""A selection for all tiles at once is that of each tile on its own."""

import itertools

import pytest
import torch

from quads import recipes
from quads.compensation import TILE_ROWS, BlockSelector
from quads.emulation import quantizers

TILE = recipes.named()["quads"].replace(rac_scope="tile", rac_ratio=0.25)


@pytest.mark.parametrize("outer", ["token", "tensor"])
@pytest.mark.parametrize("ends", [[300], [5, 5, 400], [0, 128, 129, 385], [128, 256, 256], [1]])
def test_all_tiles_at_once_choose_as_each_alone(ends: list[int], outer: str) -> None:
    generator = torch.Generator().manual_seed(sum(ends))
    x = torch.randn(ends[-1], 256, generator=generator) * torch.logspace(-3, 3, ends[-1]).unsqueeze(-1)
    selector = BlockSelector(TILE.replace(activation_outer=outer), 256, 0)
    q = quantizers.quantize(x, granularity=outer)  # type: ignore[arg-type]
    expected = torch.zeros(len(x), 16, dtype=torch.bool)
    groups = [slice(start, end) for start, end in itertools.pairwise([0, *ends])]
    for rows, _, blocks, _ in selector.select(x, q, groups):
        assert blocks is not None and rows.stop - rows.start <= TILE_ROWS
        expected[rows, blocks] = True
    found = selector.row_mask(x, q.outer, torch.tensor(ends, dtype=torch.int32))
    assert torch.equal(found, expected)
    assert (found.sum(-1) == 4).all()


def test_tiles_choose_differently_from_one_another() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    x[:128, :16] *= 100
    x[128:, 240:] *= 100
    q = quantizers.quantize(x, granularity="token")
    keep = BlockSelector(TILE, 256, 0).row_mask(x, q.outer, torch.tensor([256], dtype=torch.int32))
    assert keep[0, 0] and keep[255, 15] and not torch.equal(keep[0], keep[255])
