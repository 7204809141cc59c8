"""The ring's books hold under every sequence of taking, giving back, cancelling and wrapping (R3, R4, R5, R6)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import InvariantError
from ring.accounting import Accounting, OversizeError, Placement, reached, word_of
from ring.stall_control import PaddingForgotten


class RingBooks(RuleBasedStateMachine):
    """The books against a plain model: a list of live entries and the owner of every byte of the arena."""

    @initialize(
        capacity=st.integers(1, 96),
        entries=st.integers(2, 24),
        sequence=st.sampled_from([1, 2**32 - 5, 2**32, 2**40 - 3]),
        position=st.integers(0, 2**33),
    )
    def begin(self, capacity: int, entries: int, sequence: int, position: int) -> None:
        self.capacity = capacity
        self.books = Accounting(capacity, entries, first_sequence=sequence, first_position=position)
        self.owner: list[int | None] = [None] * capacity
        self.live: list[tuple[int, int, int, int, int]] = []  # sequence, position, length, padding, tokens
        self.expected = sequence
        self.resolved = self.items = 0

    @rule(length=st.integers(0, 96), tokens=st.integers(0, 50), urgent=st.booleans())
    def take(self, length: int, tokens: int, urgent: bool) -> None:
        """A batch comes: where it lands nobody lives, in one piece, next in order."""
        if length > self.capacity:
            with pytest.raises(OversizeError, match=f"{length} bytes.*ring of {self.capacity}.*--ring-mib"):
                self.books.take(length, tokens, 1, urgent=urgent)
            return
        before = self.books.figures()
        placement = self.books.fit(length, urgent=urgent)
        taken = self.books.take(length, tokens, 1, urgent=urgent)
        assert (taken is None) == (placement is None), "fit and take must agree"
        if taken is None or placement is None:
            assert self.books.figures() == before, "backpressure must leave the books alone"
            assert self.live, "an empty ring must accept any batch up to its capacity (R5)"
            return
        assert taken == (self.expected, placement.position, placement.padding)
        self.expected += 1
        self.items += 1
        offset = taken.position % self.capacity
        assert length == 0 or offset + length <= self.capacity, "a payload must be in one piece"
        for byte in range(offset, offset + length):
            assert self.owner[byte] is None, "a live batch was overwritten"
            self.owner[byte] = taken.sequence
        self.live.append((taken.sequence, taken.position, length, taken.padding, tokens))

    def _leave(self, count: int) -> None:
        for sequence, position, length, _, _ in self.live[:count]:
            offset = position % self.capacity
            for byte in range(offset, offset + length):
                assert self.owner[byte] == sequence
                self.owner[byte] = None
        del self.live[:count]

    @precondition(lambda self: self.live)
    @rule()
    def give_back(self) -> None:
        """The oldest entry was read: its length and its padding come back."""
        sequence, _, length, padding, _ = self.live[0]
        assert self.books.give_back(sequence) == length + padding
        self._leave(1)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        """The consumed word moved by several entries, across the 32-bit turn too."""
        count = data.draw(st.integers(0, len(self.live)))
        assert self.books.give_back_to(word_of(self.live[0][0] - 1 + count)) == count
        self._leave(count)

    @rule(ahead=st.integers(1, 2**31))
    def foreign_word(self, ahead: int) -> None:
        """A consumed word beyond what was published is a bug, and is said to be one."""
        with pytest.raises(InvariantError, match="outside of"):
            self.books.give_back_to(word_of(self.expected - 1 + ahead))

    @precondition(lambda self: len(self.live) > 1)
    @rule()
    def give_back_out_of_order(self) -> None:
        """The second entry may not be given back before the first."""
        with pytest.raises(InvariantError, match="oldest live one"):
            self.books.give_back(self.live[1][0])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        """A batch is cancelled before the engine took it."""
        index = data.draw(st.integers(0, len(self.live) - 1))
        self.books.skip(self.live[index][0])
        self.live[index] = (*self.live[index][:4], 0)

    @rule(count=st.integers(0, 8))
    def resolve(self, count: int) -> None:
        """Results arrive; never more than there were questions."""
        if self.resolved + count > self.items:
            with pytest.raises(InvariantError, match="resolved"):
                self.books.resolve(count)
            return
        self.books.resolve(count)
        self.resolved += count

    @invariant()
    def books_agree(self) -> None:
        """taken - returned = live, at every step, and every other book equals the model's."""
        if not hasattr(self, "books"):
            return
        figures = self.books.figures()
        assert figures.taken - figures.returned == figures.live
        assert figures.live == sum(length + padding for _, _, length, padding, _ in self.live) <= self.capacity
        assert figures.padding_live == sum(padding for _, _, _, padding, _ in self.live)
        assert figures.tokens_pending == sum(tokens for *_, tokens in self.live)
        assert figures.items_unresolved == self.items - self.resolved
        assert figures.entries_live == len(self.live) == self.books.entries_live
        assert figures.entries_taken - figures.entries_returned == len(self.live)
        assert [e.sequence for e in self.books.live()] == [e[0] for e in self.live]
        assert self.books.bytes_free == self.capacity - figures.live

    @invariant()
    def credit_is_exact(self) -> None:
        """What credit promises is accepted; one byte or one entry more is not."""
        if not hasattr(self, "books"):
            return
        entries, length = self.books.credit()
        if entries:
            assert self.books.fit(length) is not None
            if length < self.capacity:
                assert self.books.fit(length + 1) is None
        else:
            assert self.books.fit(0) is None

    @invariant()
    def finding_is_exact(self) -> None:
        """Full with nothing in it is found when, and only when, it is so (R6)."""
        if not hasattr(self, "books"):
            return
        idle = self.books.finding(engine_idle=True)
        pending = any(tokens for *_, tokens in self.live)
        assert (idle is not None) == (self.items > self.resolved and not pending)
        assert self.books.finding(engine_idle=False) is None


