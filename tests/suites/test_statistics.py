"""Intervals cover what they say at two to eight seeds, and the detectable difference is the one that is detected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap

from quads.suites import statistics
from quads.suites.statistics import Interval, UnpairedError, difference, interval, minimum_detectable, paired

TRIALS = 400  # a coverage of 0.95 is then seen as 0.95 +- 0.022 (two standard errors)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer resamples: noisier ends, the same coverage."""
    monkeypatch.setattr(statistics, "RESAMPLES", 400)


def covered(values: list[np.ndarray], truth: float = 0.0, *, binary: bool = False) -> float:
    found = [interval(v, binary=binary) for v in values]
    return float(np.mean([f.low <= truth <= f.high for f in found]))


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("seeds", [2, 3, 5, 8])
def test_intervals_of_few_seeds_cover_as_often_as_they_say(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    assert 0.92 <= covered([rng.normal(size=(seeds, 1)) for _ in range(TRIALS)]) <= 0.985


def test_a_plain_bootstrap_of_three_seeds_would_not() -> None:
    rng = np.random.default_rng(0)
    hits = []
    for _ in range(200):
        result = bootstrap((rng.normal(size=3),), np.mean, method="percentile", n_resamples=500, rng=rng)
        hits.append(result.confidence_interval.low <= 0 <= result.confidence_interval.high)
    assert np.mean(hits) < 0.85


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(("of_seeds", "of_problems"), [(0.1, 0.0), (0.0, 0.4), (0.03, 0.4)])
def test_intervals_over_seeds_and_shared_problems_cover_both(of_seeds: float, of_problems: float) -> None:
    rng = np.random.default_rng(1)

    def sample() -> np.ndarray:
        seeds, problems = of_seeds * rng.normal(size=(3, 1)), of_problems * rng.normal(size=(1, 50))
        return seeds + problems + 0.2 * rng.normal(size=(3, 50))

    assert covered([sample() for _ in range(TRIALS)]) >= 0.92


@pytest.mark.usefixtures("fast")
def test_an_interval_over_problems_alone_would_miss_the_seeds() -> None:
    rng = np.random.default_rng(2)
    samples = [0.1 * rng.normal(size=(3, 1)) + 0.2 * rng.normal(size=(3, 50)) for _ in range(100)]
    assert covered([s.mean(axis=0, keepdims=True) for s in samples]) < 0.6


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_the_detectable_difference_is_found_with_the_stated_power(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    shift = minimum_detectable(1 / np.sqrt(seeds), seeds - 1)
    found = [interval(rng.normal(shift, 1, size=(seeds, 1))).low > 0 for _ in range(TRIALS)]
    assert np.mean(found) == pytest.approx(0.8, abs=0.07)
    half = [interval(rng.normal(shift / 2, 1, size=(seeds, 1))).low > 0 for _ in range(TRIALS)]
    assert np.mean(half) < 0.5


def test_more_seeds_detect_smaller_differences() -> None:
    detectable = [minimum_detectable(1 / np.sqrt(n), n - 1) for n in (2, 3, 5, 8, 16)]
    assert detectable == sorted(detectable, reverse=True) and detectable[-1] < 0.1 * detectable[0]


@pytest.mark.parametrize(("up", "down"), [(0.5, 0.5), (0.9, 0.1), (0.95, 0.6)])
def test_intervals_of_yes_or_no_cover_at_eight_seeds(up: float, down: float) -> None:
    rng = np.random.default_rng(3)
    draws = [(rng.random((8, 1)) < up).astype(float) - (rng.random((8, 1)) < down) for _ in range(TRIALS)]
    assert covered(draws, up - down, binary=True) >= 0.92


def test_two_seeds_that_both_collapse_do_not_settle_it_but_eight_do() -> None:
    assert interval(np.ones((2, 1)), binary=True).low < 0
    assert interval(np.ones((8, 1)), binary=True).low > 0.3


def test_pairing_takes_out_what_the_arms_share() -> None:
    rng = np.random.default_rng(4)
    luck = rng.normal(size=8)
    arm, against = ({seed: luck[seed] + shift + 0.01 * rng.normal(size=1) for seed in range(8)} for shift in (0.1, 0.0))
    found = difference(arm, against)
    assert 0.08 < found.low < found.high < 0.12 and found.pairs == 8
    assert interval(statistics.matrix(arm)).high - interval(statistics.matrix(arm)).low > 0.5


def test_arms_that_do_the_same_differ_by_nothing() -> None:
    sample = {seed: np.arange(10.0) for seed in range(3)}
    assert difference(sample, sample) == Interval(value=0.0, low=0.0, high=0.0, se=0.0, df=29, pairs=3)


def test_only_common_seeds_are_paired() -> None:
    arm = {0: np.zeros(2), 1: np.ones(2), 2: np.ones(2)}
    assert paired(arm, {1: np.zeros(2), 2: np.zeros(2), 3: np.ones(2)}).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("against", "says"),
    [({5: np.zeros(2)}, "none in common"), ({0: np.zeros(3)}, "group 0 has 2 and 3 values")],
)
def test_what_is_not_paired_is_refused(against: dict[int, np.ndarray], says: str) -> None:
    with pytest.raises(UnpairedError, match=says):
        difference({0: np.zeros(2)}, against)


def test_groups_of_other_units_are_refused() -> None:
    with pytest.raises(UnpairedError, match="not of the same units"):
        statistics.matrix({0: np.zeros(2), 1: np.zeros(3)})


def test_one_value_has_no_interval() -> None:
    found = interval(np.array([[0.3]]))
    assert found.value == 0.3 and np.isnan([found.low, found.high, found.mde]).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1.0, 0.1, 1e6])
def test_cells_that_differ_around_equal_means_have_no_interval(size: float) -> None:
    found = interval(size * np.array([[1.0, -1.0], [-1.0, 1.0]]))
    assert (found.value, found.pairs) == (0.0, 2) and np.isnan([found.low, found.high, found.mde]).all()


def test_a_value_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 values are not finite"):
        interval(np.array([[0.0, np.nan]]))


def test_thousands_of_problems_in_buckets_give_the_interval_of_all() -> None:
    values = np.random.default_rng(5).normal(size=(4, 4096))
    bucketed, whole = interval(values), interval(values[:, :4093])  # 4,093 is prime: no buckets
    assert bucketed.value == pytest.approx(values.mean())
    assert bucketed.se == pytest.approx(whole.se, rel=0.1)


samples = st.lists(st.floats(-1, 1), min_size=2, max_size=8).map(lambda v: np.array(v)[:, None])


@settings(max_examples=50)
@given(samples, st.floats(-10, 10))
def test_an_interval_holds_its_mean_and_moves_with_the_values(values: np.ndarray, shift: float) -> None:
    found, moved = interval(values), interval(values + shift)
    assert found.low <= found.value + 1e-12 and found.value - 1e-12 <= found.high
    assert [moved.low, moved.high] == pytest.approx([found.low + shift, found.high + shift], abs=1e-6)


@settings(max_examples=50)
@given(samples)
def test_exchanging_the_arms_mirrors_the_interval(values: np.ndarray) -> None:
    found, mirrored = interval(values), interval(-values)
    assert [mirrored.low, mirrored.high] == pytest.approx([-found.high, -found.low], abs=1e-9)
