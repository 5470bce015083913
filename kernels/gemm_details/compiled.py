"""The Triton product as cross-compile jobs: what CI checks and quads.bench models."""

from __future__ import annotations

from dataclasses import dataclass

from quads.kernels.crosscompile import Job
from quads.kernels.gemm_details import native

KERNEL = "quads.kernels.gemm_details.native_jit:scaled_product"
FAMILY = {"sm_100a": "sm_100", "sm_103a": "sm_100", "sm_120a": "sm_120", "sm_121a": "sm_120"}
K = 8192
SIGNATURE = {
    "x_codes": "*u8", "x_scales": "*u8", "x_outer": "*fp32", "w_codes": "*u8", "w_scales": "*u8", "w_outer": "*fp32",
    "blocks": "*i32", "out": "*bf16", "slots": "*i32", "groups": "*i32",
    **dict.fromkeys(("rows", "n", "k_blocks", "extra", "token_blocks", "experts", "slot_share"), "i32"),
}  # fmt: skip
ALIGNED = (*(name for name, kind in SIGNATURE.items() if kind.startswith("*")), "n", "k_blocks")


@dataclass(frozen=True)
class Case:
    """One kernel that a chip must run: tokens of the call, RAC's repeated blocks, grouped or dense."""

    chip: str
    tokens: int
    extra: int = 0
    grouped: bool = False

    @property
    def tile(self) -> native.Tile:
        """The tile that the chip's family takes."""
        return native.tile_for(FAMILY[self.chip], self.tokens)

    @property
    def specialized(self) -> bool:
        """Whether warps are specialised: not where blocks are repeated."""
        return self.tile.specialize and self.extra == 0

    def job(self) -> Job:
        """The compile job, for K = 8192."""
        constants = {**self.tile.constants(), **native.steps(self.tile, K // 16, self.extra)}
        flags = {"PERSISTENT": True, "SPECIALIZE": self.specialized, "GROUPED": self.grouped, "SELECTED": False}
        return Job(
            kernel=KERNEL,
            chip=self.chip,
            signature=SIGNATURE,
            divisible=ALIGNED,
            constants={**constants, **flags, "HALVES": self.grouped, "OUTER_PER_ROW": True},
            options={"num_warps": self.tile.warps, "num_stages": self.tile.stages},
        )


CASES = [
    *(Case(chip, tokens, extra) for chip in ("sm_100a", "sm_120a") for tokens in (16, 4096) for extra in (0, 256)),
    *(Case(chip, 16, 0, grouped=True) for chip in ("sm_100a", "sm_103a", "sm_120a")),
    *(Case(chip, 16, 256, grouped=True) for chip in ("sm_100a", "sm_120a")),
    Case("sm_103a", 4096),
]
