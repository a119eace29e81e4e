"""Custom operators: opaque to the compiler, called directly elsewhere."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from comparing import random
from sinkdlm.kernels import ops
from sinkdlm.kernels.operator import Operator, operator


def test_a_call_does_not_load_the_compiler():
    code = """
import sys, torch
from sinkdlm.kernels import float8_ops, ops
with torch.no_grad():
    ops.swiglu(torch.ones(2, 8))
    float8_ops.swiglu_float8(torch.ones(2, 8), None)
print("torch._dynamo" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return ops.swiglu(gate_up) * 2

    @staticmethod
    def backward(ctx, grad):
        return ops.swiglu_backward(ctx.saved_tensors[0], grad * 2)[0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_compiler_takes_it_whole():
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        seen.extend(str(n.target) for m in graph.modules() if hasattr(m, "graph") for n in m.graph.nodes)
        return graph.forward

    given = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = torch.compile(Doubled.apply, backend=backend, fullgraph=True)(given)
    assert any("sinkdlm.swiglu" in name for name in seen), seen
    wanted = torch.nn.functional.silu(given[:, :4]) * given[:, 4:] * 2
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(x.square().sum(), given)[0] for x in (found, wanted)]
    torch.testing.assert_close(*grads)


def test_with_gradients_a_backward_that_nobody_has_written_is_refused():
    x = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="sinkdlm"):
        ops.swiglu(x).sum().backward()


@pytest.mark.gpu
def test_a_kernel_is_for_tensors_on_a_gpu():
    def count(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    count.__name__ = "test_operator_count"
    counted = operator(lambda: SimpleNamespace(test_operator_count=lambda x: x + 2))(count)
    with torch.no_grad():
        assert float(counted(torch.zeros(()))) == float(counted(x=torch.zeros(()))) == 1
        if torch.cuda.is_available():
            assert float(counted(torch.zeros((), device="cuda"))) == 2


GIVEN = {
    "weight_gradient": lambda: (random(16, 8, dtype=torch.bfloat16), random(16, 24, dtype=torch.bfloat16), torch.float32),
    "swiglu": lambda: (random(2, 3, 8),),
    "swiglu_backward": lambda: (random(2, 3, 8), random(2, 3, 4)),
    "rotate_heads": lambda: (random(2 * 9 + 3, 8, 8), random(1, 9, 1, 4), random(1, 9, 1, 4), random(1, 2, 2, 8), 2, 4, 0.3),
    "rotate_sinks": lambda: (random(9 + 3, 8, 8), random(1, 2, 1, 4), random(1, 2, 1, 4), 9, 4, False),
    "merge_flat": lambda: (random(2, 9, 4, 2), of_heads(4), by_token(2, 9, 4), random(1, 2, 2, 8), random(3, 4, 8)),
    "add_norm": lambda: (random(2, 3, 7), random(2, 3, 7, dtype=torch.bfloat16), random(7), 1e-5, torch.bfloat16),
    "add_norm_backward": lambda: (*(random(2, 3, 7) for _ in range(3)), random(7), 1e-5, torch.bfloat16),
    "join_heads": lambda: (of_heads(4), of_heads(2), of_heads(2), random(1, 9, 1, 4), random(1, 9, 1, 4)),
    "merge_flat_backward": lambda: (
        *(random(2 * 9 + 3, 4, 8), [of_heads(4), of_heads(2), of_heads(2)]),
        [of_heads(4), random(2 * 9 + 3, 4, 8, seed=1), by_token(2, 9, 4), random(2, 9, 4, 2)],
        *([random(1, 2, 2, 8) for _ in range(2)], [random(1, n, 1, 4) for n in (9, 9, 2, 2)], False, 0.3),
    ),
}


def of_heads(n):
    """Heads in the model's memory layout."""
    return random(2, 9, n, 8).transpose(1, 2)


def by_token(batch, tokens, heads):
    """A log-sum-exp in the memory layout of a CPU's attention."""
    return random(batch, tokens, heads).transpose(1, 2)


def test_every_operator_is_checked():
    assert set(GIVEN) == {name for name, found in vars(ops).items() if isinstance(found, Operator)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GIVEN)
def test_operators_keep_the_rules_of_torch(name):
    """The compiler is told the true shapes, strides and dtypes."""
    torch.library.opcheck(getattr(ops, name).op, GIVEN[name](), test_utils=("test_schema", "test_faketensor"))
