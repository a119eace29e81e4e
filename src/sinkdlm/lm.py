"""A loaded model that takes text and gives text: write, score, watch.

Joins what the commands `sample`, `score` and `inspect` use, with their meanings and defaults. Owns no method of its own.
"""

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from sinkdlm.checkpoint import directory, hub
from sinkdlm.checkpoint.directory import Loaded
from sinkdlm.errors import EvalError, SamplingError, UserError

if TYPE_CHECKING:
    from sinkdlm.sampling import Policy
    from sinkdlm.text.generate import Job, Look


@dataclass(frozen=True)
class LM(Loaded):
    """A checkpoint in memory: `model`, `tokenizer`, `config`, `provenance`, and methods that take text. `path`: its folder."""

    path: str = ""

    @overload
    def write(self, prompt: str = "", **options: Any) -> str: ...
    @overload
    def write(self, prompt: Sequence[Any], **options: Any) -> list[str]: ...
    def write(self, prompt: str | Sequence[Any] = "", **options: Any) -> str | list[str]:
        """Write a text after a prompt, or one after each of a list; a text comes with its prompt, as `sinkdlm sample` prints it.

        length: tokens to write, by default 64 or as many as fit. seed: of all random draws; a list's texts draw different ones,
        so `["A"] * 3` gives three texts if the policy draws. policy: a name or a `Policy`; temperature, steps, block, top_p and
        its other fields may be given beside it, also under the names of LLaDA, Dream and transformers. infill: a text with gaps,
        in place of a prompt. schema: a JSON schema (a dictionary) that what is written fits; regex: an expression that it matches.
        suffix, chat, bos, stop, until_eos, gap, batch, deterministic: as the options of `sinkdlm sample`.
        """
        from sinkdlm.text.generate import write

        if prompt == []:
            return []
        texts = [sample["text"] for sample in write(self, *self._read(prompt, options))["samples"]]
        return texts[0] if isinstance(prompt, str) else texts

    def watch(self, prompt: str = "", **options: Any) -> "Watched":
        """Write one text step by step. Options as in `write`."""
        if not isinstance(prompt, str):
            raise SamplingError("watch: shows one text; give one prompt")
        return Watched(self, prompt, *self._read(prompt, options))

    @overload
    def score(self, texts: str, **options: Any) -> dict[str, Any]: ...
    @overload
    def score(self, texts: Sequence[str], **options: Any) -> list[dict[str, Any]]: ...
    def score(self, texts: str | Sequence[str], **options: Any) -> dict[str, Any] | list[dict[str, Any]]:
        """Measure how likely the model finds a text, or each of a list; a document of `sinkdlm score --json` for each.

        nats: minus the log-likelihood, an upper bound where masks are drawn; stderr: its standard error; also bits_per_byte,
        perplexity, tokens. estimator: exact_k (default), official, chain or causal. draws: masks of a text, by default 128.
        seed, bos, batch_tokens: as the options of `sinkdlm score`.
        """
        from sinkdlm.data.inputs import count_bytes
        from sinkdlm.evals.answering import Answerer, answer_sheet
        from sinkdlm.evals.documents import report, scoring, sheet_of
        from sinkdlm.evals.requests import Journal

        self._check_tokenizer()
        given = [texts] if isinstance(texts, str) else list(texts)
        for number, text in enumerate(given, start=1):
            if not isinstance(text, str):
                raise EvalError(f"score: text {number} is {type(text).__name__}, expected text")
            count_bytes(text, f"score: text {number}")
        if not given:
            return []
        seed, bos, budget = (options.pop(name, other) for name, other in (("seed", 0), ("bos", None), ("batch_tokens", None)))
        sheet = sheet_of(given, scoring(self.tokenizer, options, bos), seed)
        found = report(given, answer_sheet(Answerer(self, sheet, budget=budget), Journal(None, {}), quiet=True))["documents"]
        return found[0] if isinstance(texts, str) else found

    def _check_tokenizer(self) -> None:
        if self.tokenizer is None:
            cure = f"add one with: sinkdlm convert {self.path} DST --tokenizer T"
            raise UserError(f"{self.path}: has no tokenizer, so it cannot read or write text; {cure}")

    def _read(self, prompt: str | Sequence[Any], options: dict[str, Any]) -> tuple["Job", "Policy"]:
        """Sort options into those of a job and those of a policy."""
        from sinkdlm.sampling.aliases import translate
        from sinkdlm.sampling.unmasking import FIELDS, policy_of
        from sinkdlm.text.generate import Job, check
        from sinkdlm.text.prompts import policy_for

        self._check_tokenizer()
        of_job = [field.name for field in fields(Job) if field.name not in ("prompt", "prompts", "n")]
        options = translate(options, [*of_job, "policy", "stop", "mask_id", *FIELDS])
        if (mask_id := options.get("mask_id", self.config.mask_id)) != self.config.mask_id:
            raise SamplingError(f"mask_id = {mask_id}: [MASK] of this model is {self.config.mask_id}; leave it out")
        asked = {"prompt": prompt} if isinstance(prompt, str) else {"prompts": list(prompt)}
        job = Job(**asked, **{name: options[name] for name in of_job if name in options})
        check(job)
        policy = policy_of(options.get("policy", "llada"), **{name: options[name] for name in FIELDS if name in options})
        ends = {"stop": options.get("stop", True), "until_eos": job.until_eos, "block_size": self.config.block_size}
        return job, policy_of(policy, **policy_for(self.tokenizer, policy, **ends))


