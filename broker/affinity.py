"""rules: lines that begin alike go to one worker (H5's half here): who has which beginning, and which line is next.

A session *has* a key (``common.prefixes``) when it holds or lately held a line with it. Of one window it gets, in this
order: lines of keys it has, the newest first; lines of keys that nobody has, and those without one; lines of keys that
others have, the longest queue first. So nobody idles for the sake of a key. Within a key lines go in their order, and
the head of a window is passed over a bounded number of times. What is searched for one line is bounded too. Decides
neither whose turn it is nor how much is given.
"""

from __future__ import annotations

from itertools import islice

from broker.state import HAS_IT, HELPS, PASSED_OVER, UNOWNED, Line, Session, State, Window
from common import limits


def own(state: State, session: Session, key: int) -> None:
    """The session has this key from now on; of too many it loses the one it was given longest ago."""
    if not key:
        return
    if key in session.keys:
        session.keys.move_to_end(key)
        return
    session.keys[key] = None
    state.owners[key] = state.owners.get(key, 0) + 1
    if len(session.keys) > limits.KEYS_A_SESSION_MAX_COUNT:
        _disown(state, session.keys.popitem(last=False)[0])


def forget(state: State, session: Session) -> None:
    """The session is gone: its keys are anybody's again."""
    for key in session.keys:
        _disown(state, key)
    session.keys.clear()


def _disown(state: State, key: int) -> None:
    state.owners[key] -= 1
    if not state.owners[key]:
        del state.owners[key]


def own_keys(session: Session, window: Window) -> list[int]:
    """Keys of the session that wait in the window, newest last: the stack that ``choose`` works on for one quantum."""
    return [key for key in session.keys if key in window.groups]


def choose(state: State, session: Session, window: Window, stack: list[int]) -> tuple[Line, int]:
    """The line of a window (which has one) that the session gets next, and why. Takes nothing yet."""
    head = window.head
    if head.passed >= limits.PASSED_OVER_MAX_COUNT:
        return head, PASSED_OVER
    while stack:
        line = window.first(stack[-1])
        if line is not None:
            return line, HAS_IT
        stack.pop()
    if _free(state, session, head.prefix):
        return head, UNOWNED
    near = list(islice(window.groups, limits.KEYS_SEARCHED_MAX_COUNT))
    free = next((key for key in near if _free(state, session, key)), None)
    if free is not None:
        return window.group_head(free), UNOWNED
    return window.group_head(max(near, key=window.waiting)), HELPS


def _free(state: State, session: Session, key: int) -> bool:
    return key not in state.owners or key in session.keys


def chosen(state: State, session: Session, window: Window, line: Line, why: int, stack: list[int]) -> None:
    """The session gets ``line``; still in the window. Who is only given it because its time had come does not go on
    with its key: that would leave two workers with one document for good."""
    if line is not window.head:
        window.head.passed += 1
    line.why = why
    if line.prefix and why != PASSED_OVER:
        own(state, session, line.prefix)
        if not stack or stack[-1] != line.prefix:
            stack.append(line.prefix)
