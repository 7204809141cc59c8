"""What ranks tell each other comes back as it was said, and only what another rank can run is passed on."""

from __future__ import annotations

from array import array

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvariantError
from common.messages import LineRef
from ring.descriptor import FLAG_CANCEL, FLAG_SKIP, Entry, RingRequest
from worker.engine.rank_messages import Begin, Carried, Landed, News, Read, carried, digest, pack, unpack
from worker.structures import Request, Sampling, Shape, SharedPrefix

IDS = array("i", [5, 6, 7])
PLAIN = Request(LineRef("job", 3, 2), "/v1/completions", "m", 3, Sampling(8), None, IDS)
RICH = PLAIN._replace(
    ref=LineRef("job", 4, 1),
    sampling=Sampling(
        9, 0.5, 0.9, 40, (1 << 63) - 1, ("a", "b"), (2, 3), 0.1, 2, Shape(1.5, 0.1, 0.2, ((7, -1.5), (8, 2.0)), 3)
    ),
    shared=SharedPrefix("key", 2),
    tools=("one", "two"),
)


def entry(*items: object, flags: int = 0) -> Entry:
    requests = tuple(RingRequest(item, 16 * number, 3) for number, item in enumerate(items))
    return Entry(7, "batch", requests, 1 << 40, 64, 32, 3 * len(items), flags)


def test_a_request_crosses_with_all_that_decides_its_answer() -> None:
    """Of the two only the ids travel apart; places and numbers stay as rank 0 has them."""
    sent = carried(entry(PLAIN, RICH))
    assert sent.ids == IDS + IDS
    message = News((sent,))
    back = unpack(pack(message))
    assert back == message
    assert isinstance(back, News)
    requests = back.entries[0].entry.requests
    assert [type(one.item) for one in requests] == [Request, Request]
    assert [one.item for one in requests] == [PLAIN._replace(text=None), RICH._replace(text=None)]
    assert isinstance(requests[1].item, Request)
    assert isinstance(requests[1].item.sampling.shape, Shape)
    assert isinstance(requests[1].item.shared, SharedPrefix)


def test_a_cancel_names_lines_alone_and_a_skip_has_no_ids() -> None:
    """Neither is run anywhere."""
    cancel = carried(entry(PLAIN, RICH.ref, flags=FLAG_CANCEL))
    assert [one.item for one in cancel.entry.requests] == [PLAIN.ref, RICH.ref]
    skip = carried(entry(PLAIN, flags=FLAG_SKIP))
    assert (cancel.ids, skip.ids) == (array("i"), array("i"))
    for one in (cancel, skip):
        assert unpack(pack(News((one,)))) == News((one,))


@given(
    st.sampled_from([Begin(False), Begin(True), Landed(0, 0), Landed(1 << 40, 1 << 31), Read(-1), Read(9), News(())])
)
def test_every_kind_comes_back(message: Begin | Landed | Read | News) -> None:
    """As the same kind: kinds of the same fields are told apart."""
    back = unpack(pack(message))
    assert (type(back), back) == (type(message), message)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (PLAIN._replace(text=None), "without its ids"),
        (PLAIN._replace(guide=object()), "with a guide"),
        ("x", "carries str, not a Request"),
    ],
)
def test_what_other_ranks_cannot_run_is_not_passed_on(item: object, words: str) -> None:
    """It would be run by rank 0 alone."""
    with pytest.raises(InvariantError, match=words):
        carried(entry(item))
    with pytest.raises(InvariantError, match="no line"):
        carried(entry("x", flags=FLAG_CANCEL))


def test_what_nobody_says_is_an_error() -> None:
    """Both ends are one version."""
    with pytest.raises(InvariantError, match="'Farewell'"):
        unpack(msgpack.packb(("Farewell", 1)))


def test_a_digest_tells_orders_signs_and_lengths_apart() -> None:
    """Of 64-bit numbers."""
    found = {digest(numbers) for numbers in ([], [0], [0, 0], [1, 2], [2, 1], [-1, 2], [1 << 40], [1])}
    assert len(found) == 8
    assert Carried(entry(), IDS).ids == IDS
