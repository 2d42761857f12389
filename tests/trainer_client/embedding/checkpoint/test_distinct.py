from pathlib import Path

import pytest
import torch

from trainer_client.embedding.checkpoint.files import find_repeated


@pytest.mark.parametrize("limit", [100, 10_000])
def test_the_repeated_key_is_found_whatever_fits_into_memory(limit: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(limit)
    keys = torch.cat([torch.arange(-200, 200) * 2**40, torch.tensor([2**63 - 1, -(2**63)])])
    keys = keys[torch.randperm(keys.numel(), generator=generator)]
    for key in keys[::80].tolist():
        pieces = [*keys.split(97), torch.tensor([key])]
        assert find_repeated(iter(pieces), keys.numel() + 1, tmp_path, limit=limit) == key
    assert find_repeated(iter(keys.split(97)), keys.numel(), tmp_path, limit=limit) is None
    assert find_repeated(iter(()), 0, tmp_path, limit=limit) is None
    assert list(tmp_path.iterdir()) == []
