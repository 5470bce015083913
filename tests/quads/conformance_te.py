"""Transformer Engine's Python reference out of its wheel (QUADS_TE_WHEEL), for `quads check --quantizer`."""

from __future__ import annotations

from torch import Tensor

from tests.emulation.libraries import te_reference


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = te_reference(x.contiguous())
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales.contiguous()


quantize.nvfp4_protocol = {"dtypes": ("bfloat16", "float32")}  # type: ignore[attr-defined]
