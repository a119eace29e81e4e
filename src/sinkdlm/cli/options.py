"""Options that several subcommands have in common."""

from enum import StrEnum
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; by default cuda where there is one.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the blocks: pays on a CPU, for long work.")]
Bos = Annotated[bool | None, typer.Option("--bos/--no-bos", help="BOS before what is given; by default what the tokenizer does.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1)]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in train.lr=1e-4.")]
ModelOverrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A field of the model, as in n_sinks=1.")
]
PolicyOverrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A field of the sampler, as in order=entropy.")
]


class Dtype(StrEnum):
    FLOAT64, FLOAT32, BFLOAT16, FLOAT16 = "float64", "float32", "bfloat16", "float16"


Precision = Annotated[Dtype | None, typer.Option(help="Of the weights; by default bfloat16 on a GPU, float32 elsewhere.")]


class Documents(StrEnum):
    """What one document is in a text file."""

    FILE, LINE, PARAGRAPH = "file", "line", "paragraph"


class Arithmetic(StrEnum):
    AUTO, FLOAT32, BFLOAT16, FLOAT16, FLOAT8 = "auto", "float32", "bfloat16", "float16", "float8"


Computing = Annotated[
    Arithmetic, typer.Option(help="auto: bfloat16 on a GPU, float32 elsewhere; float8 (GPU) is faster and less precise.")
]
