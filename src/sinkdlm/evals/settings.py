"""How a task's requests are answered: estimator, draws, guidance, sampler. The official choices for each task, as a table.

Knows no harness, model or file.
"""

import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from sinkdlm.config.model import Frozen
from sinkdlm.errors import ConfigError, EvalError
from sinkdlm.likelihood import ESTIMATORS
from sinkdlm.likelihood.estimates import MIN_SETS
from sinkdlm.likelihood.estimators import ADAPTIVE_SETS
from sinkdlm.likelihood.mask_draws import MONTE_CARLO
from sinkdlm.sampling import policy_of

OFFICIAL = tomllib.loads((Path(__file__).parent / "official.toml").read_text(encoding="utf-8"))
ALIASES = {"lambada": "lambada_openai", "siqa": "social_iqa"}


class Settings(Frozen):
    """guidance is for log-likelihoods and samples; whole documents are never guided.

    bos: whether prompts and documents begin with BOS; None: prompts as the tokenizer does it, documents as the harness does.
    """

    estimator: str = "exact_k"
    draws: int = Field(default=128, ge=1, le=1 << 16)  # a row's masks are in memory together
    guidance: float = Field(default=0.0, ge=-1)
    adaptive: bool = False  # draws end once a question's ranking is settled
    error: float = Field(default=0.05, gt=0, lt=1)  # adaptive: accepted chance of a wrong ranking
    tolerance: float = Field(default=0.0, ge=0, lt=1)  # adaptive: agreement with another full run that a question may lose
    greedy: bool = True  # also tell whether the continuation is what the model itself would write
    bos: bool | None = None
    policy: str = "llada"
    steps: int | None = None
    block: int | None = None

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.estimator not in ESTIMATORS:
            raise ConfigError(f"estimator = {self.estimator!r}: allowed: {', '.join(ESTIMATORS)}")
        if self.estimator in MONTE_CARLO and self.draws < MIN_SETS:
            sets = f"the {MIN_SETS} draw sets that give its standard error"
            raise ConfigError(f"draws = {self.draws}: needs at least one for each of {sets}")
        if self.adaptive and self.estimator == "exact_k" and self.draws < ADAPTIVE_SETS:
            raise ConfigError(f"draws = {self.draws}: needs at least one for each of the {ADAPTIVE_SETS} draw sets of --adaptive")
        if self.causal and self.guidance:
            raise ConfigError("guidance: an AR parent has no [MASK] to hide a prompt behind; leave it at 0 with estimator causal")
        policy_of(self.policy, **{name: getattr(self, name) for name in ("steps", "block") if getattr(self, name) is not None})
        return self

    @property
    def causal(self) -> bool:
        return self.estimator == "causal"

    @classmethod
    def of(cls, values: Mapping[str, Any], place: str) -> "Settings":
        """Build settings from a file or a command line. place: the task, for errors."""
        try:
            return cls(**values)
        except ConfigError as failure:
            raise EvalError(str(failure.within(place) if place else failure)) from None


def settings_for(task: str, changes: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a task: the official choices, then changes for all tasks, then its own."""
    given = {**changes, **(own or {})}
    official = {} if given.get("estimator") == "causal" else OFFICIAL.get(task, {})
    return Settings.of({**official, **given}, task)


def read_changes(overrides: Iterable[tuple[str, Any]], tasks: Collection[str]) -> dict[str, dict[str, Any]]:
    """Group `task.key = value` pairs by task."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in overrides:
        given, _, key = name.rpartition(".")
        task = ALIASES.get(given, given)
        if task not in tasks:
            raise EvalError(f"--set {name}: there is no task {task!r} among {', '.join(tasks)}; write TASK.KEY=VALUE")
        found.setdefault(task, {})[key] = value
    return found
