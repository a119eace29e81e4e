"""How the ranks of one start find each other in a store that may still hold the words of an earlier start.

torchrun keeps its store over restarts, and the counts of restarts that it tells differ between hosts, so a rank cannot know from
the environment which words are new. Here each brings a word of its own, and a roster counts only for those who find theirs in it.
"""

import json
import secrets
import time
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from sinkdlm.errors import TrainError

_PATIENCE = 600.0  # seconds for all ranks to come
_PAUSE = 0.02


def meet(store: Any, rank: int, size: int, patience: float = _PATIENCE) -> Any:
    """Waits for all ranks of this start and returns a part of the store that no earlier one has written to."""
    store.set(f"meet/hello/{rank}", own := secrets.token_hex(8))
    end = time.monotonic() + patience
    pause = _PAUSE * (1 + size / 64)
    name = _lead(store, size, end, pause) if rank == 0 else _follow(store, rank, size, own, end, pause)
    return PrefixStore(f"start/{name}", store)


def _lead(store: Any, size: int, end: float, pause: float) -> str:
    """Writes rosters of whoever said hello until everybody has agreed to one and the same."""
    hellos = [f"meet/hello/{rank}" for rank in range(size)]
    names: list[str] = []
    roster = name = ""
    while time.monotonic() < end:
        if store.check(hellos):
            found = [word.decode() for word in store.multi_get(hellos)]
            if found != names:
                names, name = found, secrets.token_hex(8)
                roster = json.dumps({"name": name, "ranks": names})
            if not store.check(["meet/roster"]) or store.get("meet/roster").decode() != roster:
                store.set("meet/roster", roster)
            if all(store.check([f"meet/agreed/{name}/{rank}"]) for rank in range(1, size)):
                store.set(f"meet/begin/{name}", "")
                return name
        time.sleep(pause)
    missing = [rank for rank in range(size) if not store.check([f"meet/agreed/{name}/{rank}"])]
    raise TrainError(f"ranks {', '.join(map(str, missing[1:9]))}: did not come within {_PATIENCE:g} s; see what they say")


def _follow(store: Any, rank: int, size: int, own: str, end: float, pause: float) -> str:
    """Agrees to every roster that has this rank's own word, until rank 0 says that one of them holds."""
    agreed = ""
    while time.monotonic() < end:
        if agreed and store.check([f"meet/begin/{agreed}"]):
            return agreed
        if store.check(["meet/roster"]):
            roster = json.loads(store.get("meet/roster"))
            if roster["name"] != agreed and len(roster["ranks"]) == size and roster["ranks"][rank] == own:
                agreed = roster["name"]
                store.set(f"meet/agreed/{agreed}/{rank}", "")
        time.sleep(pause)
    raise TrainError(f"rank {rank}: not all ranks came within {_PATIENCE:g} s; see what rank 0 says")
