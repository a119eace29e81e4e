"""Adapters of peft that keep what was trained in full beside them: a new sink, sink logits, a gate."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

_FILE = "adapter_model.safetensors"


def save_adapter(model: Any, folder: str | Path) -> None:
    """Save a peft model in peft's form, with every other weight that requires a gradient; peft's own save leaves those out.

    `PeftModel.from_pretrained(base, folder)` reads all of it.
    """
    model.save_pretrained(folder)
    path = Path(folder) / _FILE
    found = load_file(path)
    for name, weight in model.named_parameters():
        kept = name.replace(f".{model.active_adapter}", "").replace(".modules_to_save", "")
        if weight.requires_grad and kept not in found:
            found[name] = weight.detach().cpu().contiguous()
    save_file(found, path, metadata={"format": "pt"})
