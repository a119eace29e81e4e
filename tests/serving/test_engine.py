"""The engine alone: requests join and leave, and each gets its own tokens."""

import gc
import math
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engines import MASK, POLICIES, SECONDS, Owner, alone, request_of
from sinkdlm.errors import ModelError
from sinkdlm.kernels.cuda_graph import many_shapes
from sinkdlm.sampling import Request, policy_of
from sinkdlm.sampling.speculation import Speculator
from sinkdlm.serving.engine import (
    Capacity,
    ClosedError,
    Engine,
    ExpiredError,
    FairLock,
    Frame,
    QueueFullError,
    Ticket,
    Written,
    share_forwards,
)
from small_models import small_model


def hold(engine, gate):
    """The engine's thread waits for the gate."""
    inside = threading.Event()
    engine.query(lambda: (inside.set(), gate.wait(SECONDS)))
    assert inside.wait(SECONDS)


@pytest.fixture(scope="module")
def model():
    return small_model(seed=1, n_sinks=1)


@pytest.fixture
def make(model):
    made = []

    def one(**given):
        options = {name: given.pop(name) for name in ("deterministic", "lock", "stepped") if name in given}
        made.append(Engine(given.pop("of", model), Capacity(**given), **options))
        return made[-1]

    yield one
    for engine in made:
        assert engine.close(timeout=SECONDS)


def test_frames_are_of_every_step_where_a_forward_takes_several(make, model):
    engine = make()
    engine._adapter.speculator = Speculator()  # as many canvases as are asked for
    request = request_of("eos", 3, n_open=20)
    found = []
    for policy in (request.policy, replace(request.policy, speculate=4)):
        owner = Owner([replace(request, policy=policy)], frames=True)
        engine.submit(owner.ticket)
        owner.tokens()
        found.append([event for event in owner.events if isinstance(event, Frame)])
    plain, quick = found
    assert [frame.steps for frame in quick] == list(range(len(plain)))
    assert [frame.tokens for frame in quick] == [frame.tokens for frame in plain]
    for ours, theirs in zip(quick, plain, strict=True):
        torch.testing.assert_close(torch.tensor(ours.confidence), torch.tensor(theirs.confidence), equal_nan=True)


@pytest.mark.parametrize(("dtype", "deterministic"), [(torch.float64, False), (torch.float32, True)])
def test_requests_of_every_kind_together_write_what_each_writes_alone(make, dtype, deterministic):
    """float64, in which a batch changes no token; or any arithmetic, each row computed alone."""
    rows, model = [], small_model(seed=1, dtype=dtype, n_sinks=1)
    engine = make(of=model, rows=8, deterministic=deterministic, stepped=lambda n, _: rows.append(n))
    requests = [request_of(name, number) for number, name in enumerate([*POLICIES, *POLICIES])]
    owners = [Owner([request]) for request in requests]
    gate = threading.Event()
    hold(engine, gate)  # or the first could be done before the others come
    for owner in owners:
        engine.submit(owner.ticket)
    gate.set()
    for owner, request in zip(owners, requests, strict=True):
        first, written = request.canvas.index(MASK), owner.tokens()
        assert written == [alone(model, owner.as_written(request)).rows[0][first:]]
        assert not owner.ticket.without_cache
    assert max(rows) == 8
    assert sum(rows) > 2 * len(rows)


def test_a_request_that_joins_late_changes_nobody(make, model):
    engine = make()
    early, late = request_of("drawn", 2, n_open=30), request_of("blocks", 5)
    joined = threading.Event()
    first = Owner([early], progress=True, ends=lambda row, tokens: bool(joined.set()))
    engine.submit(first.ticket)
    assert joined.wait(SECONDS)
    second = Owner([late])
    engine.submit(second.ticket)
    for owner, request in ((second, late), (first, early)):
        assert owner.tokens() == [alone(model, request).rows[0][request.canvas.index(MASK) :]]


def test_rows_of_a_request_take_places_as_they_come_free(make, model):
    most = []
    engine = make(rows=2, stepped=lambda n, _: most.append(n))
    requests = [request_of("drawn", number) for number in range(5)]
    owner = Owner(requests)
    engine.submit(owner.ticket)
    assert owner.tokens() == [alone(model, request).rows[0][request.canvas.index(MASK) :] for request in requests]
    assert max(most) == 2


def test_tokens_of_a_forward_are_limited_and_a_long_row_holds_nobody_up(make):
    model, shapes = small_model(seed=1), []
    model.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    gate = threading.Event()
    engine = make(of=model, rows=8, tokens=40)
    hold(engine, gate)
    owners = [Owner([request_of("greedy", 0, n_open=n)]) for n in (9, 9, 9, 9, 60, 9)]
    for owner in owners:
        engine.submit(owner.ticket)
    gate.set()
    assert [len(owner.tokens()[0]) for owner in owners] == [9, 9, 9, 9, 60, 9]
    assert set(shapes[:3]) == {(4, 10), (1, 10), (1, 61)}  # one step


