"""Whether the model fits the data, before a run writes anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcsgd.errors import UserError
from hpcsgd.models import build
from hpcsgd.train.trial import require_model_fits

META = torch.device("meta")


class Reading(nn.Module):
    """A model that reads the values of its input, which a tensor on the meta device does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


class Images:
    """Two images with one channel more than the model takes."""

    def trial(self) -> Tensor:
        return torch.ones(2, 4, 8, 8)


def test_a_users_own_model_is_tried_only_where_it_has_values() -> None:
    images: Any = Images()
    seen = list[Tensor]()

    class Task:
        def require(self, scores: Tensor, *_: object) -> None:
            seen.append(scores)

    task: Any = Task()
    require_model_fits(Reading(), images, task, "mine.Reading", META)
    assert not seen
    require_model_fits(Reading(), images, task, "mine.Reading", torch.device("cpu"))
    assert len(seen) == 1


def test_a_known_model_is_tried_on_the_meta_device_too() -> None:
    images: Any = Images()
    with META:
        model = build("resnet20", {})
    task: Any = None
    with pytest.raises(UserError, match=r"resnet20 does not take samples of shape \[4, 8, 8\]"):
        require_model_fits(model, images, task, "resnet20", META)
