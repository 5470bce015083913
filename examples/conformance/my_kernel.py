"""A newcomer's NVFP4 quantiser with two mistakes; `quads check` names them (docs/conformance.md)."""

import torch

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantize(x: torch.Tensor, outer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K], outer = amax / 2688 -> packed codes [M, K/2] and E4M3 block scales [M, K/16]."""
    blocks = x.float().unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / torch.tensor(6.0) / outer).clamp(max=448).to(torch.float8_e4m3fn)
    step = (scales.float() * outer).unsqueeze(-1)
    y = torch.where(step > 0, blocks / step, blocks * 0)
    distance = (y.abs().unsqueeze(-1) - GRID).abs()
    magnitude = distance.argmin(-1)  # mistake: on a tie, argmin takes the smaller number, not the even code
    codes = (magnitude | (torch.signbit(y).int() << 3)).to(torch.uint8).flatten(-2)
    packed = codes[:, 0::2] << 4 | codes[:, 1::2]  # mistake: the even index belongs in the low nibble
    return packed, scales
