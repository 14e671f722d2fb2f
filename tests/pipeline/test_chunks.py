"""Many tensors travel in few messages of a bounded size, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pipetransformer.pipeline import chunks

SHAPES = st.lists(st.sampled_from([(), (0,), (1,), (3, 5), (0, 4), (7,), (64,)]), max_size=8)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def tensors_of(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    return [torch.randn(shape).mul(9).to(DTYPES[n % len(DTYPES)]) for n, shape in enumerate(shapes)]


@settings(deadline=None)
@given(SHAPES, st.integers(1, 300))
def test_what_is_unpacked_is_what_was_packed(shapes, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", limit)
        tensors = [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors_of(shapes)]
        sent = [chunk.clone() for chunk in chunks.packed(tensors)]
        assert all(chunk.numel() == limit for chunk in sent[:-1]) and all(0 < chunk.numel() <= limit for chunk in sent)
        arriving = iter(sent)
        received = list(chunks.unpacked([t.to("meta") for t in tensors], lambda buffer: buffer.copy_(next(arriving))))
    assert next(arriving, None) is None
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(received, tensors, strict=True))
    storages = [tensor.untyped_storage() for tensor in received]  # torch.save writes whole storages
    assert [storage.nbytes() for storage in storages] == [tensor.nbytes for tensor in tensors]


def test_a_tensor_is_given_as_soon_as_it_is_complete(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 8)
    tensors = [
        torch.arange(6, dtype=torch.uint8),
        torch.arange(6, dtype=torch.uint8),
        torch.arange(9, dtype=torch.uint8),
    ]
    arriving, count = chunks.packed(tensors), 0

    def receive(buffer: torch.Tensor) -> None:
        nonlocal count
        count += 1
        buffer.copy_(next(arriving))

    received = chunks.unpacked(tensors, receive)
    assert [(next(received).numel(), count) for _ in tensors] == [(6, 1), (6, 2), (9, 3)]


def test_the_buffer_of_a_chunk_is_used_again_after_the_next_one(monkeypatch):
    """So the sender may still be sending one chunk while the next one is copied."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4)
    packed = chunks.packed([torch.arange(12, dtype=torch.uint8)])
    first, second, third = next(packed), next(packed), next(packed)
    assert first.data_ptr() == third.data_ptr() != second.data_ptr()


def test_tensors_of_the_cpu_are_not_copied():
    tensors = tensors_of([(3, 5), ()])
    assert [t.data_ptr() for t in chunks.on_cpu(tensors)] == [t.data_ptr() for t in tensors]
