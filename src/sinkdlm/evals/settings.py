"""How a task's requests are answered: estimator, draws, guidance, sampler. The official choices for each task, as a table.

Knows no harness, model or file.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sinkdlm.errors import EvalError
from sinkdlm.likelihood import ESTIMATORS
from sinkdlm.likelihood.estimates import MIN_SETS
from sinkdlm.likelihood.estimators import ADAPTIVE_SETS
from sinkdlm.likelihood.mask_draws import MONTE_CARLO
from sinkdlm.sampling import policy_of

# Of the official scripts, with their chain rule and guidance. ARC-Challenge is in none of them: taken as ARC-Easy. Where they draw
# 1,024 masks by their own estimator, exact_k has the same mean and a bounded variance; theirs is estimator official, draws 1024.
OFFICIAL: dict[str, dict[str, Any]] = {
    "arc_easy": {"guidance": 0.6},
    "arc_challenge": {"guidance": 0.6},
    "social_iqa": {"guidance": 0.6},
    "hellaswag": {"guidance": 0.7},
    "race": {"guidance": 0.7},
    "piqa": {"estimator": "chain", "guidance": 0.6},
    "openbookqa": {"estimator": "chain", "guidance": 1.6},
    "boolq": {"estimator": "chain", "guidance": 1.6},
    "gsm8k_two_stage": {"policy": "smdm-greedy", "steps": 256},
    "gsm8k_one_stage": {"policy": "smdm-greedy", "steps": 256},
    "lambada_openai": {"estimator": "chain", "guidance": 1.1},
    "lambada_standard": {"estimator": "chain", "guidance": 1.1},
}


@dataclass(frozen=True)
class Settings:
    """guidance is that of log-likelihoods and of samples; whole documents are never guided.

    bos: whether prompts begin with it, and documents; None: as the tokenizer itself has it, and before documents as the harness.
    """

    estimator: str = "exact_k"
    draws: int = 128
    guidance: float = 0.0
    adaptive: bool = False  # draws end once a question's ranking is settled
    error: float = 0.05  # the chance of a wrong ranking that adaptive draws may take
    tolerance: float = 0.0  # of agreement with another full run that they may give up for a question
    greedy: bool = True  # also tell whether the continuation is what the model itself would write
    bos: bool | None = None
    policy: str = "llada"
    steps: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise EvalError(f"estimator = {self.estimator!r}: allowed: {', '.join(ESTIMATORS)}")
        if not (isinstance(self.draws, int) and self.draws >= 1):
            raise EvalError(f"draws = {self.draws!r}: a whole number, at least 1")
        if self.estimator in MONTE_CARLO and self.draws < MIN_SETS:
            raise EvalError(f"draws = {self.draws}: at least one for each of the {MIN_SETS} draw sets that give its standard error")
        if not (isinstance(self.guidance, int | float) and math.isfinite(self.guidance) and self.guidance >= -1):
            raise EvalError(f"guidance = {self.guidance!r}: allowed is -1 or more")
        for name, allowed in (("adaptive", (True, False)), ("greedy", (True, False)), ("bos", (True, False, None))):
            if not any(getattr(self, name) is value for value in allowed):
                raise EvalError(f"{name} = {getattr(self, name)!r}: true or false")
        if isinstance(self.error, bool) or not (isinstance(self.error, int | float) and 0 < self.error < 1):
            raise EvalError(f"error = {self.error!r}: above 0 and below 1")
        if isinstance(self.tolerance, bool) or not (isinstance(self.tolerance, int | float) and 0 <= self.tolerance < 1):
            raise EvalError(f"tolerance = {self.tolerance!r}: 0 or more, and below 1")
        if self.adaptive and self.estimator == "exact_k" and self.draws < ADAPTIVE_SETS:
            raise EvalError(f"draws = {self.draws}: at least one for each of the {ADAPTIVE_SETS} draw sets of --adaptive")
        if self.causal and self.guidance:
            raise EvalError("guidance: an AR parent has no [MASK] to hide a prompt behind; leave it at 0 with estimator causal")
        policy_of(self.policy, **{name: getattr(self, name) for name in ("steps", "block") if getattr(self, name) is not None})

    @property
    def causal(self) -> bool:
        return self.estimator == "causal"

    @classmethod
    def of(cls, values: Mapping[str, Any], place: str = "settings") -> "Settings":
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise EvalError(f"{place}: {name}: unknown; there are {', '.join(names)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def settings_for(task: str, changes: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> Settings:
    """What a task is answered with: the official choices, changes for all tasks, and then its own."""
    given = {**changes, **(own or {})}
    official = {} if given.get("estimator") == "causal" else OFFICIAL.get(task, {})
    return Settings.of({**official, **given}, task)


def read_changes(overrides: Iterable[tuple[str, Any]], tasks: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`task.key = value` pairs by task."""
    known = list(tasks)
    found: dict[str, dict[str, Any]] = {}
    for name, value in overrides:
        task, _, key = name.rpartition(".")
        if task not in known:
            raise EvalError(f"--set {name}: there is no task {task!r} among {', '.join(known)}; say TASK.KEY=VALUE")
        found.setdefault(task, {})[key] = value
    return found
