"""Requests of every policy, and owners that wait for an engine's answers."""

import queue
from dataclasses import replace

from sinkdlm.sampling import Request, gather, policy_of, start, step
from sinkdlm.serving.engine import Over, Ticket, Written

MASK, EOS, SECONDS = 11, 3, 120

POLICIES = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "blocks": {"block": 4, "temperature": 0.7},
    "fast": {"config": "fast", "block": 4, "temperature": 0.5},
    "threshold": {"threshold": 0.3},
    "ancestral": {"config": "smdm-origin", "steps": 5, "temperature": 1.0},
    "remask": {"config": "smdm-origin", "steps": 8, "remask": "cap", "remask_rate": 0.3, "temperature": 1.0},
    "guided": {"guidance": 1.5, "steps": 3},
    "eos": {"eos_id": EOS, "temperature": 1.0},
    "speculating": {"speculate": "auto", "draft": "tree", "temperature": 1.0},
}


def request_of(name, number, n_open=9, **more):
    options = dict(POLICIES[name])
    policy = policy_of(options.pop("config", "llada"), **options)
    prompt = [number % 10, 4, 7][: 1 + number % 3]
    return Request([*prompt, *[MASK] * (n_open + number % 4)], policy, MASK, seed=number, **more)


def alone(model, request, **given):
    """Run a request by itself, in the plain loop."""
    (state,) = start([request])
    with model.inference():
        while not state.done:
            step([state], model.denoiser(), **given)
    return gather([state])


class Owner:
    """The owner of a ticket: collects its events and waits for the last."""

    def __init__(self, requests, **wanted):
        self.events, self._queue = [], queue.Queue()
        self.ticket = Ticket(requests, self._queue.put, **wanted)

    def wait(self):
        while not (self.events and isinstance(self.events[-1], Over)):
            self.events += self._queue.get(timeout=SECONDS)
        return self.events[-1].failure

    def as_written(self, request):
        """The request with the policy by which it was written: without a cache where there is no room."""
        if not self.ticket.without_cache or request.policy.cache == "none":
            return request
        return replace(request, policy=replace(request.policy, cache="none"))

    def tokens(self):
        assert self.wait() is None
        done = {event.row: event.tokens for event in self.events if isinstance(event, Written) and event.done}
        return [done[row] for row in sorted(done)]