def test_steps_are_made_without_attention_that_plans_each_shape(make):
    """Each row that joins or leaves makes a new shape, and planning for it would delay all rows."""
    model, allowed = small_model(seed=1), []
    model.register_forward_pre_hook(lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled()))
    owner = Owner([request_of("greedy", 0)])
    make(of=model).submit(owner.ticket)
    owner.tokens()
    assert allowed
    assert not any(allowed)


def test_plans_come_back_when_the_last_one_has_left():
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    assert enabled()
    first, second = threading.Event(), threading.Event()

    def stay():
        with many_shapes:
            first.set()
            second.wait(SECONDS)

    thread = threading.Thread(target=stay)
    with many_shapes:
        thread.start()
        assert first.wait(SECONDS)
        with many_shapes:
            assert not enabled()
        assert not enabled()
    assert not enabled()  # the other thread is still inside
    second.set()
    thread.join(SECONDS)
    assert enabled()


def test_rows_share_a_forward_unless_padding_costs_more_than_another():
    def cut(*lengths):
        rows = [
            SimpleNamespace(
                state=SimpleNamespace(length=length, request=SimpleNamespace(block_size=None), policy=policy_of("llada"))
            )
            for length in lengths
        ]
        return [[row.state.length for row in part] for part in share_forwards(rows, 4096)]

    assert cut(7) == [[7]]
    assert cut(20, 10, 30) == [[10, 20, 30]]
    assert cut(*[10] * 20, 100) == [[10] * 20, [100]]
    assert cut(*[10] * 3, 100) == [[10, 10, 10, 100]]
    assert cut(5000, *[100] * 50) == [[100] * 40, [100] * 10, [5000]]
    assert cut(*[16] * 30, *[64] * 30, *[256] * 30) == [[16] * 30, [64] * 30, [256] * 16, [256] * 14]


@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_rows_at_different_blocks_share_forwards_with_their_caches(make, cache):
    """Texts of different lengths and ages: in a step, one forward of spans, and one of the rows that begin a block."""
    model, shapes, steps = small_model(seed=1, n_sinks=1, dtype=torch.float64), [], []
    engine, gate = make(of=model, stepped=lambda n, _: steps.append(n)), threading.Event()
    hold(engine, gate)
    requests = [replace(request_of(("blocks", "fast")[number % 2], number, n_open=9 + number), seed=number) for number in range(8)]
    requests = [replace(request, policy=replace(request.policy, cache=cache)) for request in requests]
    handle = model.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    owners = [Owner([request]) for request in requests]
    for owner in owners:
        engine.submit(owner.ticket)
    gate.set()
    written = [owner.tokens() for owner in owners]
    handle.remove()
    for owner, request, tokens in zip(owners, requests, written, strict=True):
        assert not owner.ticket.without_cache
        assert tokens == [alone(model, request).rows[0][request.canvas.index(MASK) :]]
    assert len(shapes) <= 2 * len(steps)
    assert (cache == "prefix") or (8, 4) in shapes  # all rows, one span each


