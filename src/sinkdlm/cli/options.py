"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option


def option(text: str, *names: str, **limits: Any) -> Any:
    """An option with its help text; names where its parameter's name does not do."""
    return Option(*names, help=text, **limits)


def find_recipe(given: str) -> Path:
    from sinkdlm.config import shipped

    return shipped.find_recipe(given)


def parse_override(text: str) -> tuple[str, Any]:
    from sinkdlm.config import toml

    return toml.parse_override(text)


_RECIPE = Argument(metavar="RECIPE", parser=find_recipe, help="A recipe's file, or a name of `sinkdlm recipe list`.")
RecipeFile = Annotated[Path, _RECIPE]
RecipeFiles = Annotated[list[Path] | None, _RECIPE]
Checkpoint = Annotated[str, Argument(metavar="CKPT", help="A checkpoint, or anything that `convert` reads.")]
Json = Annotated[bool, option("Print JSON.", "--json")]
Device = Annotated[str | None, option("cuda or cpu; by default cuda where there is one.")]
Compile = Annotated[bool, option("Compile the blocks: pays on a CPU, for long work.", "--compile")]
Bos = Annotated[bool | None, option("BOS before what is given; by default what the tokenizer does.", "--bos/--no-bos")]
Seed = Annotated[int, option("Of all that is drawn.", min=0, max=2**63 - 1)]
Chat = Annotated[bool, option("A prompt is a user's turn in the tokenizer's chat template.", "--chat")]
Field = Annotated[str, option("The field of jsonl, parquet or hub rows that holds the text.")]
Exact = Annotated[bool, option("The same tokens alone and in any batch, bit for bit; slower.", "--deterministic")]
Overrides = Annotated[list[str] | None, option("Override a key, as in train.lr=1e-4.", "--set", metavar="KEY=VALUE")]
Sampler = Annotated[str, option("smdm-origin, smdm-greedy, llada, dream or fast.", "--config", "--policy")]
_PAIR: dict[str, Any] = {"metavar": "KEY=VALUE", "parser": parse_override}  # read as a list of (key, value)
PolicySet = Annotated[list[Any] | None, option("A field of the sampler, as in order=entropy.", "--set", **_PAIR)]
ModelSet = Annotated[list[Any] | None, option("A field of the model, as in n_sinks=1.", "--set", **_PAIR)]
TaskSet = Annotated[list[Any] | None, option("A setting of one task, as in piqa.draws=64.", "--set", **_PAIR)]
Documents = Annotated[Literal["file", "line", "paragraph"], option("What one document is in a .txt or .md file.")]
Precision = Annotated[
    Literal["float64", "float32", "bfloat16", "float16"] | None,
    option("Of the weights; by default bfloat16 on a GPU, float32 elsewhere."),
]
Computing = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "float8"],
    option("auto: bfloat16 on a GPU, float32 elsewhere; float8 (GPU) is faster and less precise."),
]
