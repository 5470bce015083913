"""What a suite is: hypotheses, arms, variants and a probe out of one TOML, frozen and checked before anything runs.

A suite is a folder of `suites/` (or any folder) with a `suite.toml` and a README. Its outcome runs are comparisons of
`quads.compare`: every [[variant]] and every correction makes one cell, a comparison of all arms and seeds in a
folder of its own. Its probe measures the teacher-forced gap on fixed policies and fixed tokens.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from quads import recipes
from quads.compare.config import CompareConfig, CompareError, digest
from quads.recipes import RecipeError

VERDICTS = ("supported", "refuted", "undecided")
DIRECTIONS = ("lower", "higher", "equal")
CONTROLS = ("engine", "w16a4")  # arms of every probe that are no recipes: see quads.suites.probe
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "tis": {"tis": 2.0},
    "r3": {"r3": True},
    "tis+r3": {"tis": 2.0, "r3": True},
}
_OF_A_RUN = ("out", "arms", "seeds", "fresh")  # CompareConfig fields that the suite decides, not its settings

T = TypeVar("T")


class SuiteError(ValueError):
    """A suite that cannot be; the message names the file, the key and the rule."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One setting in which all arms run: CompareConfig fields laid over the suite's [settings].

    expect: what the suite's author expects to see (free text, printed beside the result).
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    expect: str = ""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Teacher-forced gap on fixed policies and fixed tokens, the primary metric.

    arms: recipes measured against each of `references`: "bf16" (the policy as trained) and "w4" (the policy under
        Q(W), what a QAT trainer computes); "trainer" is whatever the arm's own trainer computes.
    sequences: prompts with one completion each, sampled once from the policy in BF16; draws: independent sets of
        them, and of the random control. outliers: stress variants "CHANNELSxSCALE" ("" is the plain policy);
    policies: "start", or the name of a variant, whose trained BF16 arm is then the checkpoint.
    scoring: "prefill" (one forward over all tokens) or "decode" (token by token, as a rollout does).
    layers: also attribute the start policy layer by layer, at four forwards a layer and outlier variant.
    """

    arms: tuple[str, ...]
    references: tuple[str, ...] = ("bf16", "w4")
    sequences: int = 256
    draws: int = 3
    outliers: tuple[str, ...] = ("",)
    policies: tuple[str, ...] = ("start",)
    scoring: str = "prefill"
    layers: bool = True


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A claim that the suite can support, refute or leave undecided.

    metric: a name of `quads.suites.metrics`; arm, against: recipes whose paired difference arm - against decides;
        against "a + b" is the mean of both (is `arm` nearer to one of them?).
    where: the cell of an outcome metric, or "POLICY[/OUTLIERS]/REFERENCE" of a probe metric; "a : b" takes arm
        from a and against from b.
    direction: lower and higher want the whole interval beyond `margin`, equal wants it inside +-margin.
    source: who claims it ("abstract", "third parties", "here").
    """

    id: str
    claim: str
    metric: str
    arm: str
    against: str
    where: str
    direction: str
    margin: float = 0.0
    source: str = "here"

    @property
    def rivals(self) -> tuple[str, ...]:
        """The arms that `against` names."""
        return tuple(part.strip() for part in self.against.split("+"))

    @property
    def places(self) -> tuple[str, str]:
        """Where `arm` and where `against` are measured."""
        first, _, second = (part.strip() for part in self.where.partition(":"))
        return first, second or first


