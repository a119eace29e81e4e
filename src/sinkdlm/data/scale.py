"""Prepare data on many machines: a datatrove pipeline of our readers and datatrove's DocumentTokenizer, on its executors.

Writes datatrove's own `*.ds` files, which training reads directly. Files are dealt to tasks; finished tasks are not repeated.
"""

import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sinkdlm.data.encoding import Encoder, literal_content, mark_tokenizer
from sinkdlm.data.inputs import EXTRA, Reader, Source, find_sources, whole_text_of
from sinkdlm.data.prepare import Settings
from sinkdlm.data.writing import compare, read_json, write_json
from sinkdlm.errors import DataError, first_line

_TOKENIZER, _RECORD = "tokenizer", "settings.json"


def prepare_at_scale(
    names: Sequence[str],
    tokenizer: Any,
    out: str | Path,
    settings: Settings,
    executor: str,
    tasks: int = 1,
    workers: int = -1,
    partition: str | None = None,
    time: str = "24:00:00",
    logging_dir: Path | None = None,
) -> dict[str, Any]:
    """Run the pipeline here ("datatrove"), or hand it to Slurm or Ray; return what was done."""
    if settings.kind != "text":
        raise DataError(f"--kind {settings.kind}: datatrove writes running text only; use --executor local")
    if executor == "slurm" and partition is None:
        raise DataError("--executor slurm: needs --partition NAME")
    if executor == "slurm" and shutil.which("sbatch") is None:
        raise DataError("--executor slurm: there is no sbatch on this machine; run it on a login node of the cluster")
    folder = Path(out).resolve()
    sources = find_sources(names, split=settings.split, config=settings.config)
    encoder = Encoder(tokenizer, settings.eos_id)
    pipeline = _pipeline(sources, folder, tokenizer, encoder, settings)
    logs = str((logging_dir or folder / "logs").resolve())
    made = _executor(executor, partition, time)(pipeline=pipeline, tasks=tasks, workers=workers, logging_dir=logs)
    # datatrove skips finished tasks whatever their settings were: other settings need another folder.
    now = {**settings.to_dict(), "eos_id": encoder.eos_id, "tokenizer": mark_tokenizer(tokenizer), "tasks": tasks}
    now["inputs"] = {"stamps": [one.stamp for one in sources]}
    if (folder / _RECORD).exists():
        compare(folder, read_json(folder / _RECORD), now, "begun")
    write_json(folder / _RECORD, now)
    try:
        made.run()
    except DataError:
        raise
    except Exception as failure:  # whatever a step or the cluster's commands raise
        cure = f"see {logs}, then run the same command: finished tasks are kept"
        raise DataError(f"{executor}: {first_line(failure)}; {cure}") from failure
    if executor == "datatrove":
        failed = tasks - len(list(Path(logs).glob("completions/*")))
        if failed > 0:
            raise DataError(
                f"{failed} of {tasks} tasks failed; see {logs}/logs, then run the same command: it does only those again"
            )
        wrote = f"wrote {len(list(folder.glob('*.ds')))} files in {folder}"
        said = f"{wrote}; no split is held out: prepare a validation set separately"
    else:
        said = f"handed {tasks} tasks to {executor}; logs in {logs}; then: sinkdlm data info {folder}"
    return {"out": str(folder), "executor": executor, "tasks": tasks, "logs": logs, "said": said}


def _executor(executor: str, partition: str | None, time: str) -> Callable[..., Any]:
    if executor == "slurm":
        from datatrove.executor.slurm import SlurmPipelineExecutor

        # Tasks run where this Python is, with what is installed in it.
        path = f'export PATH="{Path(sys.executable).parent}:$PATH"'
        options = {"time": time, "partition": partition, "job_name": "sinkdlm-data", "qos": "", "env_command": path}
        return functools.partial(SlurmPipelineExecutor, **options)
    if executor == "ray":
        try:
            import ray  # noqa: F401  (datatrove says nothing of its absence until tasks start)
        except ImportError:
            raise DataError("--executor ray: needs: pip install ray") from None
        from datatrove.executor.ray import RayPipelineExecutor

        return RayPipelineExecutor
    from datatrove.executor.local import LocalPipelineExecutor

    return LocalPipelineExecutor


def _pipeline(sources: list[Source], folder: Path, tokenizer: Any, encoder: Encoder, settings: Settings) -> list[Any]:
    try:
        from datatrove.pipeline.readers import HuggingFaceDatasetReader
        from datatrove.pipeline.tokens import DocumentTokenizer
    except ImportError:
        raise DataError(f"--executor: needs datatrove: {EXTRA}") from None

    class LiteralTokenizer(DocumentTokenizer):
        """Takes special tokens in texts literally: a switch that tokenizer.json cannot store."""

        @property
        def tokenizer(self) -> Any:
            backend = super().tokenizer
            backend.encode_special_tokens = True
            return backend

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder / _TOKENIZER)
    path = folder / _TOKENIZER / "tokenizer.json"
    path.write_text(json.dumps(literal_content(tokenizer, encoder.eos_id), ensure_ascii=False), encoding="utf-8")
    writer = LiteralTokenizer(
        output_folder=str(folder),
        tokenizer_name_or_path=str(path),
        eos_token=tokenizer.convert_ids_to_tokens(encoder.eos_id),
        shuffle_documents=False,
    )
    hub = [
        HuggingFaceDatasetReader(
            one.name, {"name": one.config, "split": one.split, "revision": one.revision}, streaming=True, text_key=settings.field
        )
        for one in sources
        if one.form == "hub"
    ]
    return [*hub, _Texts([one for one in sources if one.form != "hub"], settings), writer]


class _Texts:
    """The reading step: our own readers, so that broken rows are reported as elsewhere. Files are dealt to tasks."""

    def __init__(self, sources: list[Source], settings: Settings) -> None:
        self.sources, self.settings = sources, settings

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        from datatrove.data import Document

        yield from data or ()
        reader = Reader(self.sources[rank::world_size], documents=self.settings.documents)
        for index, taken, row in reader.rows([self.settings.field]):
            text = whole_text_of(row, self.settings.field)
            if text is not None:
                yield Document(text=text, id=f"{reader.sources[index].name}/{taken}")
