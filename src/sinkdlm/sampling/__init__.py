"""Text from a denoiser. loop.py has the loop, requests.py what is asked, unmasking.py the policies; drawing.py judges logits."""

from sinkdlm.sampling.batch import Access, Denoise
from sinkdlm.sampling.loop import Sampled, Step, gather, generate, requests_of, step, stream
from sinkdlm.sampling.requests import Request, State, start
from sinkdlm.sampling.unmasking import NAMED, Policy, policy_of

__all__ = [
    "NAMED",
    "Access",
    "Denoise",
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
