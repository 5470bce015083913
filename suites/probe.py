"""The suites' primary metric: the teacher-forced gap on fixed policies and fixed tokens.

    outcome = run(suite, out, budget=60)

For each policy, outlier variant and draw of tokens, every arm scores the same tokens under its rollout numerics and is
compared with its references: one record of OUT/probe.jsonl each. Two controls go with every probe: `engine`, the same
precision in another implementation (the floor under every gap), and `w16a4`, activations quantised alone. The start
policy is also attributed layer by layer: each term in one decoder layer, BF16 elsewhere, on the first draw.

Records that are there are kept, a half-written one is dropped, and records of another checkpoint, other tokens or
another recipe of the same name are measured again. On CPU two runs write equal bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from quads import recipes
from quads.attribution.batch import TokenBatch
from quads.compare.config import digest
from quads.compare.records import Record, Records
from quads.suites import probe_numerics, probe_policies, probe_tokens
from quads.suites.config import CONTROLS, Probe, Suite, SuiteError
from quads.suites.probe_measure import Tokens, arm_records, layer_record
from quads.suites.probe_numerics import REFERENCES, comparison
from quads.suites.probe_policies import START, Checkpoint, UntrainedError
from quads.suites.probe_scoring import SCORERS
from quads.suites.results import name_of

OnProgress = Callable[[int, int, str], None]  # records there, records wanted, one line

Key = tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """Records that are there and that were wanted; `failed` says in one line each which arms raised what."""

    done: int
    total: int
    failed: tuple[str, ...] = ()


def run(
    suite: Suite,
    out: Path,
    policies: Sequence[str] | None = None,
    device: str = "",
    budget: float = float("inf"),
    on_progress: OnProgress = lambda done, total, text: None,
) -> Outcome:
    """Measure what OUT/probe.jsonl lacks of the suite's probe, for at most about `budget` seconds.

    policies: default those of the suite. device: "cuda", "cpu" or "" for the GPU where there is one. A policy that is
    not trained yet and an arm that raises are reported and left out; the rest goes on. SuiteError for a probe that
    cannot be.
    """
    probe = suite.probe
    if probe is None:
        raise SuiteError(f"suite '{suite.name}' has no [probe]")
    _check(probe)
    out.mkdir(parents=True, exist_ok=True)
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    this = _Run(probe, out, chosen, time.monotonic() + budget, on_progress)
    checkpoints = this.load(suite, policies or probe.policies)
    this.claim(checkpoints)
    for checkpoint in checkpoints:
        this.measure(checkpoint)
    return Outcome(len(this.have), len(this.wanted), tuple(this.failed))


def arms(probe: Probe) -> tuple[str, ...]:
    """Every arm that a probe measures: the controls, then those of the suite."""
    return tuple(dict.fromkeys((*CONTROLS, *probe.arms)))


def recipes_of(probe: Probe) -> dict[str, tuple[str | None, ...]]:
    """Arm -> what its records may say of its recipe: the digest, "" for a control. The first is what new ones say.

    Records were once written without it, and under a recipe file's path: then only a shipped name says what it was.
    """
    found: dict[str, tuple[str | None, ...]] = {}
    for arm in arms(probe):
        recipe = "" if arm in CONTROLS else digest(recipes.load(arm).to_dict())
        if arm.endswith(".toml"):
            found |= {arm: (), name_of(arm): (recipe,)}
        else:
            found[arm] = (recipe, None)
    return found


class _Run:
    """What one call of `run` has and still wants."""

    def __init__(self, probe: Probe, out: Path, device: torch.device, deadline: float, on_progress: OnProgress) -> None:
        self.probe, self.out, self.device = probe, out, device
        self.deadline, self.on_progress = deadline, on_progress
        self.records, self.scorer = Records(out / "probe.jsonl"), SCORERS[probe.scoring]
        self.tokens: dict[str, list[TokenBatch]] = {}
        self.identities: dict[str, str] = {}
        self.recipes = recipes_of(probe)
        self.wanted: set[Key] = set()
        self.have: set[Key] = set()
        self.failed: list[str] = []

    def load(self, suite: Suite, policies: Sequence[str]) -> list[Checkpoint]:
        """The policies that are there; a line in `failed` for each that is not trained yet."""
        loaded = []
        for name in policies:
            try:
                loaded.append(probe_policies.load(suite, self.out, name))
            except UntrainedError as error:
                self.failed.append(str(error))
        return loaded

    def claim(self, checkpoints: list[Checkpoint]) -> None:
        """Say what is wanted and see what is there; records of other checkpoints, tokens or recipes are dropped."""
        for c in checkpoints:
            path = self.out / f"probe-tokens-{c.name}.safetensors"
            self.tokens[c.name] = probe_tokens.fixed_tokens(c, self.probe, path, self.device)
            decides = [c.digest, probe_tokens.content(self.tokens[c.name]), self.probe.scoring]
            self.identities[c.name] = digest([*decides, c.compute_on(self.device)])
        self.wanted = {key for c in checkpoints for key in _keys(c, self.probe)}
        there = self.records.read()
        self.have = {_key(record) for record in there if self._current(record)} & self.wanted
        other = sorted({record["label"] for record in there} - {self.label})
        if other and self.wanted - self.have:
            where = self.records.path
            raise SuiteError(f"{where} holds records {other[0]}, this is {self.label}: choose another --out")
        stale, half = self.records.keep(self._current)
        if stale or half:
            self._tell(f"dropped {stale} records of other checkpoints, tokens or recipes, {int(half)} half-written")

    def _current(self, record: Record) -> bool:
        recipe = record.get("recipe")
        identity, known = record["identity"], self.recipes.get(record.get("arm", ""), (recipe,))
        return identity == self.identities.get(record["policy"], identity) and recipe in known

    def measure(self, checkpoint: Checkpoint) -> None:
        """Every record of one policy that is not there yet."""
        on_device = [probe_tokens.on_device(batch, self.device) for batch in self.tokens[checkpoint.name]]
        *batches, calibration = on_device
        for outliers in self.probe.outliers:
            if not self._lacks(checkpoint.name, outliers):
                continue
            model = probe_policies.stressed(checkpoint.model, outliers, self.device)
            for draw, batch in enumerate(batches):
                tokens = Tokens(model, batch, calibration, self.scorer, checkpoint.compute_on(self.device), draw)
                self._measure_arms(tokens, {"policy": checkpoint.name, "outliers": outliers, "draw": draw})
                if draw == 0 and checkpoint.name == START and self.probe.layers:
                    self._measure_layers(tokens, {"policy": checkpoint.name, "outliers": outliers, "draw": draw})

    def _measure_arms(self, tokens: Tokens, where: Record) -> None:
        for arm in arms(self.probe):
            tag = {**where, "arm": name_of(arm)}
            pairs = {
                reference: pair
                for reference in self.probe.references
                if (pair := comparison(arm, reference)) and _key({**tag, "reference": reference}) not in self.have
            }
            if pairs:
                self._attempt(partial(arm_records, tokens, pairs, tag), tag)

    def _measure_layers(self, tokens: Tokens, where: Record) -> None:
        for layer in probe_numerics.layers(tokens.model):
            tag = {"kind": "layer", **where, "layer": layer}
            if _key(tag) not in self.have:
                self._attempt(partial(layer_record, tokens, layer, tag), tag)

    def _attempt(self, measured: Callable[[], Iterator[Record]], tag: Record) -> None:
        """Append the records that `measured` gives: none once the budget is spent, a line in `failed` if it raises."""
        if time.monotonic() >= self.deadline:
            return
        name = " ".join(f"{key} {value}" for key, value in tag.items() if value != "")
        try:
            for record in measured():
                extra: Record = {"identity": self.identities[tag["policy"]], "label": self.label}
                extra |= {"recipe": self.recipes[tag["arm"]][0]} if "arm" in tag else {}
                self.records.append({**record, **extra})
                self.have.add(_key(record))
        except Exception as error:  # one arm's fault must not cost a machine's whole time
            first = (str(error).splitlines() or [""])[0]
            self.failed.append(f"{name}: {type(error).__name__}: {first}")
            name = self.failed[-1]
        self._tell(name)

    @property
    def label(self) -> str:
        if self.device.type == "cuda":
            return f"measured ({torch.cuda.get_device_name(self.device)})"
        return "emulated (CPU)"

    def _lacks(self, policy: str, outliers: str) -> bool:
        missing = any(key[1:3] == (policy, outliers) for key in self.wanted - self.have)
        return missing and time.monotonic() < self.deadline

    def _tell(self, text: str) -> None:
        self.on_progress(len(self.have), len(self.wanted), text)


def _keys(checkpoint: Checkpoint, probe: Probe) -> Iterator[Key]:
    """Keys of all records of one policy."""
    for outliers in probe.outliers:
        where = {"policy": checkpoint.name, "outliers": outliers}
        for arm, reference, draw in product(arms(probe), probe.references, range(probe.draws)):
            if comparison(arm, reference):
                yield _key({**where, "arm": name_of(arm), "reference": reference, "draw": draw})
        attributed = probe.layers and checkpoint.name == START
        for layer in probe_numerics.layers(checkpoint.model) if attributed else ():
            yield _key({**where, "kind": "layer", "draw": 0, "layer": layer})


def _key(record: Record) -> Key:
    names = ("kind", "policy", "outliers", "arm", "reference", "draw", "layer")
    return tuple(str(record.get(name, "")) for name in names)


def _check(probe: Probe) -> None:
    names = [name_of(arm) for arm in arms(probe)]
    if len(set(names)) < len(names):
        raise SuiteError(f"probe arms name one recipe twice: {', '.join(names)}")
    for reference in probe.references:
        if reference not in REFERENCES:
            raise SuiteError(f"probe reference '{reference}' is not one of {', '.join(REFERENCES)}")
    if probe.scoring not in SCORERS:
        raise SuiteError(f"probe scoring '{probe.scoring}' is not one of {', '.join(SCORERS)}")
    for outliers in probe.outliers:
        probe_policies.check_outliers(outliers)
