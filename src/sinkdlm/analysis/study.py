"""Analyse one model: from prompts to the capture file that reports are made of.

Owns the form of capture files (format, version, names of their parts). Trajectories pass through capture and metrics one at a
time, so memory does not grow with their number. Needs the core packages alone; knows no figures.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sinkdlm.analysis.capture import RULES, Rules, attention_maps, capture, capture_noise
from sinkdlm.analysis.interventions import Ground, find_changes, measure_changes
from sinkdlm.analysis.kinds import classify, labels
from sinkdlm.analysis.metrics import Measured, Trajectory, measure, paths_of, summarize
from sinkdlm.analysis.recording import Recorder, effort
from sinkdlm.checkpoint.tokenizer import absent_ids
from sinkdlm.errors import AnalysisError
from sinkdlm.sampling import Policy, Request
from sinkdlm.text.prompts import lay_out

FORMAT, VERSION = "sinkdlm-capture", 1
_DIGITS = 4  # of attention maps
_N_TEXTS, _N_SAMPLES = 32, 16  # at most, for interventions


@dataclass(frozen=True)
class Plan:
    """What to capture. Prompts, as tokens, are taken in turn until there are enough trajectories."""

    prompts: Sequence[Sequence[int]]
    policy: Policy
    trajectories: int = 32
    length: int = 64  # tokens to write after a prompt
    texts: Sequence[str] = ()  # given texts, of which `shares` are masked, instead of written ones
    shares: Sequence[float] = ()
    seed: int = 0
    batch: int = 8
    rules: Rules = RULES
    interventions: bool = True
    draws: int = 16  # of NELBO under interventions, the same before and after
    maps: Sequence[tuple[int, int, int]] = ()  # (step, layer, head) of the first trajectory; by default the strongest head

    @property
    def n_steps(self) -> int:
        """The most steps of a trajectory; only remasking takes more steps than there are tokens to write."""
        steps = self.policy.steps or self.length
        return len(self.shares) or (steps if self.policy.remask != "none" else min(steps, self.length))

    @property
    def n_different(self) -> int | None:
        """The number of trajectories that are not copies of each other; None: any number, as they are drawn."""
        return None if self.policy.is_drawn else len(set(map(tuple, self.prompts)))

    def with_trajectories(self, count: int) -> "Plan":
        if not self.shares and self.n_different is not None and count > self.n_different:
            raise AnalysisError(
                f"{count} trajectories: {len(self.prompts)} prompts at temperature 0 give {self.n_different} different ones; "
                "give more prompts, or --set temperature=1"
            )
        prompts = self.prompts if self.n_different is None else list(dict.fromkeys(map(tuple, self.prompts)))
        return replace(self, trajectories=count, prompts=prompts)

    def check_maps(self, n_layers: int, n_heads: int) -> None:
        """Refuse --map places that do not exist, before anything is captured."""
        ends = (self.n_steps - 1, n_layers - 1, n_heads - 1)
        for place in self.maps:
            if not all(0 <= index <= end for index, end in zip(place, ends, strict=True)):
                asked, most = (",".join(map(str, one)) for one in (place, ends))
                raise AnalysisError(f"--map {asked}: no such step, layer or head; choose from 0,0,0 to {most}")


class _Seen:
    """Collects what is kept of trajectories."""

    def __init__(self, lm: Any, plan: Plan) -> None:
        config = lm.config
        self.lm, self.plan = lm, plan
        self.kinds = classify(lm.tokenizer, max(config.embedding_rows, config.mask_id + 1), config.mask_id)
        self.measured: list[Measured] = []
        self.finals: dict[int, list[int]] = {}
        self.top = np.zeros((config.n_layers, config.n_heads))  # attention of the most attended token, summed over trajectories

    def take(self, trajectory: Trajectory) -> None:
        measured = measure(trajectory, self.kinds, threshold=self.plan.rules.threshold, seed=self.plan.seed)
        if self.measured:
            measured, self.measured[0] = measured.hand_norms_to(self.measured[0])
        else:
            self.first = trajectory
        self.measured.append(measured)
        self.finals[trajectory.number] = trajectory.final.tolist()
        self.top += trajectory.top_received.mean(0)

    def draw_maps(self) -> list[dict[str, Any]]:
        """Attention maps of the first trajectory: at the chosen places, or at its first and middle step in the strongest head.

        A trajectory that stopped early lacks some steps.
        """
        first, (layer, head) = self.first, np.unravel_index(int(self.top.argmax()), self.top.shape)
        asked = list(self.plan.maps) or [(step, int(layer), int(head)) for step in sorted({0, first.n_steps // 2})]
        return [self._draw_map(*place) for place in asked if place[0] < first.n_steps]

    def clean(self) -> list[int] | None:
        """The first trajectory's text, where a block-diffusion model was given texts: blocks see it clean before them."""
        return self.first.final.tolist() if self.plan.shares and self.lm.config.block_size is not None else None

    def _draw_map(self, step: int, layer: int, head: int) -> dict[str, Any]:
        first, tokens = self.first, self.first.tokens[step]
        weights = attention_maps(self.lm.model, tokens.tolist(), [(layer, head)], clean=self.clean())[layer, head]
        return {"number": first.number, "step": step, "layer": layer, "head": head} | {
            "labels": labels(self.lm.tokenizer, tokens, first.mask_id),
            "n_sinks": weights.shape[1] - weights.shape[0],
            "sinks": np.flatnonzero(first.absolute[step, layer, head]).tolist(),
            "weights": [[round(value, _DIGITS) for value in row] for row in weights.double().tolist()],
        }

    def record(self, name: str, prompt: str, tick: Callable[[int], None]) -> dict[str, Any]:
        """The first trajectory for the inspector page: its settings, and the model's side."""
        first, plan = self.first, self.plan
        asked = {"prompt": prompt, "seed": str(plan.seed), "policy": None, "steps": first.n_steps, "length": plan.length}
        noise = {"shares": list(plan.shares), "length": len(first.final)} if plan.shares else {}
        canvases = [*first.tokens.tolist(), first.final.tolist()]
        took = None if plan.shares else effort(first.n_steps, 0, canvases[0].count(first.mask_id))
        recorder = Recorder(self.lm, name, canvases, first.n_prompt, rules=plan.rules, clean=self.clean(), effort=took)
        return {"asked": {**asked, **noise}, "side": recorder.record(tick)}


