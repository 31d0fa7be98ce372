"""Fingerprints of parameters: they detect any change of 8 bytes, and a comparison reads the device once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zeroaccel.zero import param_check
from zeroaccel.zero.layout import FlatLayout
from zeroaccel.zero.param_check import WriteDetector, fingerprint
from zeroaccel.zero.param_unit import FlatBuffer
from zeroaccel.zero.storage.placement import BufferPlan


@pytest.mark.parametrize("words", [1, 7, 64, 1000])
def test_every_changed_bit_of_a_word_shows(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(param_check, "_WORDS", 64)  # several pieces
    data = torch.randint(-(2**62), 2**62, (words,), generator=torch.Generator().manual_seed(words))
    plain = fingerprint(data)
    for place in {0, words // 2, words - 1}:
        for bit in (1, 1 << 31, -(1 << 63)):
            changed = data.clone()
            changed[place] ^= bit
            assert fingerprint(changed) != plain, f"bit {bit} of word {place}"
    if words > 1:
        assert fingerprint(data.flip(0)) != plain


def test_an_empty_tensor_has_a_fingerprint() -> None:
    assert fingerprint(torch.empty(0)).tolist() == [0]


def test_all_parameters_are_compared_in_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    params = tuple(nn.Parameter(torch.randn(50)) for _ in range(5))
    layout = FlatLayout.build([(f"p{index}", (50,)) for index in range(5)], 1)
    plan = BufferPlan("b", 0, layout, params, torch.float32, (0,) * len(params), persistent=True)
    buffer = FlatBuffer(plan, torch.device("cpu"))
    buffer.full.copy_(torch.randn(layout.numel))
    detector = WriteDetector()
    reads: list[int] = []
    real = param_check.read_values
    monkeypatch.setattr(param_check, "read_values", lambda tensor: reads.append(tensor.numel()) or real(tensor))
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("the host waits for the device"))
    for index in range(5):
        detector.enter(buffer, index, writes=index == 4)
    assert detector.changed([(buffer, index) for index in range(5)]) == [False] * 5
    assert reads == [4], "the parameter with a permitted write was compared"
    buffer.full[layout.slots[2].start + 3] += 1
    buffer.full[layout.slots[4].start] += 1
    assert detector.changed([(buffer, index) for index in range(5)]) == [False, False, True, False, False]
    assert len(reads) == 2
    assert detector.changed([(buffer, 4)]) == [False]
    assert len(reads) == 2
