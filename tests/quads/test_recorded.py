"""Recorded rollouts: both formats read alike, and a file that breaks a rule is refused with its line."""

import json
from pathlib import Path

import pytest
import torch

from quads import recorded
from quads.attribution import default_recipe
from quads.attribution.layerwise import LayerwiseRun
from tests.quads.tiny import tiny_model, tokens

GOOD = {"prompt_ids": [1, 2, 3], "completion_ids": [4, 5], "logprobs": [-0.5, -1.25], "reward": 1.0}


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_batch_counts_completion_tokens_where_they_stand(tmp_path: Path) -> None:
    other = {"prompt_ids": [7], "completion_ids": [8], "logprobs": [-2.0]}
    batch = recorded.to_batch(recorded.read(write(tmp_path / "r.jsonl", GOOD, "", other)))
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5], [7, 8, 0, 0, 0]]
    assert batch.counted.tolist() == [[False, False, True, True], [True, False, False, False]]
    assert batch.recorded[batch.counted].tolist() == [-0.5, -1.25, -2.0]


def test_parquet_reads_as_jsonl_does(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist([GOOD, GOOD]), tmp_path / "r.parquet")
    rows = recorded.read(tmp_path / "r.parquet")
    assert [row.line for row in rows] == [1, 2]
    assert rows[0] == recorded.read(write(tmp_path / "r.jsonl", GOOD))[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**GOOD, "logprobs": [-0.5]}, "2 completion tokens but 1 log-probs"),
        ({**GOOD, "logprobs": [-0.5, -1, -2]}, "2 completion tokens but 3 log-probs"),
        ({**GOOD, "logprobs": [-0.5, 0.25]}, r"logprobs\[1\] is 0.25"),
        ({**GOOD, "logprobs": [float("nan"), -1]}, r"logprobs\[0\] is nan"),
        ({**GOOD, "logprobs": [None, -1]}, r"logprobs\[0\] is None"),
        ({**GOOD, "completion_ids": [4, "a"]}, "completion_ids must be token ids"),
        ({**GOOD, "prompt_ids": []}, "prompt_ids must be token ids .integers., at least one"),
        ({"tokens": [1]}, "has no list 'prompt_ids'"),
        ([1, 2], "is not an object"),
        ('{"prompt_ids": [1,', "is not JSON"),
    ],
)
def test_the_line_and_the_rule_are_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"bad.jsonl:2.*{message}") as error:
        recorded.read(write(tmp_path / "bad.jsonl", GOOD, row))
    assert "\n" not in str(error.value)


def test_a_file_of_another_kind_or_absent_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither \.jsonl nor \.parquet"):
        recorded.read(tmp_path / "r.csv")
    with pytest.raises(ValueError, match="do not exist"):
        recorded.read(tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match="holds no rollout"):
        recorded.read(write(tmp_path / "r.jsonl"))
    (tmp_path / "r.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match="is not a parquet file"):
        recorded.read(tmp_path / "r.parquet")


def test_a_limit_takes_whole_rollouts_from_the_front(tmp_path: Path) -> None:
    rows = recorded.read(write(tmp_path / "r.jsonl", GOOD, GOOD, GOOD))
    assert len(recorded.limit(rows, 10)) == 2 and len(recorded.limit(rows, 1)) == 1


def test_log_probabilities_shifted_by_one_token_are_refused_and_noise_is_not() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight *= 20  # log-probabilities that differ from token to token, as a trained model's do
    ids = tokens(2, 24)
    real = torch.ones_like(ids, dtype=torch.bool)
    own = LayerwiseRun(model, [], default_recipe(model), []).reference(ids, real)
    prompts, completions = ids[:, :4].tolist(), ids[:, 4:].tolist()

    def check(values: torch.Tensor) -> None:
        logprobs = values.tolist()
        rows = [
            recorded.Rollout(p, c, v, i + 1)
            for i, (p, c, v) in enumerate(zip(prompts, completions, logprobs, strict=True))
        ]
        recorded.check_alignment(rows, recorded.to_batch(rows), own)

    noise = torch.randn(2, 20, generator=torch.Generator().manual_seed(0)) * 0.3
    check(own[:, 3:] + noise)
    shifted = own[:, 3:].clone()
    shifted[1] = torch.cat([own[1, 4:], own[1, 4:5]])
    with pytest.raises(ValueError, match="line 2: log-probabilities do not belong to its tokens"):
        check(shifted)
