"""The modelled engine: times against numbers worked out by hand, and the protocol's promises."""

import asyncio

import pytest

from agentenv.errors import ModelError, UsageError
from agentenv.inference.protocol import Engine, GenerationRequest, SamplingParams
from agentenv.simulation.clock import VirtualLoop
from agentenv.simulation.engine import DecodeModel, SimulatedEngine


@pytest.fixture
def runner():
    loop = VirtualLoop()
    yield loop
    loop.stop()


def request(name, tokens, *, max_ids=10**6):
    return GenerationRequest(name, [tokens], SamplingParams(max_tokens=max_ids), seed=0)


async def timed(engine, name, tokens, *, after=0.0, **options):
    """(time at the end, generation)."""
    await asyncio.sleep(after)
    generation = await engine.generate(request(name, tokens, **options))
    return round(asyncio.get_running_loop().time(), 6), generation


def play(runner, *coroutines):
    async def together():
        return await asyncio.gather(*coroutines)

    return runner.call(together())


def test_it_fits_the_protocol_of_engines():
    assert isinstance(SimulatedEngine(), Engine)


def test_up_to_the_knee_sequences_do_not_slow_each_other(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1, knee=2))
    ends = play(runner, timed(engine, "a", 10), timed(engine, "b", 30))
    assert [end for end, _ in ends] == [1.0, 3.0]


def test_beyond_the_knee_sequences_share_the_engine(runner):
    # Knee 1: two of 10 tokens each decode at half speed until 2.0 s; then the third's last 10 tokens at full speed.
    engine = SimulatedEngine(DecodeModel(base_s=0.1, knee=1))
    ends = play(runner, timed(engine, "a", 10), timed(engine, "b", 20))
    assert [end for end, _ in ends] == [2.0, 3.0]


def test_a_late_sequence_slows_the_others_from_its_arrival(runner):
    # a alone to 1.0 s: 10 of 20 tokens. Then both at half speed: b's 5 tokens take to 2.0 s, when a has 15.
    engine = SimulatedEngine(DecodeModel(base_s=0.1, knee=1))
    ends = play(runner, timed(engine, "a", 20), timed(engine, "b", 5, after=1.0))
    assert [end for end, _ in ends] == [2.5, 2.0]


def test_four_sequences_on_a_knee_of_two(runner):
    # 4 active: 0.2 s a token. All have 10 tokens at 2.0 s, when two end; the other two go on at 0.1 s a token.
    engine = SimulatedEngine(DecodeModel(base_s=0.1, knee=2))
    lengths = {"a": 10, "b": 10, "c": 20, "d": 30}
    ends = play(runner, *(timed(engine, name, tokens) for name, tokens in lengths.items()))
    assert [end for end, _ in ends] == [2.0, 2.0, 3.0, 4.0]


def test_requests_beyond_the_batch_wait_in_order_of_arrival(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1, max_batch=1))
    ends = play(runner, timed(engine, "a", 10), timed(engine, "b", 5), timed(engine, "c", 20))
    assert [end for end, _ in ends] == [1.0, 1.5, 3.5]


def test_without_decode_time_a_reply_takes_none(runner):
    engine = SimulatedEngine()
    ((end, generation),) = play(runner, timed(engine, "a", 10**6))
    assert end == 0.0
    assert generation.finish_reason == "stop"


def test_a_reply_has_an_id_per_so_many_tokens(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1), tokens_per_id=100)
    for tokens, ids in ((1, 1), (100, 1), (101, 2), (1000, 10)):
        ((_, generation),) = play(runner, timed(engine, f"of-{tokens}", tokens))
        assert len(generation.token_ids) == len(generation.logprobs) == len(generation.policy_versions) == ids


def test_the_limit_on_ids_cuts_a_reply(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1), tokens_per_id=10)
    ((end, generation),) = play(runner, timed(engine, "a", 1000, max_ids=3))
    assert (end, len(generation.token_ids), generation.finish_reason) == (3.0, 3, "length")


def test_an_aborted_request_returns_what_it_has_and_its_place_is_free(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1, max_batch=1), tokens_per_id=1)

    async def abort():
        await asyncio.sleep(0.55)
        await engine.abort("a")
        await engine.abort("unknown")
        return engine.active

    (a_end, a), (b_end, b), active = play(runner, timed(engine, "a", 100), timed(engine, "b", 10), abort())
    assert (a_end, len(a.token_ids), a.finish_reason) == (0.55, 5, "abort")
    assert (b_end, len(b.token_ids), b.finish_reason) == (1.55, 10, "stop")
    assert active == 1
    assert engine.active == 0


def test_an_abort_gives_the_others_its_share(runner):
    # Both at half speed to 1.0 s: b has 5 of 20. Then alone: 15 tokens in 1.5 s.
    engine = SimulatedEngine(DecodeModel(base_s=0.1, knee=1))

    async def abort():
        await asyncio.sleep(1.0)
        await engine.abort("a")

    _, (end, _), _ = play(runner, timed(engine, "a", 100), timed(engine, "b", 20), abort())
    assert end == 2.5


def test_an_aborted_request_that_waits_returns_nothing(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1, max_batch=1), tokens_per_id=1)

    async def abort():
        await asyncio.sleep(0.5)
        await engine.abort("b")

    (a_end, _), (b_end, b), _ = play(runner, timed(engine, "a", 10), timed(engine, "b", 10), abort())
    assert (a_end, b_end, b.token_ids, b.finish_reason) == (1.0, 0.5, [], "abort")


