"""Random inputs of attention, and a watch for large tensors."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

RATIOS = ((2, 2), (6, 2), (7, 1))


def random_inputs(heads, kv_heads, n_sinks, tokens=33, batch=3, width=8, sink_rows=1, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    content = draw(batch, heads, tokens, width), draw(batch, kv_heads, tokens, width), draw(batch, kv_heads, tokens, width)
    return *content, draw(sink_rows, kv_heads, n_sinks, width), draw(sink_rows, kv_heads, n_sinks, width)


class LargestTensor(TorchDispatchMode):
    """Remember the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x.layout == torch.strided:
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out
