"""Run the benchmarks that need no options: noise, attention, loss, loader."""

import runpy

NAMES = ("noise", "attention", "loss", "loader")

if __name__ == "__main__":
    for name in NAMES:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