RingBooks.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestRingBooks = RingBooks.TestCase


def _empty_at(books_class: type[Accounting], capacity: int, offset: int) -> Accounting:
    books = books_class(capacity, 8)
    if offset:
        taken = books.take(offset)
        assert taken is not None
        books.give_back(taken.sequence)
    return books


def test_an_empty_ring_accepts_every_length_at_every_offset() -> None:
    """R5: wherever earlier work left an idle ring, the next batch fits, up to one as large as the ring."""
    capacity = 48
    for offset in range(capacity):
        for length in range(capacity + 1):
            books = _empty_at(Accounting, capacity, offset)
            taken = books.take(length, tokens=length, items=1)
            assert taken is not None, f"{length} refused by an empty ring at {offset}"
            assert length == 0 or taken.position % capacity + length <= capacity
            books.give_back(taken.sequence)
            figures = books.figures()
            assert figures.taken == figures.returned
            assert figures.live == figures.padding_live == 0


def test_control_without_the_empty_case_a_ring_refuses_for_ever() -> None:
    """The control of R5: padding to the wrap point alone leaves an empty ring that no large batch will ever enter."""

    class NeverStartsOver(Accounting):
        def fit(self, length: int, *, urgent: bool = False) -> Placement | None:
            placement = super().fit(length, urgent=urgent)
            return None if placement is not None and placement.skipped else placement

    capacity = 48
    refused = [
        offset for offset in range(capacity) if _empty_at(NeverStartsOver, capacity, offset).take(capacity) is None
    ]
    assert refused == list(range(1, capacity))


def test_forgotten_padding_is_caught_by_the_identity() -> None:
    """R4: were the padding lost again, the first give-back after a wrap would raise, not the 62,400th item stall."""

    class OnlyForgets(Accounting):
        _freed_by = PaddingForgotten._freed_by

    books = OnlyForgets(100, 8)
    first, second = books.take(60), books.take(20)
    assert first is not None
    assert second is not None
    books.give_back(first.sequence)
    wrapped = books.take(30)
    assert wrapped is not None
    assert wrapped.padding == 20
    books.give_back(second.sequence)
    with pytest.raises(InvariantError, match="books disagree"):
        books.give_back(wrapped.sequence)


