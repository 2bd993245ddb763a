from __future__ import annotations

import torch

from hpcsgd.data import crop_and_flip


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def variations(image: torch.Tensor) -> set[bytes]:
    """Return all 162 crops, mirrored or not, of one padded image [C, H, W], computed one by one."""
    _, height, width = image.shape
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    crops = [padded[:, i : i + height, j : j + width] for i in range(9) for j in range(9)]
    return {piece.numpy().tobytes() for crop in crops for piece in (crop, crop.flip(2))}


def test_every_variation_and_no_other() -> None:
    image = torch.rand(2, 7, 5, generator=generator()) + 1
    varied = crop_and_flip(image.expand(4000, -1, -1, -1), generator())
    assert varied.shape == (4000, 2, 7, 5)
    assert {piece.contiguous().numpy().tobytes() for piece in varied} == variations(image)


def test_each_image_keeps_its_place() -> None:
    x = torch.arange(1.0, 51.0).view(-1, 1, 1, 1).expand(-1, 3, 9, 9)
    varied = crop_and_flip(x, generator())
    assert torch.equal(varied.amax(dim=(1, 2, 3)), torch.arange(1.0, 51.0))


def test_all_chance_is_the_generators() -> None:
    x = torch.rand(8, 3, 8, 8)
    torch.manual_seed(0)
    one = crop_and_flip(x, generator(1))
    torch.manual_seed(1)
    assert torch.equal(one, crop_and_flip(x, generator(1)))
    assert not torch.equal(one, crop_and_flip(x, generator(2)))
