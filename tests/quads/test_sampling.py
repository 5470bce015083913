"""The batched sampler: its log-probabilities, its randomness, its end."""

from __future__ import annotations

import torch
from torch import Tensor

from quads.gap import token_logps
from quads.sampling import Completions, left_pad, sample
from tests.quads.tiny import tiny_model

# A cached decode and one full pass add the same FP32 numbers in another order: a few units in the last place of
# logits below 8 (2^-21 each), so 2^-16 leaves a factor of 32.
ORDER = 2.0**-16
PROMPTS = [[5, 9, 11], [7], [20, 21, 22, 23, 24]]
END = tuple(range(2, 24))  # a third of the random model's tokens end a completion: rows end at different places


def _sample(
    seed: int = 0, *, prompts: list[list[int]] = PROMPTS, temperature: float = 1.0, **changes: int
) -> Completions:
    generator = torch.Generator().manual_seed(seed)
    options = {"samples": 4, "max_new_tokens": 6, **changes}
    return sample(tiny_model(), prompts, eos=END, pad=0, temperature=temperature, generator=generator, **options)


def _full_pass(prompt: list[int], completion: list[int], temperature: float) -> Tensor:
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        return token_logps(tiny_model()(input_ids=ids).logits, ids, temperature)[0, len(prompt) - 1 :]


def test_log_probabilities_are_those_of_a_full_pass_over_each_row_alone() -> None:
    for temperature in (1.0, 0.5):
        result = _sample(temperature=temperature)
        for row, (tokens, logps) in enumerate(zip(result.tokens, result.logps, strict=True)):
            expected = _full_pass(PROMPTS[row // 4], tokens, temperature)
            assert (torch.tensor(logps) - expected).abs().max() < ORDER


def test_a_row_ends_with_its_first_end_token_or_at_the_limit() -> None:
    rows = _sample(samples=32).tokens
    assert len({len(row) for row in rows}) > 2
    for row in rows:
        assert not any(token in END for token in row[:-1])
        assert row[-1] in END or len(row) == 6


def test_greedy_decoding_agrees_with_transformers_generate() -> None:
    ids, mask = left_pad(PROMPTS, 0, torch.device("cpu"))
    options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": list(END), "pad_token_id": 0}
    expected = tiny_model().generate(input_ids=ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    greedy = _sample(samples=1, temperature=0.0).tokens
    assert [row + [0] * (expected.shape[1] - len(row)) for row in greedy] == expected.tolist()


def test_the_same_generator_state_gives_the_same_samples_and_another_does_not() -> None:
    assert _sample(3).tokens == _sample(3).tokens
    assert _sample(3).tokens != _sample(4).tokens


def test_the_noise_of_a_sample_does_not_depend_on_when_others_finish() -> None:
    changed, lengths = [[40, 41], *PROMPTS[1:]], set()
    for seed in range(10):
        one, other = _sample(seed), _sample(seed, prompts=changed)
        lengths.add(tuple(map(len, one.tokens[:4])) == tuple(map(len, other.tokens[:4])))
        assert one.tokens[4:] == other.tokens[4:]
    assert False in lengths  # the changed rows did finish at other places


def test_samples_follow_the_softmax() -> None:
    count = 4000
    first = torch.tensor(_sample(prompts=[[5]], samples=count, max_new_tokens=1).tokens)[:, 0]
    with torch.no_grad():
        expected = tiny_model()(input_ids=torch.tensor([[5]])).logits[0, -1].double().softmax(-1)
    observed = torch.bincount(first, minlength=64).double() / count
    # 5 standard deviations of a binomial share; 64 tokens.
    assert ((observed - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_prompts_are_padded_left() -> None:
    ids, mask = left_pad([[1, 2], [3]], 9, torch.device("cpu"))
    assert ids.tolist() == [[1, 2], [9, 3]]
    assert mask.tolist() == [[1, 1], [0, 1]]
