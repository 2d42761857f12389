"""Compiling CUDA source with the compiler library that PyTorch's CUDA wheels bring, and launching what comes out.

NVRTC needs no compiler or headers at the user's site, gives machine code for exactly the GPU at hand, and, unlike
Triton, leaves shared memory and warp votes to the kernel. The image is kept on disk (`EVENKEEL_CACHE_DIR`, else
`$XDG_CACHE_HOME/evenkeel`, else `~/.cache/evenkeel`), so that only the first process ever compiles.
"""

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_MAX_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CudaError(RuntimeError):
    """A call of the CUDA driver or of NVRTC failed."""


def _library_paths(name: str) -> list[str]:
    torch_root = Path(torch.__file__).parent
    roots = [torch_root / "lib", *sorted((torch_root.parent / "nvidia").glob("*/lib"))]
    if home := os.environ.get("CUDA_HOME"):
        roots.append(Path(home) / "lib64")
    paths = [str(path) for root in roots for path in sorted(root.glob(f"{name}*")) if "builtins" not in path.name]
    return [name, *paths]


@cache
def _nvrtc() -> ctypes.CDLL:
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    tried = _library_paths(f"libnvrtc.so.{major}")
    for path in tried:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CudaError(f"NVRTC for CUDA {major} is not installed (tried {', '.join(tried)}); install nvidia-cuda-nvrtc")


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return library


def _check(code: int, call: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{call} failed with CUDA error {code}: {(text.value or b'unknown').decode()}")


def compile_cubin(source: str, options: Sequence[str]) -> bytes:
    """Compiles CUDA C++ to a device image.

    Args:
        source: The source text.
        options: NVRTC options, `--gpu-architecture=sm_NN` among them.

    Raises:
        CudaError: If the source does not compile; with the compiler's log.
    """
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"evenkeel.cu", 0, None, None):
        raise CudaError("nvrtcCreateProgram failed")
    try:
        arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"NVRTC could not compile with {' '.join(options)}:\n{log.value.decode()}")
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def cache_directory() -> Path:
    """Where compiled images are kept."""
    if chosen := os.environ.get("EVENKEEL_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "evenkeel"


def cached_cubin(source: str, options: Sequence[str]) -> bytes:
    """As `compile_cubin`, from the disk cache if the same source was compiled with the same options before."""
    identity = "\0".join([source, *options, str(torch.version.cuda)]).encode()
    path = cache_directory() / f"{hashlib.sha256(identity).hexdigest()}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        image = compile_cubin(source, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(image)
        Path(file.name).replace(path)
    except OSError:
        pass  # a read-only home costs a compilation per process, nothing more
    return image


class Module:
    """Kernels of one source on one device, which must be the current one.

    Args:
        source: CUDA C++ source text.
        names: The kernels to look up.
        defines: Macros.
        device: The device's index.
    """

    def __init__(self, source: str, names: Sequence[str], defines: dict[str, str], device: int) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", "-default-device"]
        options += [f"-D{name}={value}" for name, value in defines.items()]
        self._image = cached_cubin(source, options)
        self._functions: dict[str, ctypes.c_void_p] = {}
        torch.cuda.current_stream(device).synchronize()  # makes the device's context exist and current
        module = ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), self._image), "cuModuleLoadData")
        limit = ctypes.c_int()
        _check(
            _driver().cuDeviceGetAttribute(ctypes.byref(limit), _MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device),
            "cuDeviceGetAttribute",
        )
        for name in names:
            function = ctypes.c_void_p()
            _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
            static = ctypes.c_int()
            _check(_driver().cuFuncGetAttribute(ctypes.byref(static), 1, function), "cuFuncGetAttribute")
            _check(
                _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_MEMORY, limit.value - static.value),
                "cuFuncSetAttribute",
            )
            self._functions[name] = function

    def launch(self, name: str, *, blocks: int, threads: int, shared: int, stream: int, parameters: Any) -> None:
        """Launches a kernel whose one parameter is a ctypes structure passed by value.

        Raises:
            CudaError: If the driver refuses.
        """
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        _check(
            _driver().cuLaunchKernel(
                self._functions[name], blocks, 1, 1, threads, 1, 1, shared, stream, pointers, None
            ),
            name,
        )