def study(
    lm: Any, plan: Plan, *, name: str, source: str, made: Mapping[str, Any], show: Callable[[int], None] = lambda rows: None
) -> dict[str, Any]:
    """Capture a loaded model with its tokenizer, as JSON values. show: called with the number of rows that have gone through the
    model so far, of about `count_rows`."""
    plan.check_maps(lm.config.n_layers, lm.config.n_heads)
    began, done, seen = time.monotonic(), 0, _Seen(lm, plan)

    def tick(rows: int) -> None:
        nonlocal done
        done += rows
        show(done)

    barred = absent_ids(lm.tokenizer, lm.config.vocab_size)  # as in `sinkdlm sample`
    how: dict[str, Any] = {"rules": plan.rules, "batch": plan.batch, "tick": tick}
    if plan.shares:
        texts, requests = _encode_texts(lm, plan.texts), list[Request]()
        trajectories = capture_noise(lm.model, texts, plan.shares, seed=plan.seed, **how)
    else:
        requests = _requests(lm, plan)
        texts = [list(prompt)[: lm.config.context_length] for prompt in plan.prompts if prompt]
        trajectories = capture(lm.model, requests, barred=barred, **how)
    for trajectory in trajectories:
        seen.take(trajectory)
    found = summarize(seen.measured, plan.seed)
    for row in found["trajectories"]:
        begin = plan.texts[row["number"]] if plan.shares else lm.tokenizer.decode(plan.prompts[row["number"] % len(plan.prompts)])
        row |= {"prompt": begin, "text": lm.tokenizer.decode(seen.finals[row["number"]])}
    maps, path = seen.draw_maps(), paths_of(seen.first, labels(lm.tokenizer, seen.first.final, seen.first.mask_id))
    changes, omitted = _intervene(lm, plan, requests, texts, barred, tick)
    try:
        recording = seen.record(name, found["trajectories"][0]["prompt"], tick)
    except AnalysisError as refused:
        recording, omitted["a recording"] = None, str(refused)
    if len(maps) < len(plan.maps):
        omitted["maps of later steps"] = f"the first trajectory stopped after step {seen.first.n_steps - 1}"
    policy = {key: value for key, value in asdict(plan.policy).items() if value is not None} | {"cache": "none"}
    inputs = {"shares": list(plan.shares)} if plan.shares else {"policy": policy, "length": plan.length}
    settings = {"inputs": "noise" if plan.shares else "trajectories", **inputs, "steps": plan.n_steps, "seed": plan.seed}
    about = {"format": FORMAT, "version": VERSION, "name": name, "source": source, "model": lm.config.to_dict()}
    about |= {"made": {**made, "seconds": round(time.monotonic() - began, 3)}}
    about |= {"settings": {**settings, "batch": plan.batch, **plan.rules._asdict()}}
    return about | found | {"paths": [path], "maps": maps, "interventions": changes, "recording": recording, "omitted": omitted}


