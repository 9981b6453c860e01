"""The invariants that catch most engine bugs, on real (small) models through the real engine.

In deterministic mode they hold bit for bit on the CPU: log-probabilities are compared with ==.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.engine import Engine
from penstock.errors import RequestError
from penstock.layers.inputs import StateCache
from penstock.types import Request
from small_models import (
    SHALLOW_FAMILIES,
    SHALLOW_MOE,
    drain,
    logprobs_of,
    make_engine,
    prompt,
    request,
    run,
    tokens_of,
)

pytestmark = pytest.mark.bitwise

LENGTHS = (1, 63, 64, 65, 200)


@pytest.fixture(params=SHALLOW_FAMILIES)
def every_config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHALLOW_FAMILIES[request.param]


# A hybrid of dense layers handles its state like one of experts: all tests of it are slow.
KINDS_OF_CACHE = ["hybrid_moe", pytest.param("hybrid_dense", marks=pytest.mark.slow), "llama"]


@pytest.fixture(params=KINDS_OF_CACHE)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHALLOW_FAMILIES[request.param]


def mixed_requests(**sampling: Any) -> list[Request]:
    return [request(f"r{n}", prompt(n, seed=n), **sampling) for n in LENGTHS]


def alone(config: dict[str, Any], one: Request, **settings: Any) -> Any:
    return logprobs_of(run(make_engine(config, **settings), one)[one.id])


def test_any_batch_equals_alone(every_config: dict[str, Any]) -> None:
    together = run(make_engine(every_config), *mixed_requests())
    for one in mixed_requests():
        assert logprobs_of(together[one.id]) == alone(every_config, one)


def test_chunked_prefill_equals_one_prefill(every_config: dict[str, Any]) -> None:
    whole = run(make_engine(every_config, max_step_tokens=4096), *mixed_requests())
    for budget in (64, 100, 192):
        chunked = run(make_engine(every_config, max_step_tokens=budget), *mixed_requests())
        for id in whole:
            assert logprobs_of(chunked[id]) == logprobs_of(whole[id])


def test_restored_prefix_equals_fresh_prefill(config: dict[str, Any]) -> None:
    engine = make_engine(config)
    head = prompt(200)
    run(engine, request("first", head, boundaries=(0, 70, 150)))
    for name, tail, cached in (("longer", prompt(90, 1), 192), ("same", (), 192)):
        one = request(name, head + tail)
        deltas = run(engine, one)[name]
        assert deltas[0].num_cached_tokens == cached
        assert logprobs_of(deltas) == alone(config, one, prefix_cache=False)


def test_a_next_turn_gives_what_a_fresh_prefill_gives(config: dict[str, Any]) -> None:
    """Keys of the earlier reply were decoded, and with states they round differently."""
    engine = make_engine(config)
    said = tokens_of(run(engine, request("first", prompt(50), max_tokens=90))["first"])
    one = request("next", (*prompt(50), *said, *prompt(9, 2)))
    assert logprobs_of(run(engine, one)["next"]) == alone(config, one, prefix_cache=False)


def test_divergent_prompt_restores_nearest_checkpoint() -> None:
    engine = make_engine(SHALLOW_MOE)
    run(engine, request("first", prompt(300), boundaries=(0, 70, 200)))
    one = request("second", prompt(300)[:150] + prompt(100, 1))
    deltas = run(engine, one)["second"]
    assert deltas[0].num_cached_tokens == 64  # the message start at 70, down to its page
    assert logprobs_of(deltas) == alone(SHALLOW_MOE, one, prefix_cache=False)


def test_a_place_that_was_learned_gives_what_a_fresh_prefill_gives(config: dict[str, Any]) -> None:
    """A document and different questions: the third resumes where the first two diverged."""
    engine, document = make_engine(config), prompt(600)
    for number in range(3):
        one = request(f"r{number}", (*document, 100 + number, *prompt(30, number)))
        deltas = run(engine, one)[one.id]
        assert logprobs_of(deltas) == alone(config, one, prefix_cache=False)
    assert deltas[0].num_cached_tokens == 576


def test_states_in_float16_hardly_change_replies() -> None:
    """Also if a prompt is cut or found in the cache, with states stored in between."""
    settings: dict[str, Any] = {"deterministic": False, "state_dtype": "float16"}
    engine, whole = (
        make_engine(SHALLOW_MOE, **settings),
        make_engine(SHALLOW_MOE, deterministic=False),
    )
    cut = make_engine(SHALLOW_MOE, max_step_tokens=64, **settings)
    assert 2 * state_bytes(engine) == state_bytes(whole)
    for name in ("first", "again"):
        one = request(name, prompt(200, 3), max_tokens=4)
        expected = [token.logprob for token in logprobs_of(run(whole, one)[name])]
        for other in (engine, cut):
            said = [token.logprob for token in logprobs_of(run(other, one)[name])]
            assert said != expected
            assert said == pytest.approx(expected, abs=0.02)


def state_bytes(engine: Engine) -> int:
    caches = engine.runner.caches
    return sum(cache.recurrent[0].nbytes for cache in caches if isinstance(cache, StateCache))


def test_overlapped_steps_change_nothing(config: dict[str, Any]) -> None:
    requests = mixed_requests(end_token_ids=tuple(range(0, 320, 9)), max_tokens=40)
    plain = run(make_engine(config, overlap=False), *requests)
    overlapped = run(make_engine(config, overlap=True, max_step_tokens=128), *requests)
    for id in plain:
        assert logprobs_of(overlapped[id]) == logprobs_of(plain[id])
        assert overlapped[id][-1].finish == plain[id][-1].finish


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_preempted_equals_undisturbed(config: dict[str, Any], overlap: bool) -> None:
    """Recomputing a prefix may round differently from decoding it, so tokens are compared, not
    bits.
    """
    requests = [
        request(f"r{i}", prompt(60 + i, i), max_tokens=100, seed=i, temperature=0.7)
        for i in range(4)
    ]
    calm = run(make_engine(config), *requests)
    tight = make_engine(config, max_model_len=192, memory_gb=tight_budget(config), overlap=overlap)
    crowded = run(tight, *requests)
    assert tight.stats().num_preemptions > 0
    for one in requests:
        assert tokens_of(crowded[one.id]) == tokens_of(calm[one.id])


def tight_budget(config: dict[str, Any]) -> float:
    """Memory for about five pages: two sequences of 160 tokens do not fit beside each other."""
    kv = 2 * config["num_key_value_heads"] * config["head_dim"] * 4 * 64
    layers = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    page = kv * layers.count("full_attention")
    if "linear_num_value_heads" not in config:
        return 6.5 * page / 1e9
    heads, k, v = (
        config[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim")
    )
    channels = 2 * config["linear_num_key_heads"] * k + heads * v
    slot = layers.count("linear_attention") * 4 * (heads * k * v + 3 * channels)
    return 2 * 6 * slot / 1e9 if 6 * slot > 6.5 * page else 13 * page / 1e9


def test_same_seed_same_text_whatever_the_batch(config: dict[str, Any]) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 11}
    together = run(make_engine(config), *mixed_requests(**sampling))
    for one in mixed_requests(**sampling):
        assert logprobs_of(together[one.id]) == alone(config, one)
    other = run(make_engine(config), *mixed_requests(**{**sampling, "seed": 12}))
    assert any(tokens_of(other[id]) != tokens_of(together[id]) for id in together)


def test_two_engines_in_one_process_do_not_meet() -> None:
    first, second = make_engine(SHALLOW_MOE), make_engine(SHALLOW_MOE, weights_seed=1)
    one = request("x", prompt(100))
    first.submit(one)
    second.submit(one)
    for _ in range(5):
        first.step()
        second.step()
    mine, theirs = drain(first)["x"], drain(second)["x"]
    assert (
        tokens_of(mine)
        == tokens_of(run(make_engine(SHALLOW_MOE), one)["x"])[-len(tokens_of(mine)) :]
    )
    assert tokens_of(mine) != tokens_of(theirs)


def test_n_replies_share_the_prompt(config: dict[str, Any]) -> None:
    engine = make_engine(config)
    siblings = [request(f"s-{i}", prompt(500), temperature=1.0, seed=i) for i in range(4)]
    deltas = run(engine, *siblings)
    assert sum(deltas[one.id][0].num_cached_tokens for one in siblings) == 3 * 448
    for one in siblings:
        assert logprobs_of(deltas[one.id]) == alone(config, one)


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_returns_every_page_and_slot(config: dict[str, Any], overlap: bool) -> None:
    engine = make_engine(config, max_step_tokens=128, overlap=overlap)
    before = engine.stats()
    for one in mixed_requests(max_tokens=50):
        engine.submit(one)
    for _ in range(4):
        engine.step()
    for one in mixed_requests():
        engine.abort(one.id)
    ends = [deltas[-1].finish for deltas in drain(engine).values()]
    after = engine.stats()
    assert ends == ["abort"] * len(LENGTHS)
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert (after.num_free_pages, after.num_free_slots) == (
        before.num_free_pages,
        before.num_free_slots,
    )


def test_end_tokens_stop_and_min_tokens_delays_them(config: dict[str, Any]) -> None:
    free = tokens_of(run(make_engine(config), request("x", prompt(20)))["x"])
    deltas = run(make_engine(config), request("x", prompt(20), end_token_ids=(free[3],)))["x"]
    cut = free.index(free[3]) + 1
    assert tokens_of(deltas) == free[:cut]
    assert deltas[-1].finish == "stop"
    later = run(
        make_engine(config), request("x", prompt(20), end_token_ids=(free[3],), min_tokens=8)
    )["x"]
    assert free[3] not in tokens_of(later)[:8]
    assert len(tokens_of(later)) >= 8


def test_logit_bias_and_penalties_act(config: dict[str, Any]) -> None:
    biased = run(make_engine(config), request("x", prompt(20), logit_bias={5: 100.0}))["x"]
    assert set(tokens_of(biased)) == {5}
    punished = run(
        make_engine(config),
        request("x", prompt(20), logit_bias={5: 90.0, 6: 89.0}, frequency_penalty=2.0),
    )["x"]
    assert {5, 6} == set(tokens_of(punished))
    assert tokens_of(punished).count(6) >= 4  # each 5 costs 2 points, so they take turns


def test_a_row_without_penalties_is_untouched_by_a_neighbour_with_them(
    config: dict[str, Any],
) -> None:
    plain = request("plain", prompt(30))
    greedy = alone(config, plain)
    noisy = request(
        "noisy", prompt(40), repetition_penalty=1.5, presence_penalty=1.0, temperature=1.0, seed=3
    )
    engine = make_engine(config)
    together = run(engine, noisy, plain)
    assert logprobs_of(together["plain"]) == greedy
    assert logprobs_of(together["noisy"]) == alone(config, noisy)


def test_ids_outside_the_vocabulary_are_refused_and_harm_no_other_request(
    config: dict[str, Any],
) -> None:
    engine = make_engine(config)
    engine.submit(request("good", prompt(30)))
    for bad in (
        request("a", (1, 320)),
        request("b", (-1, 2)),
        request("c", (1,), logit_bias={999: 1.0}),
    ):
        with pytest.raises(RequestError):
            engine.submit(bad)
    assert logprobs_of(drain(engine)["good"]) == alone(config, request("good", prompt(30)))
