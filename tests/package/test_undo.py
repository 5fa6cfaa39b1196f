"""Contexts that undo their changes, wherever an interrupt comes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ampkit import _undo
from ampkit._undo import Undo, call


class Setting:
    """A value that a context changes."""

    value = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        with Undo() as undo:
            undo.note(setattr, self, "value", self.value)
            self.value += 1
            yield


def test_the_end_undoes_the_last_note_first() -> None:
    """R8: so it is, too, if an exception ends the context."""
    done: list[int] = []

    def fails() -> None:
        with Undo() as undo:
            undo.note(done.append, 1)
            undo.note(done.append, 2)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert done == [2, 1]
    assert not _undo.open_here.contexts


def test_what_went_well_stays() -> None:
    """R8: forgotten notes are not called."""
    done: list[int] = []
    with Undo() as undo:
        undo.note(done.append, 1)
        undo.forget()
    assert not done


def test_a_context_that_is_never_left_ends_with_the_call() -> None:
    """R8: an interrupt may come between the end of `__enter__` and the body."""
    setting = Setting()
    kept = []

    def entered() -> None:
        kept.append(setting.on())  # as a traceback keeps it
        kept[0].__enter__()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(entered)
    assert setting.value == 0
    with setting.on():
        kept.clear()  # the generator goes on, too late to undo anything
        assert setting.value == 1
    assert setting.value == 0
    assert not _undo.open_here.contexts


def test_a_context_around_the_call_stays() -> None:
    """R8: a call ends the contexts that were entered in it, and no others."""
    setting = Setting()
    with setting.on():
        assert call(lambda: setting.value) == 1
        with pytest.raises(KeyboardInterrupt):
            call(_interrupt)
        assert setting.value == 1
    assert setting.value == 0


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_while_something_is_undone(interrupts: int) -> None:
    """R8: the context around it, or the call, undoes again what the interrupt stopped."""
    done: list[str] = []

    def slow() -> None:
        if done.count("stopped") < interrupts:
            done.append("stopped")
            raise KeyboardInterrupt
        done.append("slow")

    def changed() -> None:
        with Undo() as undo:
            undo.note(done.append, "first")
            undo.note(slow)

    with pytest.raises(KeyboardInterrupt):
        call(changed)
    assert done == [*["stopped"] * interrupts, "slow", "first"]
    assert not _undo.open_here.contexts