class Watched:
    """A text that a model is writing. Iterate to see each step; `text` and `save` write what is left.

    A step prints as a line: the share of attention on the sinks, the most attended position, and the text so far.
    """

    def __init__(self, lm: LM, prompt: str, job: "Job", policy: "Policy") -> None:
        from sinkdlm.sampling import start
        from sinkdlm.text.generate import look_at_steps, requests_of

        self._lm, self._prompt, self._job = lm, prompt, job
        (self._state,) = start(requests_of(lm, job, policy))
        self._coming = look_at_steps(lm, self._state, deterministic=job.deterministic)
        self._steps: list[Look] = []

    def __iter__(self) -> Iterator["Look"]:
        """Every step from the first on; those not yet taken are taken now."""
        number = 0
        while number < len(self._steps) or self._step():
            yield self._steps[number]
            number += 1

    def _step(self) -> bool:
        look = next(self._coming, None)
        self._steps += [] if look is None else [look]
        return look is not None

    @property
    def text(self) -> str:
        """The finished text."""
        from sinkdlm.text.generate import describe

        while self._step():
            pass
        return str(describe(self._lm, self._state)["text"])

    def recording(self) -> dict[str, Any]:
        """All steps with the attention of every head, as the inspector reads them."""
        from sinkdlm.analysis.recording import Recorder, effort, join_sides

        text, lm, path = self.text, self._lm, Path(self._lm.path)
        canvases = [*(look.seen for look in self._steps), self._state.tokens.tolist()]
        n_given = canvases[0].index(lm.config.mask_id)
        name = (path.parent if path.name == "model" else path).name or "model"
        asked = {"prompt": self._prompt or text, "seed": str(self._job.seed), "policy": None, "steps": len(self._steps)}
        n_open = canvases[0].count(lm.config.mask_id)
        took = effort(self._state.forwards, self._state.accepted, n_open)
        return join_sides([Recorder(lm, name, canvases, n_given, effort=took).record()], {**asked, "length": n_open})

    def page(self) -> str:
        """The inspector with this text inside, as HTML that needs no server."""
        from sinkdlm.page.bundle import build_viewer

        return build_viewer(self.recording())

    def save(self, path: str | Path) -> Path:
        """Write the page, or with a name that ends in .json the recording alone, which the inspector opens."""
        path = Path(path)
        if path.suffix not in (".html", ".json"):
            raise UserError(f"{path}: give a name that ends in .html (a page) or .json (a recording)")
        text = self.page() if path.suffix == ".html" else json.dumps(self.recording(), separators=(",", ":")) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as failure:
            raise UserError(f"{path}: cannot be written: {failure.strerror}; choose another place") from None
        return path

    def _repr_html_(self) -> str:
        """The page within a notebook."""
        return f'<iframe title="inspector" width="100%" height="700" srcdoc="{html.escape(self.page())}"></iframe>'


def load(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    verify: bool = True,
    runner: Literal["auto", "plain"] = "auto",
) -> LM:
    """Read a checkpoint directory, or one of the hub: `hf://owner/name[@revision]`.

    dtype: convert the weights; by default they stay as they were saved.

    verify: compare weights, config and tokenizer with the fingerprints in provenance.json (reads each file once more), and
    refuse weights that are not finite. runner: "plain" runs the readable model alone, without kernels.
    """
    found = directory.load(hub.find(path), device=device, dtype=dtype, verify=verify, runner=runner)
    return LM(found.model, found.tokenizer, found.config, found.provenance, str(path))
