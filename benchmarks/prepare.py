"""Compare preparing text (reading, tokenising, splitting, writing) with the bare tokenizers library, on the same texts and cores.

Both run by turns in one process. The library reads texts from memory and keeps nothing; preparing starts from a compressed file
and ends with token shards on disk.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.measuring import measure_together, result, write
from sinkdlm.data.inputs import Reader, find_sources
from sinkdlm.data.prepare import Settings, prepare
from sinkdlm.interop.tokenizer import read_tokenizer_at


def read_texts(files: list[str], field: str, megabytes: float) -> list[str]:
    texts, size = [], 0
    for _, _, row in Reader(find_sources(files)).rows([field]):
        texts.append(row.value if isinstance(row.value, str) else row.value[field])
        size += len(texts[-1].encode())
        if size > megabytes * 1e6:
            break
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, type=Path)
    parser.add_argument("--field", default="text")
    parser.add_argument("--megabytes", type=float, default=10.0, help="megabytes of text, from the start of the files")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    tokenizer = read_tokenizer_at(args.tokenizer)
    texts = read_texts(args.files, args.field, args.megabytes)
    n_bytes = sum(len(text.encode()) for text in texts)
    backend: Any = tokenizer.backend_tokenizer
    with tempfile.TemporaryDirectory() as folder:
        corpus, out = Path(folder) / "corpus.jsonl.zst", Path(folder) / "out"
        corpus.write_bytes(zstandard.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))

        def ours() -> None:
            shutil.rmtree(out, ignore_errors=True)
            prepare([str(corpus)], tokenizer, out, Settings())

        times = measure_together(
            {
                "prepare": ours,
                "encode_batch": lambda: backend.encode_batch(texts, add_special_tokens=False),
                "encode_batch_fast": lambda: backend.encode_batch_fast(texts, add_special_tokens=False),
            },
            "cpu",
            warmup=1,
            repeats=args.repeats,
        )
    figures: dict[str, Any] = {f"ms_{name}": value for name, value in times.items()}
    figures["megabytes_per_second"] = {name: n_bytes / 1e3 / value["p50"] for name, value in times.items()}
    figures["rate_to_encode_batch"] = times["encode_batch"]["p50"] / times["prepare"]["p50"]
    figures["rate_to_encode_batch_fast"] = times["encode_batch_fast"]["p50"] / times["prepare"]["p50"]
    settings = {"texts": len(texts), "bytes": n_bytes, "tokenizer_rows": len(tokenizer)}
    write(result("prepare", figures, device="cpu", settings=settings), args.out)


if __name__ == "__main__":
    main()
