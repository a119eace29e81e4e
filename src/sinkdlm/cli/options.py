"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option


def option(text: str, *names: str, **limits: Any) -> Any:
    """Declare an option by its help text. names: its flags, where they differ from the parameter's name."""
    return Option(*names, help=text, **limits)


def find_recipe(given: str) -> Path:
    from sinkdlm.config import shipped

    return shipped.find_recipe(given)


def parse_override(text: str) -> tuple[str, Any]:
    from sinkdlm.config import toml

    return toml.parse_override(text)


_RECIPE = Argument(metavar="RECIPE", parser=find_recipe, help="A recipe file, or a name from `sinkdlm recipe list`.")
RecipeFile = Annotated[Path, _RECIPE]
RecipeFiles = Annotated[list[Path] | None, _RECIPE]
Checkpoint = Annotated[str, Argument(metavar="CKPT", help="A checkpoint, hf://owner/name, or anything that `convert` reads.")]
Json = Annotated[bool, option("Print JSON.", "--json")]
Device = Annotated[str | None, option("Device: cuda, cuda:N or cpu; by default a GPU if there is one.")]
Compile = Annotated[bool, option("Compile the blocks with torch.compile; pays off for long runs on a CPU.", "--compile")]
Bos = Annotated[bool | None, option("Begin texts with BOS or not; by default as the tokenizer does.", "--bos/--no-bos")]
Seed = Annotated[int, option("Seed of all random draws.", min=0, max=2**63 - 1)]
Chat = Annotated[bool, option("Put each prompt into the tokenizer's chat template, as a user's turn.", "--chat")]
Field = Annotated[str, option("Field that holds the text in jsonl, parquet or hub rows.")]
Split = Annotated[str, option("Split of a hub data set.")]
Subset = Annotated[str | None, option("Configuration of a hub data set.", "--subset")]
Exact = Annotated[bool, option("Give bit-identical tokens alone and in any batch; slower.", "--deterministic")]
Overrides = Annotated[list[str] | None, option("Override a recipe key, as in train.lr=1e-4.", "--set", metavar="KEY=VALUE")]
Sampler = Annotated[str, option("Sampling policy: smdm-origin, smdm-greedy, llada, dream or fast.", "--config", "--policy")]
_WORD = Option(hidden=True)  # of sampling/aliases.py
WholeWord = Annotated[int | None, _WORD]
NumberWord = Annotated[float | None, _WORD]
TextWord = Annotated[str | None, _WORD]
_PAIR: dict[str, Any] = {"metavar": "KEY=VALUE", "parser": parse_override}  # read as a list of (key, value)
PolicySet = Annotated[list[Any] | None, option("Set a field of the policy, as in order=entropy.", "--set", **_PAIR)]
ModelSet = Annotated[list[Any] | None, option("Set a field of the model, as in n_sinks=1.", "--set", **_PAIR)]
TaskSet = Annotated[list[Any] | None, option("Change a setting of one task, as in piqa.draws=64.", "--set", **_PAIR)]
Documents = Annotated[Literal["file", "line", "paragraph"], option("What counts as a document in a .txt or .md file.")]
Precision = Annotated[
    Literal["float64", "float32", "bfloat16", "float16", "int8", "nf4", "int4"] | None,
    option("Precision of the weights; by default bfloat16 on a GPU, float32 elsewhere. int8, nf4, int4: of those of blocks alone."),
]
Computing = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "float8", "int8", "nf4", "int4"],
    option(
        "Precision. auto: bfloat16 on a GPU, float32 elsewhere; float8: faster on a GPU, less precise. "
        "int8, nf4, int4: as auto, with the blocks' weights in 8 or 4 bits: less memory."
    ),
]
