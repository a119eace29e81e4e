"""lm-eval's command line with our model in it: `python -m sinkdlm.cli.lm_eval --model sinkdlm --model_args pretrained=CKPT ...`.

lm-eval knows the models of its own table alone.
"""

import functools
import sys
from collections.abc import Mapping
from typing import Any

from sinkdlm.cli.loading import choose_device, load_model
from sinkdlm.errors import EvalError, UserError


@functools.cache
def register() -> None:
    """Add `sinkdlm` to lm-eval's table; `lm_eval.simple_evaluate(model="sinkdlm", model_args=...)` finds it then."""
    from sinkdlm.evals.harness import HarnessLM

    # isort: split
    from lm_eval.api.registry import register_model
    from lm_eval.utils import simple_parse_args_string

    @register_model("sinkdlm")
    class SinkDLM(HarnessLM):
        @classmethod
        def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> HarnessLM:
            return open_model(simple_parse_args_string(arg_string), additional_config)

        @classmethod
        def create_from_arg_obj(cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None) -> HarnessLM:
            return open_model(arg_dict, additional_config)


def open_model(asked: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> Any:
    """Load what --model_args names: pretrained, dtype, device, seed, batch_tokens, and the settings of `sinkdlm eval`."""
    import torch

    from sinkdlm.evals.harness import HarnessLM
    from sinkdlm.evals.settings import settings_for

    given = dict(asked)
    checkpoint, dtype, device = (given.pop(name, None) for name in ("pretrained", "dtype", "device"))
    seed, budget = given.pop("seed", 0), given.pop("batch_tokens", None)
    if device is None and torch.cuda.is_available():
        device = (others or {}).get("device")  # cuda:0, where nobody asked
    if checkpoint is None:
        raise EvalError("--model_args: no pretrained=CKPT: a checkpoint, or anything that `convert` reads")
    settings_for("", given)  # before the model is read
    return HarnessLM.of(load_model(str(checkpoint), choose_device(device), dtype), seed=seed, budget=budget, **given)


def main() -> None:
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except UserError as failure:
        print(f"sinkdlm: {failure}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
