"""The messages between daemon and GPU worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racerd.gpu.protocol import (
    MESSAGE_BYTES_MAX,
    Failed,
    ImportTarget,
    Message,
    Notice,
    ReadPage,
    decode,
    encode,
)

_numbers = st.integers(0, 2**63)
_texts = st.text(max_size=40)
_bytes = st.binary(max_size=300)
_messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(ImportTarget, request=_numbers, target=_numbers, size=_numbers),
    st.builds(
        ReadPage, request=_numbers, target=_numbers, offset=_numbers, skip=_numbers, take=_numbers,
        last_bytes=_numbers, slots=st.lists(_numbers, max_size=64).map(tuple), slab=_numbers,
        slab_offset=_numbers, key=_bytes, nonces=_bytes, tags=_bytes, crcs=_bytes,
        aad_head=_bytes, aad_tails=_bytes,
    ),
    st.builds(
        Failed, request=_numbers, code=_texts, message=_texts, hint=_texts, native=_numbers,
        frames=st.lists(_numbers, max_size=9).map(tuple),
    ),
    st.builds(
        Notice, scope=_texts, slab=_numbers, state=_texts, reason=_texts, text=_texts,
        seconds=st.floats(0, 1e6),
    ),
)  # fmt: skip


@given(_messages)
def test_what_was_encoded_is_decoded(message: Message) -> None:
    """R2: every message comes out as it went in."""
    assert decode(encode(message)) == message


@given(_messages, st.data())
def test_a_message_that_was_cut_is_refused(message: Message, data: st.DataObject) -> None:
    """R2: a part of a message is never taken for another one."""
    datagram = encode(message)
    cut = datagram[: data.draw(st.integers(0, len(datagram) - 1))]
    with pytest.raises(ValueError, match="not a message"):
        decode(cut)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    """R2: anything else raises ValueError and nothing else."""
    with pytest.raises(ValueError, match="not a message"):
        decode(noise)


def test_a_page_of_the_most_frames_fits() -> None:
    """R2: 256 frames with a long AAD are one datagram; more than a datagram is refused here."""
    read = ReadPage(
        request=2**40, target=1, offset=2**40, skip=0, take=2**26, last_bytes=2**18,
        slots=tuple(range(10**7, 10**7 + 256)), slab=0, slab_offset=0, key=bytes(32),
        nonces=bytes(12 * 256), tags=bytes(16 * 256), crcs=bytes(8 * 256), aad_head=bytes(2000),
        aad_tails=bytes(4 * 256),
    )  # fmt: skip
    assert len(encode(read)) < MESSAGE_BYTES_MAX // 2
    with pytest.raises(ValueError, match="at most"):
        encode(Failed(1, "x", "y" * MESSAGE_BYTES_MAX, "", 0))