def _requests(lm: Any, plan: Plan) -> list[Request]:
    prompts = [plan.prompts[number % len(plan.prompts)] for number in range(plan.trajectories)]
    mask_id, room = lm.config.mask_id, lm.config.context_length
    canvases = [lay_out(prompt, [], plan.length, mask_id, room, "the prompt or --length") for prompt in prompts]
    size = lm.config.block_size
    return [Request(canvas, plan.policy, mask_id, plan.seed, number, block_size=size) for number, canvas in enumerate(canvases)]


def _encode_texts(lm: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of each text, cut to the model's context length."""
    rows = [lm.tokenizer.encode(text, add_special_tokens=False)[: lm.config.context_length] for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise AnalysisError(f"--texts: {text!r} has no token; leave it out")
    return rows


def _intervene(
    lm: Any, plan: Plan, requests: list[Request], texts: list[list[int]], barred: Sequence[int], tick: Callable[[int], None]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Measure interventions: NELBO on the given texts, or on the prompts; samples on the first requests."""
    if not plan.interventions:
        return [], {"interventions": "not asked for"}
    texts = [row for row in texts if len(row) > int(lm.config.shift_logits)]  # nothing predicts a shifted row's first token
    if not texts:
        return [], {"interventions": "the prompts have no token to score; give --prompts or --texts"}
    ground = Ground(texts[:_N_TEXTS], requests[:_N_SAMPLES], plan.draws, plan.batch, plan.seed, barred)
    return measure_changes(lm.model, ground, plan.rules, tick=lambda looks: tick(looks * _rows_of_look(plan)))


def _rows_of_look(plan: Plan) -> int:
    texts = len(plan.texts) if plan.shares else len(plan.prompts)
    samples = 0 if plan.shares else min(plan.trajectories, _N_SAMPLES)
    return min(texts, _N_TEXTS) * plan.draws + samples * plan.n_steps


def count_rows(lm: Any, plan: Plan) -> int:
    """About how many rows will go through the model, for a time estimate."""
    looks = 1 + len(find_changes(lm.model, plan.rules)[0]) if plan.interventions else 0
    return plan.n_steps * (len(plan.texts) if plan.shares else plan.trajectories) + looks * _rows_of_look(plan) + plan.n_steps + 1


def write_capture(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Write a capture, and return it as a reader will get it."""
    text = json.dumps(found, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as failure:
        raise AnalysisError(f"{path}: cannot be written: {failure.strerror}; give another --out") from None
    return dict(json.loads(text))


def read_capture(path: Path) -> Any:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or "not JSON"
        raise AnalysisError(f"{path}: cannot be read: {reason}") from None
    if not isinstance(found, Mapping) or found.get("format") != FORMAT:
        raise AnalysisError(f"{path}: not a capture; make one with: sinkdlm analyze CKPT --out DIR")
    if found.get("version") != VERSION:
        version = found.get("version")
        raise AnalysisError(f"{path}: a capture of version {version}, but this sinkdlm reads version {VERSION}; capture it again")
    return found
