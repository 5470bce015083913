"""Problems, splits, scores, the imperfect demonstrator and the character tokenizer."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from quads.compare.characters import ALPHABET, character_tokenizer
from quads.compare.config import CompareError
from quads.compare.tasks import FORGETFUL, OPTIONS, Task, demonstrate, forget

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
    a, operator, b = problem.expression.split()
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


def test_the_demonstrator_is_right_as_often_as_its_forgetfulness_says(task: Task) -> None:
    problems = list(islice(task.start(), 4000))
    rng = random.Random(0)
    right = sum(task.solved(demonstrate(problem, rng), problem) for problem in problems) / len(problems)
    carefree = sum(task.solved(demonstrate(problem, _Always(0.0)), problem) for problem in problems) / len(problems)
    assert 0.4 < carefree < 0.55  # problems without any carry
    # Binomial, n = 4000: 4 standard deviations are 0.032.
    assert right == pytest.approx(carefree + (1 - carefree) * (1 - FORGETFUL), abs=0.032)


class _Always(random.Random):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


def test_another_task_needs_a_model_and_an_unknown_one_is_refused() -> None:
    with pytest.raises(CompareError, match=r"'task' is 'leg_counting'.*give --model"):
        Task("leg_counting", short=True, held_out=8)
    with pytest.raises(CompareError, match="'task' is 'no_such_task'"):
        Task("no_such_task", short=False, held_out=8)


def test_a_task_without_enough_questions_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 questions
    monkeypatch.setitem(OPTIONS, "chain_sum", digits)
    with pytest.raises(CompareError, match="'held_out' is 201: chain_sum has only 200 questions"):
        _ = Task("chain_sum", short=True, held_out=201).held_out


def test_the_tokenizer_gives_back_every_text_of_its_alphabet() -> None:
    tokenizer = character_tokenizer()
    text = "".join(random.Random(0).choices(ALPHABET, k=200)).strip()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
