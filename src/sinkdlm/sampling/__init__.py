"""Text from a denoiser: loop.py has the loop, requests.py the plans, unmasking.py the policies; drawing.py scores candidates."""

from sinkdlm.sampling.batch import Denoise, DenoiserAdapter
from sinkdlm.sampling.loop import Sampled, Step, gather, generate, requests_of, step, stream
from sinkdlm.sampling.requests import Request, State, start
from sinkdlm.sampling.unmasking import NAMED, Policy, policy_of

__all__ = [
    "NAMED",
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