@dataclass(frozen=True)
class Cell:
    """One comparison of a suite: its folder name and what `quads.compare` runs."""

    name: str
    variant: str
    correction: str
    compare: CompareConfig


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One suite as written; `settings` are CompareConfig fields that every cell shares."""

    name: str
    title: str
    question: str
    arms: tuple[str, ...] = ()
    seeds: int = 8
    settings: dict[str, Any] = field(default_factory=dict)
    variants: tuple[Variant, ...] = (Variant(name="plain"),)
    corrections: tuple[str, ...] = ("none",)
    probe: Probe | None = None
    hypotheses: tuple[Hypothesis, ...] = ()
    budget_minutes: float = 0.0

    def cells(self, out: Path) -> list[Cell]:
        """Every comparison of the suite, under `out`; none for a suite that only probes."""
        if not self.arms:
            return []
        return [self._cell(out, v, c) for v, c in itertools.product(self.variants, self.corrections)]

    def _cell(self, out: Path, variant: Variant, correction: str) -> Cell:
        name = variant.name if correction == "none" else f"{variant.name}+{correction}"
        given = {**self.settings, **variant.settings, **CORRECTIONS[correction]}
        compare = CompareConfig(out=out / name, arms=self.arms, seeds=tuple(range(self.seeds)), **given)
        return Cell(name, variant.name, correction, compare)

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON holds it."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def identity(self) -> str:
        """Hash of all that decides the suite's records: not its texts, hypotheses or budget.

        Fields of the probe that have their default are left out, so that a new field leaves old results comparable.
        """
        document = self.to_dict()
        decides = {key: document[key] for key in ("arms", "seeds", "settings", "corrections")}
        variants = [{"name": variant.name, "settings": variant.settings} for variant in self.variants]
        return digest({**decides, "variants": variants, "probe": _given(self.probe) if self.probe else None})


def _given(probe: Probe) -> dict[str, Any]:
    """Fields of a probe that differ from their defaults."""
    fields = [(field.default, field.name) for field in dataclasses.fields(probe)]
    return {name: getattr(probe, name) for default, name in fields if getattr(probe, name) != default}


def shipped() -> list[str]:
    """Names of the suites that come with the package."""
    folder = Path(str(resources.files("quads").joinpath("suites")))
    return sorted(path.parent.name for path in folder.glob("*/suite.toml"))


def load(source: str, changes: dict[str, Any] | None = None) -> Suite:
    """A shipped suite by name, or the suite in a folder; `changes` are dotted keys laid over the TOML (`--set`)."""
    folder = Path(str(resources.files("quads").joinpath("suites", source)))
    if source not in shipped():
        folder = Path(source)
    path = folder / "suite.toml"
    if not path.is_file():
        near = difflib.get_close_matches(source, shipped(), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise SuiteError(f"no suite '{source}'{hint} (shipped: {', '.join(shipped())}; or a folder with a suite.toml)")
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path} is not TOML: {error}") from None
    for key, value in (changes or {}).items():
        _lay_over(document, key.split("."), value)
    return _suite(path, {"name": folder.name, **document})


def _lay_over(document: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        document = document.setdefault(key, {})
    document[keys[-1]] = value


def _suite(path: Path, document: dict[str, Any]) -> Suite:
    parts = dict(document)
    variants = [_variant(path, dict(entry)) for entry in parts.pop("variant", [{"name": "plain"}])]
    probe = parts.pop("probe", None)
    hypotheses = [_record(path, "hypothesis", Hypothesis, entry) for entry in parts.pop("hypothesis", [])]
    suite = _record(path, "suite", Suite, {**parts, "variants": variants, "hypotheses": hypotheses})
    if probe is not None:
        suite = dataclasses.replace(suite, probe=_record(path, "probe", Probe, probe))
    _check(path, suite)
    return suite


def _variant(path: Path, entry: dict[str, Any]) -> Variant:
    fixed: dict[str, Any] = {key: entry.pop(key) for key in ("name", "expect") if key in entry}
    return _record(path, "variant", Variant, {**fixed, "settings": entry})


def _record(path: Path, where: str, kind: type[T], entry: dict[str, Any]) -> T:
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in entry:
        if key not in known:
            raise SuiteError(f"{path}: {where} has no key '{key}'{_nearest(key, known)}")
    try:
        return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()})
    except TypeError as error:
        missing = str(error).partition("argument")[2].lstrip("s: ")
        raise SuiteError(f"{path}: {where} lacks {missing}") from None


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else f" (keys: {', '.join(known)})"


def _check(path: Path, suite: Suite) -> None:
    """SuiteError for an unknown arm, setting, correction or place of a hypothesis, before anything runs."""
    settings = [f.name for f in dataclasses.fields(CompareConfig) if f.name not in _OF_A_RUN]
    for where, given in [("settings", suite.settings), *((f"variant {v.name}", v.settings) for v in suite.variants)]:
        for key in given:
            if key not in settings:
                raise SuiteError(f"{path}: {where} has no key '{key}'{_nearest(key, settings)}")
    for name in suite.corrections:
        if name not in CORRECTIONS:
            raise SuiteError(f"{path}: correction '{name}' is unknown (known: {', '.join(CORRECTIONS)})")
    names = [variant.name for variant in suite.variants]
    if len(set(names)) < len(names):
        raise SuiteError(f"{path}: two variants share a name ({', '.join(names)})")
    try:
        for arm in (*suite.arms, *(suite.probe.arms if suite.probe else ())):
            recipes.load(arm)
        cells = {cell.name for cell in suite.cells(Path("."))}
    except (RecipeError, CompareError) as error:
        raise SuiteError(f"{path}: {error}") from None
    for hypothesis in suite.hypotheses:
        _check_hypothesis(path, hypothesis, suite, cells)


def _check_hypothesis(path: Path, hypothesis: Hypothesis, suite: Suite, cells: set[str]) -> None:
    where = f"{path}: hypothesis {hypothesis.id}"
    if hypothesis.direction not in DIRECTIONS:
        raise SuiteError(f"{where}: direction '{hypothesis.direction}' is not one of {', '.join(DIRECTIONS)}")
    if hypothesis.direction == "equal" and not hypothesis.margin > 0:
        raise SuiteError(f"{where}: direction 'equal' needs a margin above 0")
    probed = hypothesis.metric.startswith("probe/")
    probe = suite.probe if probed else None
    arms = (*CONTROLS, *probe.arms) if probe else () if probed else suite.arms
    for arm in (hypothesis.arm, *hypothesis.rivals):
        if arm not in arms:
            raise SuiteError(f"{where} names arm '{arm}', which the suite does not run{_nearest(arm, list(arms))}")
    known = _places(probe) if probe else sorted(cells)
    for place in hypothesis.places:
        if place not in known:
            raise SuiteError(f"{where} names {'place' if probed else 'cell'} '{place}'{_nearest(place, known)}")


def _places(probe: Probe) -> list[str]:
    product = itertools.product(probe.policies, probe.outliers, probe.references)
    return ["/".join(part for part in parts if part) for parts in product]