@pytest.mark.parametrize("book", ["_held", "_padding_live", "_tokens_pending", "_next"])
def test_an_audit_finds_any_book_that_was_bent(book: str) -> None:
    """R4: every book is compared with the entries themselves when figures are read."""
    books = Accounting(100, 8)
    books.take(40, tokens=10, items=1)
    books.audit()
    setattr(books, book, getattr(books, book) + 1)
    with pytest.raises(InvariantError, match="books disagree"):
        books.audit()


def test_a_batch_larger_than_the_ring_is_refused_by_name() -> None:
    """A document longer than the ring: its user reads how long it is, what the ring holds and which flag to raise."""
    books = Accounting(1 << 20, 8)
    with pytest.raises(OversizeError, match=r"3145728 bytes .* ring of 1048576: set --ring-mib to 3 or more"):
        books.fit(3 << 20)
    assert books.figures().taken == 0


def test_entries_are_kept_for_cancellations() -> None:
    """A table full of work still takes the cancellations that would stop it: one entry in eight is theirs."""
    books = Accounting(1 << 20, 16)
    while books.take(64, 16, 1) is not None:
        pass
    assert books.credit()[0] == 0
    assert books.entries_live == 14
    assert books.take(0, urgent=True) is not None
    assert books.take(0, urgent=True) is not None
    assert books.take(0, urgent=True) is None


@pytest.mark.parametrize(
    ("word", "value", "holds"),
    [(5, 5, True), (6, 5, True), (4, 5, False), (2, 2**32 - 2, True), (2**32 - 2, 2, False), (0, 2**31, False)],
)
def test_words_compare_around_the_32_bit_turn(word: int, value: int, holds: bool) -> None:
    """After four thousand million batches the word begins again at 0, and 2 is past 4,294,967,294."""
    assert reached(word, value) is holds


def test_a_finding_names_the_holder_of_every_descriptor() -> None:
    """R6: whoever reads the log line knows how much is stuck, and who has it."""
    books = Accounting(128, 8)
    books.take(64, tokens=0, items=3)
    found = books.finding(engine_idle=True, waiting_items=2, holder_of=lambda sequence: f"engine {sequence}")
    assert found is not None
    assert (found.items_unresolved, found.bytes_held, found.bytes_free, found.entries_free) == (5, 64, 64, 7)
    assert found.line() == (
        "ring stalled: 5 items unresolved, 0 tokens pending, engine idle; "
        "64 bytes held, 64 free, 7 entries free; held by #1 64+0 B by engine 1"
    )


def test_impossible_sizes_and_unknown_entries_are_refused() -> None:
    """A bug elsewhere must stop here, before it bends the books."""
    for capacity, entries in ((0, 8), (64, 1), (64, 2**31)):
        with pytest.raises(InvariantError, match="a ring needs"):
            Accounting(capacity, entries)
    books = Accounting(64, 8)
    with pytest.raises(InvariantError, match="not live"):
        books.skip(1)
    with pytest.raises(InvariantError, match="oldest live one is none"):
        books.give_back(1)
    with pytest.raises(InvariantError, match="resolved"):
        books.resolve(-1)


@given(
    wants=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 9), st.integers(0, 3)), max_size=12),
    given_back=st.integers(0, 12),
    position=st.integers(0, 2000),
)
def test_a_burst_is_taken_as_one_after_another_would_be(
    wants: list[tuple[int, int, int]], given_back: int, position: int
) -> None:
    """R3, R4: many batches under one change of the books end where single ones do, wraps and refusals included."""
    many, single = (Accounting(1024, 8, first_position=position) for _ in range(2))
    for books in (many, single):
        for length in (300, 200):
            books.take(length, 1, 1)
        if given_back % 2:
            books.give_back(1)
    one_by_one = []
    for want in wants:
        taken = single.take(*want)
        if taken is None:
            break
        one_by_one.append(taken)
    assert many.take_all(wants) == one_by_one
    assert many.figures() == single.figures()
    if one_by_one and given_back:
        word = word_of(one_by_one[0].sequence)
        assert many.give_back_to(word) == single.give_back_to(word)
        assert many.figures() == single.figures()
