"""How many planted faults Gaussian tests find, beside the harness: python -m tests.quads.conformance_power

For each mutant of the fault tests: does one Gaussian bfloat16 matrix [256, 256] (seed 0, per-tensor scale) show any
byte that differs from the correct kernel? And 64 of them?
"""

from __future__ import annotations

import torch

from tests.quads.conformance_kernels import Kernel
from tests.quads.test_conformance_quantizer_faults import FIELDS, MUTANTS, RIGHT, SWIZZLED, SWIZZLED_PLACES


def seen(mutant: Kernel, matrices: int) -> bool:
    """Whether any byte differs on Gaussian matrices."""
    correct = SWIZZLED if mutant.place in SWIZZLED_PLACES else RIGHT
    generator = torch.Generator().manual_seed(0)
    for _ in range(matrices):
        x = torch.randn(256, 256, generator=generator).bfloat16()
        outer = x.abs().amax().float() / torch.tensor(2688.0)
        pairs = zip(mutant(x, outer), correct(x, outer), strict=True)
        if any(not torch.equal(a.reshape(-1), b.reshape(-1)) for a, b in pairs):
            return True
    return False


def main() -> None:
    mutants = MUTANTS | FIELDS
    missed = [name for name, mutant in mutants.items() if not seen(mutant, 1)]
    still = [name for name in missed if not seen(mutants[name], 64)]
    print(f"{len(mutants)} faults; one Gaussian matrix misses {len(missed)}: {', '.join(missed)}")
    print(f"64 Gaussian matrices (4,194,304 elements) miss {len(still)}: {', '.join(still)}")


if __name__ == "__main__":
    main()
