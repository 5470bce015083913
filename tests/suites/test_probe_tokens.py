"""The tokens of a probe are sampled once, belong to one checkpoint and overlap in no draw."""

from pathlib import Path

import pytest
import torch

from quads.suites import probe_policies, probe_tokens
from quads.suites.config import Probe
from quads.suites.probe_policies import Checkpoint
from tests.suites.probing import suite

CPU = torch.device("cpu")
PROBE = Probe(arms=(), sequences=6, draws=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return probe_policies.load(suite(), tmp_path_factory.mktemp("out"), "start")


def prompts(batch) -> list[tuple[int, ...]]:
    lengths = batch.counted.int().argmax(1) + 1
    return [tuple(row[:length].tolist()) for row, length in zip(batch.tokens, lengths, strict=True)]


def test_each_draw_and_the_calibration_have_problems_of_their_own(checkpoint: Checkpoint, tmp_path: Path) -> None:
    batches = probe_tokens.fixed_tokens(checkpoint, PROBE, tmp_path / "t.safetensors", CPU)
    seen = [prompt for batch in batches for prompt in prompts(batch)]
    assert len(batches) == 3 and len(seen) == len(set(seen)) == 18


def test_only_completions_count_up_to_their_end(checkpoint: Checkpoint, tmp_path: Path) -> None:
    batch = probe_tokens.fixed_tokens(checkpoint, PROBE, tmp_path / "t.safetensors", CPU)[0]
    tokenizer = checkpoint.policy.tokenizer
    for row, counted, real in zip(batch.tokens, batch.counted, batch.real, strict=True):
        text = tokenizer.decode(row[1:][counted], skip_special_tokens=True)
        assert text.lstrip("-").isdigit() and tokenizer.decode(row[:-1][counted][:1]) == "="
        assert int(real.sum()) == int(counted.nonzero().max()) + 2


def test_the_file_is_what_is_scored(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    first = probe_tokens.fixed_tokens(checkpoint, PROBE, path, CPU)
    written = path.read_bytes()
    again = probe_tokens.fixed_tokens(checkpoint, PROBE, path, CPU)
    assert path.read_bytes() == written
    assert all(
        torch.equal(a.tokens, b.tokens) and torch.equal(a.real, b.real) for a, b in zip(first, again, strict=True)
    )


def test_another_checkpoint_samples_its_own_tokens(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    probe_tokens.fixed_tokens(checkpoint, PROBE, path, CPU)
    before = path.read_bytes()
    other = Checkpoint(checkpoint.name, checkpoint.policy, checkpoint.config, "another")
    probe_tokens.fixed_tokens(other, PROBE, path, CPU)
    assert path.read_bytes() != before


def test_the_digest_is_of_the_tokens_themselves(checkpoint: Checkpoint, tmp_path: Path) -> None:
    batches = probe_tokens.fixed_tokens(checkpoint, PROBE, tmp_path / "t.safetensors", CPU)
    before = probe_tokens.content(batches)
    batches[1].tokens[0, -1] += 1
    assert probe_tokens.content(batches) != before
