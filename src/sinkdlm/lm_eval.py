"""Run lm-eval's command line with our model in it: `python -m sinkdlm.lm_eval --model sinkdlm --model_args pretrained=CKPT ...`.

lm-eval knows the models in its own table alone. Importing this module adds `sinkdlm` to it, for `lm_eval.simple_evaluate`.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from sinkdlm.cli.loading import choose_device, load_model
from sinkdlm.errors import EvalError, UserError
from sinkdlm.evals.harness import HarnessLM
from sinkdlm.evals.settings import settings_for

# isort: split
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.utils import simple_parse_args_string


@register_model("sinkdlm")
class SinkDLM(HarnessLM):
    """`--model sinkdlm`. Its arguments: pretrained, dtype, device, seed, batch_tokens, and the settings of `sinkdlm eval`."""

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> HarnessLM:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None) -> HarnessLM:
        given = dict(arg_dict)
        checkpoint, dtype = given.pop("pretrained", None), given.pop("dtype", None)
        asked = (additional_config or {}).get("device") if torch.cuda.is_available() else None  # cuda:0, where nobody asked
        device = given.pop("device", None) or asked
        seed, budget = given.pop("seed", 0), given.pop("batch_tokens", None)
        if checkpoint is None:
            raise EvalError("--model_args: no pretrained=CKPT: a checkpoint, or anything that `convert` reads")
        settings_for("", given)  # before the model is read
        return cls.of(load_model(str(checkpoint), choose_device(device), dtype), seed=seed, budget=budget, **given)


def main() -> None:
    try:
        cli_evaluate()
    except UserError as failure:
        sys.stderr.write(f"sinkdlm: {failure}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
