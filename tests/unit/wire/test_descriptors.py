"""Which descriptors belong to which head (R5). Tokens are letters here."""

from __future__ import annotations

import pytest

from racerd.errors import ProtocolError
from racerd.wire.descriptors import DESCRIPTORS_PER_HEAD_MAX, DescriptorLedger


def test_they_belong_to_the_head_that_starts_in_the_receive() -> None:
    """R5: a whole head with its descriptors in one receive."""
    ledger: DescriptorLedger[str] = DescriptorLedger()
    ledger.arrived("a", head_starts=True)
    assert ledger.head_ended(bytes_remain=False) == ("a",)
    assert ledger.release() == ()


def test_a_head_keeps_them_until_its_last_piece_came() -> None:
    """R5: the head's first bytes carried them, its end comes in later receives."""
    ledger: DescriptorLedger[str] = DescriptorLedger()
    ledger.arrived("ab", head_starts=True)
    ledger.settle()
    for _ in range(2):
        ledger.arrived("", head_starts=False)
        ledger.settle()
    ledger.arrived("", head_starts=False)
    assert ledger.head_ended(bytes_remain=False) == ("a", "b")


def test_they_are_carried_to_the_head_that_starts_last() -> None:
    """R5, F67: a plain head and the start of the next one in one receive."""
    ledger: DescriptorLedger[str] = DescriptorLedger()
    ledger.arrived("a", head_starts=True)
    assert ledger.head_ended(bytes_remain=True) == ()
    assert ledger.head_ended(bytes_remain=True) == ()
    ledger.settle()
    ledger.arrived("", head_starts=False)
    assert ledger.head_ended(bytes_remain=False) == ("a",)


def test_each_of_two_heads_gets_its_own() -> None:
    """R5: what the first head brought earlier is not mixed with what came with its last bytes."""
    ledger: DescriptorLedger[str] = DescriptorLedger()
    ledger.arrived("a", head_starts=True)
    ledger.settle()
    ledger.arrived("b", head_starts=False)
    assert ledger.head_ended(bytes_remain=True) == ("a",)
    assert ledger.head_ended(bytes_remain=False) == ("b",)


def test_in_the_middle_of_a_head_they_are_nobodys() -> None:
    """R5: no head starts in those bytes."""
    for ends in (False, True):
        ledger: DescriptorLedger[str] = DescriptorLedger()
        ledger.arrived("a", head_starts=True)
        ledger.settle()
        ledger.arrived("b", head_starts=False)
        with pytest.raises(ProtocolError) as caught:
            ledger.head_ended(bytes_remain=False) if ends else ledger.settle()
        assert caught.value.code == "descriptor_unexpected"
        assert ledger.release() == ("a", "b")


def test_a_head_has_no_more_than_the_limit() -> None:
    """R5: a fixed number per head."""
    ledger: DescriptorLedger[int] = DescriptorLedger()
    with pytest.raises(ProtocolError, match="more than 4 descriptors"):
        ledger.arrived(range(DESCRIPTORS_PER_HEAD_MAX + 1), head_starts=True)
    assert ledger.release() == (0, 1, 2, 3, 4)


def test_carried_ones_count() -> None:
    """R5: three that wait for the head's end and two that came with it are too many."""
    ledger: DescriptorLedger[str] = DescriptorLedger()
    ledger.arrived("abc", head_starts=True)
    ledger.settle()
    with pytest.raises(ProtocolError, match="more than 4 descriptors"):
        ledger.arrived("de", head_starts=False)
    assert ledger.release() == ("a", "b", "c", "d", "e")


def test_a_truncated_control_message_is_refused() -> None:
    """F69: the kernel dropped some; which of them is unknown."""
    ledger: DescriptorLedger[str] = DescriptorLedger()
    with pytest.raises(ProtocolError):
        ledger.arrived("a", head_starts=True, truncated=True)
    assert ledger.release() == ("a",)
