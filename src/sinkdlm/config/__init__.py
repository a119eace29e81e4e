"""What users write down: a model's fields, a recipe, presets, and the TOML they stand in."""