def test_memory_of_caches_is_bounded(make):
    """A row waits until there is room for its cache; one that is larger than all room is written without, and says so."""
    model, together = small_model(seed=1, n_sinks=1, dtype=torch.float64), []
    config = model.config
    row = 2 * 2 * 8 * config.n_layers * config.n_kv_heads * config.head_dim * 16  # bytes of 16 tokens, twice
    engine, gate = make(of=model, cache_bytes=row * 2 * 4 // 3 + 4, stepped=lambda n, _: together.append(n)), threading.Event()
    hold(engine, gate)
    requests = [Request([1, *[MASK] * 15], policy_of("fast", block=4), MASK, seed=number) for number in range(5)]
    requests.append(Request([1, *[MASK] * 40], policy_of("fast", block=4), MASK, seed=9))
    owners = [Owner([request]) for request in requests]
    for owner in owners:
        engine.submit(owner.ticket)
    gate.set()
    written = [owner.tokens() for owner in owners]
    assert [owner.ticket.without_cache for owner in owners] == [False] * 5 + [True]
    for owner, request, tokens in zip(owners, requests, written, strict=True):
        assert tokens == [alone(model, owner.as_written(request)).rows[0][1:]]
    assert max(together) == 2
    guessing = policy_of("llada", block=4, cache="dual", speculate=4)  # each of its canvases would have a cache
    owner = Owner([Request([1, *[MASK] * 15], guessing, MASK, seed=10)])
    engine.submit(owner.ticket)
    assert owner.tokens()
    assert owner.ticket.without_cache


def test_progress_is_what_stays(make, model):
    """Tokens reported as final never change, for every policy; also where tokens are masked again."""
    engine = make()
    requests = [request_of(name, number) for number, name in enumerate(POLICIES)]
    owners = [Owner([request], progress=True, frames=True) for request in requests]
    for owner in owners:
        engine.submit(owner.ticket)
    steps = 0
    for owner, request in zip(owners, requests, strict=True):
        (final,) = owner.tokens()
        written = [event for event in owner.events if isinstance(event, Written)]
        assert [event.done for event in written] == [False] * (len(written) - 1) + [True]
        assert [len(event.tokens) for event in written] == sorted(len(event.tokens) for event in written)
        assert all(event.tokens == final[: len(event.tokens)] for event in written)
        frames = [event for event in owner.events if isinstance(event, Frame)]
        assert frames[0].tokens == list(request.canvas)
        assert all(math.isnan(sure) for sure in frames[0].confidence)
        expected = alone(model, owner.as_written(request))
        assert frames[-1].tokens == expected.rows[0]
        first = request.canvas.index(MASK)
        torch.testing.assert_close(torch.tensor(frames[-1].confidence), expected.confidence[0].float(), equal_nan=True)
        assert all(frame.tokens[:first] == list(request.canvas[:first]) for frame in frames)
        assert frames[-1].steps == expected.steps
        steps += len(frames)
    assert steps > 9 * 3


def test_a_text_ends_where_its_owner_says(make, model):
    engine = make()
    request = request_of("blocks", 3, n_open=20)
    whole = alone(model, request).rows[0][1:]
    owner = Owner([request], ends=lambda row, tokens: len(tokens) >= 6)
    engine.submit(owner.ticket)
    (tokens,) = owner.tokens()
    assert 6 <= len(tokens) < 12
    assert tokens == whole[: len(tokens)]


def test_a_full_queue_says_when_to_come_back(make):
    gate = threading.Event()
    engine = make(rows=1, waiting=2)
    hold(engine, gate)
    owners = [Owner([request_of("greedy", number)]) for number in range(3)]
    engine.submit(owners[0].ticket)
    engine.submit(owners[1].ticket)
    with pytest.raises(QueueFullError) as full:
        engine.submit(owners[2].ticket)
    assert 1 <= full.value.retry_after <= 60
    with pytest.raises(QueueFullError):
        engine.check_room()
    gate.set()
    owners[0].tokens()
    owners[1].tokens()
    engine.submit(owners[2].ticket)
    owners[2].tokens()


def test_whoever_leaves_makes_room_and_hears_nothing_more(make, model):
    """Cancel one request that runs and one that waits."""
    engine = make(rows=1, waiting=1)
    stepped, gate = threading.Event(), threading.Event()

    def pause(row, tokens):
        stepped.set()
        return not gate.wait(SECONDS)

    long = Owner([request_of("drawn", 1, n_open=60)], ends=pause)
    waiting = Owner([request_of("drawn", 2)])
    engine.submit(long.ticket)
    assert stepped.wait(SECONDS)
    engine.submit(waiting.ticket)
    engine.cancel(waiting.ticket)
    third = request_of("drawn", 4)
    last = Owner([third])
    engine.submit(last.ticket)  # the queue holds one
    engine.cancel(long.ticket)
    gate.set()
    assert last.tokens() == [alone(model, third).rows[0][third.canvas.index(MASK) :]]
    assert waiting._queue.empty()
    assert long._queue.empty()


def test_too_slow_is_told(make):
    gate = threading.Event()
    engine = make(rows=1, seconds=0.3)
    running = Owner([request_of("greedy", 1)])
    waiting = Owner([request_of("greedy", 2)])
    hold(engine, gate)
    engine.submit(running.ticket)
    engine.submit(waiting.ticket)
    time.sleep(0.5)
    gate.set()
    for owner in (running, waiting):
        assert isinstance(owner.wait(), ExpiredError)
    engine.capacity = replace(engine.capacity, seconds=SECONDS)
    again = Owner([request_of("greedy", 1)])
    engine.submit(again.ticket)
    again.tokens()


def test_who_fails_alone_fails_alone(make, model):
    """A request that breaks every step it is in: a forbidden token that no vocabulary has."""
    engine = make()
    broken = Request([1, *[MASK] * 4], policy_of("llada", suppressed=[400]), MASK)
    good = [request_of(name, number) for number, name in enumerate(POLICIES)]
    owners = [Owner([request]) for request in [*good[:4], broken, *good[4:]]]
    for owner in owners:
        engine.submit(owner.ticket)
    assert "suppressed" in str(owners.pop(4).wait())
    for owner, request in zip(owners, good, strict=True):
        written = owner.tokens()
        assert written == [alone(model, owner.as_written(request)).rows[0][request.canvas.index(MASK) :]]


@pytest.mark.parametrize("eos", [None, 3])
def test_rows_of_no_numbers_fail_alone(make, eos):
    """A prompt with a NaN embedding: its request fails with a ModelError, the others write on."""
    model = small_model(seed=1, n_sinks=1)
    policy = policy_of("llada", eos_id=eos, suppressed=[7])
    requests = [Request([token, *[MASK] * 6], policy, MASK, number=token) for token in (1, 7, 2)]
    expected = [alone(model, request).rows[0][1:] for request in requests]
    with torch.no_grad():
        model.embed.weight[7] = math.inf
    engine = make(of=model)
    owners = [Owner([request]) for request in requests]
    for owner in owners:
        engine.submit(owner.ticket)
    assert isinstance(owners[1].wait(), ModelError)
    assert [owners[place].tokens() for place in (0, 2)] == [[expected[0]], [expected[2]]]


def test_an_owner_that_raises_harms_itself_alone(make):
    engine = make()

    def fail(*_):
        raise RuntimeError("no")

    sulking = Ticket([request_of("greedy", 0)], fail)
    asking = Owner([request_of("greedy", 1)], ends=fail)
    good = Owner([request_of("greedy", 2)])
    for ticket in (sulking, asking.ticket, good.ticket):
        engine.submit(ticket)
    good.tokens()
    assert str(asking.wait()) == "no"


def test_closing_finishes_what_runs_and_what_waits(model):
    engine = Engine(model, Capacity(rows=2))
    requests = [request_of("drawn", number) for number in range(6)]
    owners = [Owner([request]) for request in requests]
    for owner in owners:
        engine.submit(owner.ticket)
    assert engine.close(timeout=SECONDS)
    for owner, request in zip(owners, requests, strict=True):
        assert owner.tokens() == [alone(model, request).rows[0][request.canvas.index(MASK) :]]
    late = Owner([requests[0]])
    with pytest.raises(ClosedError):
        engine.submit(late.ticket)
    with pytest.raises(ClosedError):
        engine.query(lambda: None)


def test_a_look_runs_between_steps_in_the_engines_thread(make):
    engine = make(queries=1)
    assert engine.query(lambda: threading.current_thread().name).result(SECONDS) == "engine"
    with pytest.raises(ZeroDivisionError):
        engine.query(lambda: 1 / 0).result(SECONDS)
    gate = threading.Event()
    hold(engine, gate)
    engine.query(lambda: 1)
    with pytest.raises(QueueFullError):
        engine.query(lambda: 2)
    gate.set()


def test_finished_rows_and_their_batches_go(make):
    engine = make()
    kept = []
    for number in range(6):
        owner = Owner([request_of("blocks", number)], progress=number % 2 == 0, ends=lambda row, tokens: len(tokens) > 4)
        kept += [weakref.ref(row.state) for row in owner.ticket.pending]
        engine.submit(owner.ticket)
        if number == 5:
            engine.cancel(owner.ticket)
        else:
            owner.tokens()
    gc.collect()
    deadline = time.monotonic() + SECONDS
    while any(state() is not None for state in kept) and time.monotonic() < deadline:
        time.sleep(0.01)
        owner = None
        gc.collect()
    assert [state() for state in kept] == [None] * 6


def test_turns_are_taken_in_the_order_of_asking():
    lock, order, inside = FairLock(), [], threading.Event()
    gate = threading.Event()

    def take(number):
        with lock:
            order.append(number)
            if number == 0:
                inside.set()
                gate.wait(SECONDS)

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=take, args=(number,)))
        threads[-1].start()
        if number == 0:
            assert inside.wait(SECONDS)
        while lock._next < number + 1:
            time.sleep(0.001)
    gate.set()
    for thread in threads:
        thread.join(SECONDS)
    assert order == [0, 1, 2, 3, 4]


def test_two_engines_share_a_device_by_turns(make, model):
    lock, busy, most = FairLock(), [0], [0]
    other = small_model(seed=2)

    def watch(of):
        def look():
            busy[0] += 1
            most[0] = max(most[0], busy[0])
            time.sleep(0.002)
            busy[0] -= 1

        return of.query(look)

    engines = [make(lock=lock), make(lock=lock, of=other)]
    requests = [request_of("drawn", number, n_open=20) for number in range(2)]
    owners = [Owner([request]) for request in requests]
    for engine, owner in zip(engines, owners, strict=True):
        engine.submit(owner.ticket)
    looks = [watch(engine) for engine in engines * 5]
    for look in looks:
        look.result(SECONDS)
    for owner, request, of in zip(owners, requests, (model, other), strict=True):
        assert owner.tokens() == [alone(of, request).rows[0][request.canvas.index(MASK) :]]
    assert most[0] == 1
