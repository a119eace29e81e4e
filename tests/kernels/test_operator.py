"""Functions that the compiler takes whole, and that are called as they are elsewhere."""

import subprocess
import sys

import pytest
import torch

from sinkdlm.kernels import ops as operators
from sinkdlm.kernels.operator import operator


def test_a_call_does_not_load_the_compiler():
    code = """
import sys, torch
from sinkdlm.kernels import float8_ops as float8_operators
from sinkdlm.kernels import ops as operators
with torch.no_grad():
    operators.swiglu(torch.ones(2, 8))
    float8_operators.peak(torch.ones(2, 8))
print("torch._dynamo" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return operators.swiglu(gate_up) * 2

    @staticmethod
    def backward(ctx, grad):
        return operators.swiglu_backward(ctx.saved_tensors[0], grad * 2)[0]


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
        operators.swiglu(x).sum().backward()


def test_a_kernel_is_for_tensors_on_a_gpu():
    @operator("test_opaque_count")
    def count(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @count.kernel
    def _(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    with torch.no_grad():
        assert float(count(torch.zeros(()))) == float(count(x=torch.zeros(()))) == 1
        if torch.cuda.is_available():
            assert float(count(torch.zeros((), device="cuda"))) == 2
