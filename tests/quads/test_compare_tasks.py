"""Problems, splits, scores, the imperfect demonstrator and the character tokenizer."""

from __future__ import annotations

import dataclasses
import json
import random
from itertools import islice
from pathlib import Path

import pytest

from quads.compare.characters import ALPHABET, character_tokenizer
from quads.compare.config import CompareError
from quads.compare.families import FAMILIES, FORGETFUL, forget, forget_product
from quads.compare.tasks import Task

pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def task() -> Task:
    return Task("chain_sum", short=True, held_out=512)


def test_held_out_questions_are_different_and_appear_in_no_other_split(task: Task) -> None:
    held_out = {problem.prompt for problem in task.held_out}
    assert len(held_out) == 512
    for stream in (task.start(), task.train(0), task.train(999)):
        assert not held_out & {problem.prompt for problem in islice(stream, 5000)}


def test_seeds_ask_other_problems_and_one_seed_the_same(task: Task) -> None:
    first, again, other = ([p.prompt for p in islice(task.train(seed), 50)] for seed in (0, 0, 1))
    assert first == again
    assert len(set(first) & set(other)) < 5


def test_the_prompt_is_the_bare_expression_and_the_scorer_is_reasoning_gyms(task: Task) -> None:
    problem = task.held_out[0]
    a, operator, b = problem.entry["metadata"]["expression"].split()
    answer = int(a) + int(b) if operator == "+" else int(a) - int(b)
    assert problem.prompt == f"{a}{operator}{b}="
    assert task.score(f" {answer} ", problem) == 1.0
    assert task.solved(str(answer), problem)
    assert not task.solved(str(answer + 1), problem)
    assert task.score("", problem) == 0.0
    assert 0 < task.score(f"it is {answer}", problem) < 1.0  # reasoning-gym's partial credit


@pytest.mark.parametrize(
    ("a", "b", "without_carries"),
    [(57, 87, 34), (42, -25, 27), (25, -42, -27), (12, 34, 46), (99, 1, 90), (70, -70, 0), (-15, -15, -20)],
)
def test_forgetting_carries_and_borrows_as_worked_by_hand(a: int, b: int, without_carries: int) -> None:
    assert forget(a, b) == without_carries


@pytest.mark.parametrize(
    ("a", "b", "without_carries"),
    [(57, 68, 3876), (15, 43, 645), (99, 99, 8701), (12, 3, 36)],  # 456 + 3420 carries nothing, 891 + 8910 does
)
def test_forgetting_carries_between_partial_products_as_worked_by_hand(a: int, b: int, without_carries: int) -> None:
    assert forget_product(a, b) == without_carries


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_prompt_of_its_alphabet_and_a_demonstrator_that_errs_in_a_middling_share(name: str) -> None:
    task = Task(name, short=True, held_out=64)
    problems = list(islice(task.start(), 1000))
    family = FAMILIES[name]
    assert {c for p in problems for c in p.prompt + family.err(p.entry)} <= set(ALPHABET)
    erring = sum(task.solved(family.err(p.entry), p) for p in problems) / len(problems)
    assert 0.15 < erring < 0.55
    rng = random.Random(0)
    right = sum(task.solved(family.demonstrate(p.entry, rng), p) for p in problems) / len(problems)
    # Binomial, n = 1000: 4 standard deviations are 0.064.
    assert right == pytest.approx(erring + (1 - erring) * (1 - FORGETFUL), abs=0.064)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_questions_enough_to_hold_4096_out(name: str) -> None:
    task = Task(name, short=True, held_out=4096)
    held_out = {problem.prompt for problem in task.held_out}
    assert len(held_out) == 4096
    assert not held_out & {problem.prompt for problem in islice(task.train(0), 1000)}


def test_an_exported_file_gives_the_very_same_problems(tmp_path: Path) -> None:
    made = Task("gcd", short=True, held_out=32)
    assert made.export(tmp_path / "p.jsonl", (0, 3), 50) == 132
    loaded = Task("gcd", short=True, held_out=32, problems=str(tmp_path / "p.jsonl"))
    for mine, theirs in ((loaded.held_out, made.held_out), (list(loaded.train(3)), list(islice(made.train(3), 50)))):
        assert [(p.prompt, p.entry["answer"]) for p in mine] == [(p.prompt, p.entry["answer"]) for p in theirs]
    assert loaded.solved(str(made.held_out[0].entry["answer"]), loaded.held_out[0])
    with pytest.raises(CompareError, match=r"p\.jsonl has no train problems of seed 1"):
        next(loaded.train(1))


def test_a_file_that_trains_on_a_held_out_problem_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    task = Task("gcd", short=True, held_out=4)
    task.export(path, (0,), 5)
    lines = path.read_text().splitlines()
    leaked = json.loads(lines[2]) | {"split": "train", "seed": 0}
    path.write_text("\n".join([*lines, json.dumps(leaked)]) + "\n")
    with pytest.raises(CompareError, match=r"leaks held-out problems: line 10 trains on '.*' \(1 in all\)"):
        Task("gcd", short=True, held_out=4, problems=str(path))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "line 1 is no problem"),
        (
            '{"schema": 1, "task": "lcm", "split": "train", "seed": 0, "prompt": "1=", "entry": {}}',
            "not schema 1 of task",
        ),
        (
            '{"schema": 1, "task": "gcd", "split": "test", "seed": 0, "prompt": "1=", "entry": {}}',
            "not schema 1 of task",
        ),
    ],
)
def test_a_broken_problem_file_is_one_line_that_names_the_line(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "p.jsonl").write_text(line + "\n")
    with pytest.raises(CompareError, match=says) as caught:
        Task("gcd", short=True, held_out=4, problems=str(tmp_path / "p.jsonl"))
    assert "p.jsonl" in str(caught.value) and "\n" not in str(caught.value)


def test_another_task_needs_a_model_and_an_unknown_one_is_refused() -> None:
    with pytest.raises(CompareError, match=r"'task' is 'leg_counting'.*give --model"):
        Task("leg_counting", short=True, held_out=8)
    with pytest.raises(CompareError, match="'task' is 'no_such_task'"):
        Task("no_such_task", short=False, held_out=8)


def test_a_task_without_enough_questions_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 questions
    monkeypatch.setitem(FAMILIES, "chain_sum", dataclasses.replace(FAMILIES["chain_sum"], options=digits))
    with pytest.raises(CompareError, match="'held_out' is 201: chain_sum has only 200 questions"):
        _ = Task("chain_sum", short=True, held_out=201).held_out


def test_the_tokenizer_gives_back_every_text_of_its_alphabet() -> None:
    tokenizer = character_tokenizer()
    text = "".join(random.Random(0).choices(ALPHABET, k=200)).strip()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
