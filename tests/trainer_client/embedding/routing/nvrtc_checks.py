"""Compiles every variant of the CUDA sources; needs NVRTC and no GPU.

`python -m tests.trainer_client.embedding.routing.nvrtc_checks [--library libnvrtc.so.13] [--architecture sm_90]`
"""

import argparse
import ctypes
import itertools

from trainer_client import nvrtc
from trainer_client.balancing.redistribution import copies
from trainer_client.embedding.routing import cuda


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", help="NVRTC's file; PyTorch's by default")
    parser.add_argument("--architecture", action="append", help="sm_80, sm_90 and sm_100 by default")
    arguments = parser.parse_args()
    if arguments.library:
        library = ctypes.CDLL(arguments.library)
        nvrtc._nvrtc = lambda: library  # type: ignore[assignment]
    variants = 0
    for architecture in arguments.architecture or ("sm_80", "sm_90", "sm_100"):
        plain = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device"]
        assert b"copy_pieces" in nvrtc.compile_cubin(copies.source(), plain)
        variants += 1
        for world_size, keys, lengths, scatter in itertools.product(
            (1, 8, 256, 4096), (4, 8), (4, 8), ((512, 2), (256, 3))
        ):
            defines = cuda.macros(world_size, key_bytes=keys, length_bytes=lengths, weight_bytes=4, scatter=scatter)
            options = plain + [f"-D{name}={value}" for name, value in defines.items()]
            image = nvrtc.compile_cubin(cuda.source(), options)
            assert all(kernel.encode() in image for kernel in cuda._KERNELS)
            variants += 1
    print(f"{variants} variants compile")


if __name__ == "__main__":
    main()
