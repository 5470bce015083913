"""Run-time compilation of the CUDA C++ kernels, through the NVRTC that every CUDA build of torch brings along.

No compiler, header or extra package is needed by the user: `libnvrtc` turns a source string into a cubin, the driver
loads it. The loaded kernels are kept for the life of the process.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import importlib.util
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
OVERLAP = True  # launch with that attribute
_DEFAULT_SHARED = 32 * 1024  # 48 KiB less room for static shared memory


class Kernel:
    """One loaded kernel of one device's context; call it with a ctypes structure, its only argument."""

    def __init__(self, function: ctypes.c_void_p, module: ctypes.c_void_p, threads: int, shared: int) -> None:
        self._function, self._module, self.threads, self.shared = function, module, threads, shared
        if shared > _DEFAULT_SHARED:
            _driver("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)

    def __call__(self, grid: tuple[int, int, int], argument: ctypes.Structure) -> None:
        """Launch on torch's current stream; the start of the kernel may overlap the end of the one before it.

        The kernels wait (griddepcontrol.wait) before they touch anything but weights.
        """
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        config = _Config(
            *grid, self.threads, 1, 1, self.shared, torch.cuda.current_stream().cuda_stream,
            ctypes.addressof(attribute), int(OVERLAP),
        )  # fmt: skip
        _driver("cuLaunchKernelEx", ctypes.byref(config), self._function, parameters, None)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: id, padding, and a 64-byte value, of which the first int is used."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


Defines = tuple[tuple[str, int], ...]


def load(
    sources: tuple[Path, ...], name: str, defines: Defines, threads: int, shared: int, *, preamble: str = ""
) -> Kernel:
    """The kernel `name` of `preamble` and the joined `sources` for the current device.

    threads: of a block; shared: bytes of dynamic shared memory.
    """
    return _load(sources, name, defines, threads, shared, preamble, torch.cuda.current_device())


@cache
def _load(
    sources: tuple[Path, ...], name: str, defines: Defines, threads: int, shared: int, preamble: str, device: int
) -> Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    torch.cuda.current_stream(device).synchronize()  # makes the context current
    text = "\n".join([preamble, *(source.read_text() for source in sources)])
    architecture = f"sm_{major}{minor}" + ("a" if major == 9 else "")  # wgmma is in sm_90a only
    cubin = compile_cubin(text, architecture, dict(defines))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _driver("cuModuleLoadData", ctypes.byref(module), cubin)
    _driver("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    return Kernel(function, module, threads, shared)


def compile_cubin(source: str, architecture: str, defines: Mapping[str, int]) -> bytes:
    """Machine code of `source` for `architecture` ("sm_90"); needs no GPU. RuntimeError carries the compiler's log.

    Where QUADS_CUBIN_CACHE names a folder, code is kept there for other processes, which save half a second each.
    """
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{key}={value}" for key, value in defines.items()]
    folder = os.environ.get("QUADS_CUBIN_CACHE")
    if not folder:
        return _compiled(source, options)
    key = hashlib.sha256("\0".join([source, *options, _nvrtc_library()._name]).encode()).hexdigest()
    path = Path(folder) / f"{key}.cubin"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(_compiled(source, options))
        os.replace(part, path)
    return path.read_bytes()


def _compiled(source: str, options: list[str]) -> bytes:
    library = _nvrtc_library()
    program = ctypes.c_void_p()
    _nvrtc(library, "nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        if library.nvrtcCompileProgram(program, len(options), array) != 0:
            raise RuntimeError("NVRTC: " + _read(library, "nvrtcGetProgramLog", program).decode(errors="replace"))
        return _read(library, "nvrtcGetCUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def unavailable() -> str | None:
    """Why kernels cannot be compiled here, in one line; None when they can."""
    try:
        _nvrtc_library()
    except OSError as error:
        return f"needs NVRTC, which CUDA builds of torch bring along: {error}"
    return None


@cache
def _nvrtc_library() -> ctypes.CDLL:
    majors = [torch.version.cuda.split(".")[0]] if torch.version.cuda else ["13", "12"]
    candidates = [f"libnvrtc.so.{major}" for major in majors] + _packaged_libraries(majors)
    for candidate in candidates:
        try:
            # NVRTC opens its builtins by bare name: a wheel's are found only if they are loaded already.
            for builtins in glob.glob(f"{Path(candidate).parent}/libnvrtc-builtins.so.*"):
                ctypes.CDLL(builtins, ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise OSError(f"none of {', '.join(f'libnvrtc.so.{major}' for major in majors)} found")


def _packaged_libraries(majors: list[str]) -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    return [path for root in roots for major in majors for path in glob.glob(f"{root}/*/lib/libnvrtc.so.{major}")]


def _read(library: ctypes.CDLL, getter: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _nvrtc(library, getter + "Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _nvrtc(library, getter, program, buffer)
    return buffer.raw


def _nvrtc(library: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(library, function)(*arguments)
    if status != 0:
        raise RuntimeError(f"{function} failed with NVRTC status {status}")


@cache
def _driver_library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver(function: str, *arguments: object) -> None:
    status = getattr(_driver_library(), function)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        _driver_library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{function}: {(text.value or b'unknown CUDA error').decode()}")
