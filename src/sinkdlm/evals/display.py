"""How far the answering of requests has come."""

from sinkdlm.data.display import Bar


class Display(Bar):
    """Work over counted items. done: items that were there already."""

    def __init__(self, what: str, total: int, done: int = 0, *, shown: bool = True) -> None:
        super().__init__(what, total, done, counts=True, shown=shown)

    def update(self, done: int, share: float = 0.0, under_way: int = 0) -> None:
        """share: how much of those under way is done too."""
        so_far = done + share * under_way
        per_second = (so_far - self._start) / self.seconds
        # Long documents on a CPU take minutes each, and 0.0/s says nothing.
        rate = f"{1 / per_second:.0f} s each" if 0 < per_second < 0.1 else f"{per_second:.1f}/s"
        more = f", {share:.0%} of the next{f' {under_way:,}' if under_way > 1 else ''}" if under_way else ""
        self.show(so_far, rate, f"{done:,} of {self.total:,} {self.what}{more}  {rate}")
