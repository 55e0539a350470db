"""What memory must hold, and what a wrong word is called."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtide.simulation import CheckFailedError, Shadow, SimulatedBand, draw_scenario
from kvtide.simulation.bands import simulated_bands
from kvtide.simulation.shadow import check_words


def bands() -> tuple[SimulatedBand, ...]:
    """Three bands or more."""
    scenario = next(
        scenario for scenario in map(draw_scenario, map(random.Random, range(50))) if len(scenario.bands) >= 3
    )
    return simulated_bands(scenario, scenario.layout())


def ids(*units: int) -> np.ndarray:
    return np.array(units, np.int64)


@pytest.mark.requirement("X1", "A5")
@pytest.mark.parametrize(
    ("word", "check", "words"),
    [
        ("a neighbour's", "lost_write", "write 2 of band 2"),
        ("zeros", "lost_write", "zero"),
        ("another band's", "cross_dtype_bytes", "write 3 of band 1"),
        ("a NaN", "cross_dtype_bytes", "memory that was never written"),
    ],
)
def test_a_wrong_word_says_whose_it_is(word: str, check: str, words: str) -> None:
    """Bytes of another type are worse than stale ones: they may be a NaN."""
    state, window, *_ = bands()
    shadow = Shadow(bands())
    shadow.bind(window.name, ids(4, 5), ids())
    everything = np.ones((2, window.words), np.bool_)
    shadow.write(window, ids(4, 5), everything, shadow.numbers(window, 2))
    alien = int(shadow.numbers(state, 1)[0])
    wrong = {
        "a neighbour's": int(shadow.words[window.name][5, 0]),
        "zeros": 0,
        "another band's": alien,
        "a NaN": 2**64 - 1,
    }[word]
    expected = shadow.words[window.name][[4]]
    found = expected.copy()
    check_words("nobody", window, ids(4), expected, found)
    found[0, 1] = wrong
    with pytest.raises(
        CheckFailedError, match=f"nobody finds {words} in band '{window.name}' virtual unit 4 word 1"
    ) as error:
        check_words("nobody", window, ids(4), expected, found)
    assert error.value.check == check


def test_words_belong_to_tokens_in_order_and_none_is_left_out() -> None:
    """A page is written token by token; together its tokens write every word."""
    for seed in range(60):
        scenario = draw_scenario(random.Random(seed))
        for band in simulated_bands(scenario, scenario.layout()):
            tokens = band.token_of_word
            assert (np.diff(tokens) >= 0).all()
            assert tokens[0] >= 0
            assert tokens[-1] == band.page_tokens - 1


def test_a_promise_is_kept_whole() -> None:
    """A unit that came unzeroed and is written in part would show its former tenant."""
    _, window, *_ = bands()
    shadow = Shadow(bands())
    shadow.bind(window.name, ids(3), ids(3))
    part = np.zeros((1, window.words), np.bool_)
    with pytest.raises(AssertionError, match="promise"):
        shadow.write(window, ids(3), part, shadow.numbers(window, 1))
    shadow.pay(window.name, ids(3))
    shadow.write(window, ids(3), part, shadow.numbers(window, 1))
    assert not shadow.words[window.name][3].any()
