"""What users write: a model's fields, recipes, presets, and their TOML."""
