"""Turns that are taken by themselves: no fault ends them, a stop does."""

from __future__ import annotations

import threading

from sqlalchemy.exc import OperationalError

from service.loop import Loop
from tests.service.conftest import eventually


def test_no_fault_of_a_turn_is_the_last():
    faults = [OperationalError("SELECT", {}, Exception("gone")), ValueError("a fault")]
    turns = []

    def turn():
        turns.append(1)
        if faults:
            raise faults.pop()

    loop = Loop("turner", turn, 0.01)
    loop.start()
    eventually(lambda: len(turns) > 3, "turns go on")
    loop.stop(10)
    assert not any(thread.is_alive() for thread in loop._threads)


def test_a_turn_comes_at_once_when_there_is_more_to_do_or_somebody_says_so():
    left = [True, True]
    turns = []

    def turn():
        turns.append(1)
        return left.pop() if left else False

    loop = Loop("turner", turn, 3600)
    loop.start()
    eventually(lambda: len(turns) == 3, "the first, and one after each that found more")
    loop.wake()
    eventually(lambda: len(turns) == 4, "one more")
    loop.stop(10)
    assert loop.stopping


def test_a_stop_waits_no_longer_than_it_may_for_a_turn_that_hangs():
    hangs, release = threading.Event(), threading.Event()

    def turn():
        hangs.set()
        release.wait(30)

    loop = Loop("turner", turn, 0.01, threads=2)
    loop.start()
    assert hangs.wait(10)
    loop.stop(0.05)
    assert [thread.is_alive() for thread in loop._threads] == [True, True]
    release.set()
    loop.stop(10)
    assert not any(thread.is_alive() for thread in loop._threads)
