"""The commands that look at recipes and presets: recipe list, recipe show, recipe schema, presets."""

import json

import typer

from sinkdlm.cli.loading import load_recipe, say
from sinkdlm.cli.options import Json, Overrides, RecipeFile

app = typer.Typer(help="Look at recipes.", rich_markup_mode=None, no_args_is_help=True)


@app.command("list")
def recipe_list(as_json: Json = False) -> None:
    """Name the recipes that come with the package: every command takes such a name in place of a file."""
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
    """Resolve a recipe (base, preset, overrides, defaults) and print it whole, as TOML."""
    resolved = load_recipe(recipe, overrides)
    say(resolved.to_dict(), resolved.to_toml().rstrip("\n"), as_json)


@app.command("schema")
def recipe_schema() -> None:
    """Print the JSON schema of recipes, for editors that complete and check TOML."""
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
