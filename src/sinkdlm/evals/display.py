"""How far the answering of requests has come."""

from sinkdlm.data.display import Bar


class Display(Bar):
    """Work over counted items. done: items that were there already."""

    def __init__(self, what: str, total: int, done: int = 0, *, shown: bool = True) -> None:
        super().__init__(what, total, done, counts=True, shown=shown)

    def update(self, done: int) -> None:
        per_second = (done - self._start) / self.seconds
        # Long documents on a CPU take minutes each, and 0.0/s says nothing.
        rate = f"{1 / per_second:.0f} s each" if 0 < per_second < 0.1 else f"{per_second:.1f}/s"
        self.show(done, rate, f"{done:,} of {self.total:,} {self.what}  {rate}")
