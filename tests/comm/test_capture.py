"""Tests of the refusal to communicate while CUDA captures a graph, as far as possible without a GPU."""

from __future__ import annotations

import pytest
import torch

from hpcsgd.comm.streams import captured


def test_only_a_stream_of_cuda_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert captured(torch.device("cuda", 0))
    assert not captured(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not captured(torch.device("cuda", 0))
