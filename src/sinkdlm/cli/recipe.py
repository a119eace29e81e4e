"""The commands `recipe list`, `recipe show`, `recipe schema` and `presets`."""

import json

import typer

from sinkdlm.cli.loading import load_recipe, say
from sinkdlm.cli.options import Json, Overrides, RecipeFile

app = typer.Typer(help="List recipes, or print one in full.", rich_markup_mode=None, no_args_is_help=True, add_completion=False)


@app.command("list")
def recipe_list(as_json: Json = False) -> None:
    """List the recipes of the package. Every command takes such a name in place of a file."""
    from sinkdlm.config.shipped import describe_recipe, shipped_recipes

    found, lines, group = [], [], None
    for name, path in shipped_recipes().items():
        found.append({"name": name, "group": path.parent.name, "description": describe_recipe(path), "path": str(path)})
        if path.parent.name != group:
            group = path.parent.name
            lines.append(f"{group}{': for `base` alone' if group == 'parts' else ''}")
        lines.append(f"  {name:32s}{found[-1]['description']}")
    say(found, "\n".join(lines), as_json)


@app.command("show")
def recipe_show(recipe: RecipeFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print a recipe in full, as TOML. Its base, preset, overrides and defaults are resolved."""
    resolved = load_recipe(recipe, overrides)
    say(resolved.to_dict(), resolved.to_toml().rstrip("\n"), as_json)


@app.command("schema")
def recipe_schema() -> None:
    """Print the JSON schema of recipes. Editors complete and check TOML with it."""
    from sinkdlm.config.recipe import Recipe

    typer.echo(json.dumps(Recipe.json_schema(), indent=2))


def presets(as_json: Json = False) -> None:
    """List model presets with their parameter counts."""
    from sinkdlm.config.model import ModelConfig, preset_names

    found, cells = {}, "{:14s}{:>8}{:>7}{:>5}{:>8}{:>8}{:>9}{:>18}{:>14}"
    lines = [cells.format("preset", "layers", "heads", "kv", "width", "ffn", "vocab", "non-embedding M", "total M")]
    for name in preset_names():
        config = ModelConfig.preset(name)
        count = config.count_parameters()
        found[name] = {**count._asdict(), "total": count.total, "config": config.to_dict()}
        shape = (config.n_layers, config.n_heads, config.n_kv_heads, config.d_model, config.d_ff, config.vocab_size)
        lines.append(cells.format(name, *shape, f"{count.non_embedding / 1e6:.6f}", f"{count.total / 1e6:.6f}"))
    say(found, "\n".join(lines), as_json)
