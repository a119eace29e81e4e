"""Turn requests into tokens with a denoiser: any callable that maps tokens (B, T) to logits (B, T, V).

How a request becomes tokens, in the order to read:

1. loop.py: `generate` makes a `Request` of each prompt and calls `step` until every request is done.
2. requests.py: a `State` plans its steps before each forward: the block, how many positions are predicted, how many committed.
3. batch.py: states that can share a forward become a `Batch`; its `advance` queries the denoiser (denoiser.py: any, through one
   interface) and commits tokens. prefix_cache.py keeps keys and values between steps.
4. unmasking.py: a `Policy` says which positions come first, how many in a step, and which are masked again.
5. drawing.py: logits become a token, a score and a probability for each position; logprobs.py keeps those that a request asks for.
6. constraint.py: where a language is given, what a row may still write; constrained_drawing.py chooses its tokens by that.

Nothing here knows a model, a tokenizer or a file.
"""

from sinkdlm.sampling.constraint import Automaton
from sinkdlm.sampling.denoiser import Denoise, DenoiserAdapter
from sinkdlm.sampling.loop import Sampled, Step, gather, generate, requests_of, step, stream
from sinkdlm.sampling.requests import Request, State, start
from sinkdlm.sampling.unmasking import NAMED, Policy, policy_of

__all__ = [
    "NAMED",
    "Automaton",
    "Denoise",
    "DenoiserAdapter",
    "Policy",
    "Request",
    "Sampled",
    "State",
    "Step",
    "gather",
    "generate",
    "policy_of",
    "requests_of",
    "start",
    "step",
    "stream",
]