def test_a_cancelled_request_frees_its_place(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1, max_batch=1))

    async def cancelled():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await engine.generate(request("a", 100))

    _, (end, _) = play(runner, cancelled(), timed(engine, "b", 10, after=0.1))
    assert end == 1.5
    assert engine.active == 0


def test_nothing_is_decoded_while_suspended(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1))

    async def pause():
        await asyncio.sleep(0.4)
        await engine.suspend()
        await asyncio.sleep(5.0)
        await engine.resume()

    (end, _), (late_end, _), _ = play(
        runner, timed(engine, "a", 10), timed(engine, "b", 10, after=1.0), pause()
    )
    assert (end, late_end) == (6.0, 6.4)


def test_suspended_without_decode_time_requests_wait_for_resume(runner):
    engine = SimulatedEngine()

    async def pause():
        await engine.suspend()
        await asyncio.sleep(5.0)
        await engine.resume()

    _, (end, generation) = play(runner, pause(), timed(engine, "a", 10, after=1.0))
    assert (end, len(generation.token_ids)) == (5.0, 1)


def test_each_id_has_the_version_that_sampled_its_token(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1), tokens_per_id=1)

    async def update():
        await asyncio.sleep(0.45)
        await engine.update_weights({}, 1)
        await asyncio.sleep(0.2)
        await engine.update_weights({}, 2)

    (_, a), (_, b), _ = play(runner, timed(engine, "a", 10), timed(engine, "b", 2, after=0.8), update())
    # Tokens begin at 0.0, 0.1, ...: the first with weights 1 begins at 0.5, the first with weights 2 at 0.7.
    assert a.policy_versions == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert b.policy_versions == [2, 2]
    assert engine.version == 2


def test_versions_of_long_ago_are_forgotten(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1))

    async def updates():
        for version in range(1, 200):
            await engine.update_weights({}, version)
            await engine.generate(request(f"r{version}", 3))

    runner.call(updates())
    assert len(engine._updates) == 1


def test_closed_it_fails_every_waiting_and_every_later_call(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1, max_batch=1))

    async def close():
        await asyncio.sleep(0.5)
        await engine.close()
        await engine.close()

    async def outcome(name):
        with pytest.raises(ModelError, match="closed"):
            await engine.generate(request(name, 100))
        return asyncio.get_running_loop().time()

    async def together():
        return await asyncio.gather(outcome("a"), outcome("b"), close())

    assert runner.call(together())[:2] == [0.5, 0.5]
    runner.call(outcome("c"))
    assert engine.active == 0


def test_an_id_in_use_is_refused(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1))

    async def twice():
        await asyncio.sleep(0.1)
        with pytest.raises(UsageError, match="running already"):
            await engine.generate(request("a", 5))

    play(runner, timed(engine, "a", 5), twice())


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"base_s": -1.0}, "base_s is -1.0"), ({"knee": 0}, "knee is 0"), ({"max_batch": 0}, "max_batch is 0")],
)
def test_a_speed_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DecodeModel(**settings)


def test_a_thousand_sequences_of_a_million_tokens_cost_events_by_the_sequence(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.001, knee=8), tokens_per_id=10**6)
    looks = 0
    look = engine._look

    def counted():
        nonlocal looks
        looks += 1
        look()

    engine._look = counted
    play(runner, *(timed(engine, f"r{number}", 10**6 + number) for number in range(1000)))
    # Work of a little over 10**9 tokens at 8 / 0.001 s.
    assert runner.now == pytest.approx(1e9 / 8000, rel=1e-3)
    assert looks < 5000


def test_a_crash_fails_what_is_in_flight_or_waits_and_what_comes_before_the_engine_is_back(runner):
    engine = SimulatedEngine(DecodeModel(base_s=0.1, knee=2, max_batch=2))
    told = []
    engine.watch(lambda: told.append((asyncio.get_running_loop().time(), engine.is_away)))

    async def outcome(name, *, after):
        try:
            return (await timed(engine, name, 10, after=after))[0]
        except ModelError as error:
            return str(error)

    async def crash():
        await asyncio.sleep(0.5)
        engine.crash(2.0)

    starts = {"a": 0.0, "b": 0.0, "waits": 0.1, "early": 2.0, "late": 3.0}
    *ends, _ = play(runner, *(outcome(name, after=after) for name, after in starts.items()), crash())
    crashed, away = "the simulated engine crashed", "the simulated engine is away"
    assert ends == [crashed, crashed, crashed, away, 4.0]
    assert told == [(0.5, True), (2.5, False)]


def test_a_turn_that_begins_after_an_update_has_its_version_whatever_still_runs_from_before(runner):
    engine = SimulatedEngine(DecodeModel(base_s=1.0), tokens_per_id=1)

    async def update():
        await asyncio.sleep(2.5)
        await engine.update_weights({}, 1)

    (_, old), (_, new), _ = play(runner, timed(engine, "a", 5), timed(engine, "b", 2, after=3.0), update())
    assert old.policy_versions == [0, 0, 0, 1, 1]
    assert new.policy_versions == [1, 1]
