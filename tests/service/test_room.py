"""Room for what holds a thread for long."""

from __future__ import annotations

import threading

import pytest

from service.room import Overloaded, Room
from tests.service.conftest import eventually


def test_those_beyond_the_waiting_are_refused_at_once_and_the_waiting_get_in():
    room = Room("doors are open", at_once=1, waiting=1)
    entered = threading.Event()

    def wait_for_room():
        with room.entered(30):
            entered.set()

    waiting = threading.Thread(target=wait_for_room)
    with room.entered(0):
        waiting.start()
        eventually(lambda: room._admitted._value == 0, "one waits")
        with pytest.raises(Overloaded, match="as many doors are open as may, and others wait"), room.entered(30):
            pytest.fail("there was room")
        assert not entered.is_set()
    waiting.join(30)
    assert entered.is_set()
    with room.entered(0):
        pass


def test_whoever_waits_too_long_is_refused_and_leaves_its_place():
    room = Room("doors are open", at_once=1, waiting=1)
    with room.entered(0):
        for _ in range(2):
            with pytest.raises(Overloaded), room.entered(0.01):
                pytest.fail("there was room")
