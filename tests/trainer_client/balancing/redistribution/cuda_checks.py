"""Copies on a GPU against plain indexing on the host, bit by bit; for CUDA's checkers too.

`[compute-sanitizer --tool memcheck] python -m tests.trainer_client.balancing.redistribution.cuda_checks [--few]`
"""

import argparse
from unittest import mock

import numpy as np
import torch

from benchmarks.redistribution_check import bytes_of, random_batch
from benchmarks.references.redistribution import gather_samples
from trainer_client.balancing.redistribution import copies, pick, warm_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true", help="a tenth of the rounds")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    warm_up(device)
    compared = 0
    for seed in range(4 if parser.parse_args().few else 40):
        rng = np.random.default_rng(seed)
        batches = [random_batch(rng, int(count)) for count in rng.integers(0, 60, 3)]
        chosen = [np.flatnonzero(rng.random(batch.num_samples) < 0.6) for batch in batches]
        wanted = [(index, int(sample)) for index, samples in enumerate(chosen) for sample in samples]
        expected = gather_samples(batches, wanted)
        with mock.patch.object(copies, "PIECE_BYTES", (1, 40, 4096, 1 << 20)[seed % 4]):
            found = pick([batch.to(device) for batch in batches], chosen)
        for leaf, one, other in zip(expected.structure.leaves, found.tensors, expected.tensors, strict=True):
            assert bytes_of(one) == bytes_of(other), f"{leaf.path}, seed {seed}"
            compared += 1
    print(f"{compared} tensors equal those of plain indexing")


if __name__ == "__main__":
    main()
