"""Small kernels of our own: stamps that give the true SM clock, multiply-adds and polling loops on a number of SMs.

They are PTX, which the driver compiles: nothing but the driver is needed.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import torch

# Stamp: every SM writes its cycle counter and the time in ns. Multiply and poll: run for `ns`, one on registers of all threads,
# the other loading the same word again and again, as the kernels of NCCL do while they wait for a peer.
_PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry stamp(.param .u64 out)
{
  .reg .pred p;
  .reg .u32 t, s;
  .reg .u64 a, c, g, o;
  mov.u32 t, %tid.x;
  setp.ne.u32 p, t, 0;
  @p bra DONE;
  mov.u32 s, %smid;
  ld.param.u64 a, [out];
  cvta.to.global.u64 a, a;
  mul.wide.u32 o, s, 16;
  add.u64 a, a, o;
  mov.u64 c, %clock64;
  mov.u64 g, %globaltimer;
  st.global.u64 [a], c;
  st.global.u64 [a+8], g;
DONE:
  ret;
}

.visible .entry multiply(.param .u64 out, .param .u64 ns)
{
  .reg .pred p;
  .reg .u32 i;
  .reg .u64 a, n, g, e;
  .reg .f32 x0, x1, x2, x3, x4, x5, x6, x7, m, k;
  ld.param.u64 n, [ns];
  mov.u64 g, %globaltimer;
  add.u64 e, g, n;
  mov.u32 i, %tid.x;
  cvt.rn.f32.u32 x0, i;
  add.f32 x1, x0, 0f3F000000;
  add.f32 x2, x0, 0f3F800000;
  add.f32 x3, x0, 0f3FC00000;
  add.f32 x4, x0, 0f40000000;
  add.f32 x5, x0, 0f40400000;
  add.f32 x6, x0, 0f40800000;
  add.f32 x7, x0, 0f40A00000;
  mov.f32 m, 0f3F7FBE77;
  mov.f32 k, 0f3A83126F;
AGAIN:
  mov.u32 i, 0;
LOOP:
  fma.rn.f32 x0, x0, m, k;
  fma.rn.f32 x1, x1, m, k;
  fma.rn.f32 x2, x2, m, k;
  fma.rn.f32 x3, x3, m, k;
  fma.rn.f32 x4, x4, m, k;
  fma.rn.f32 x5, x5, m, k;
  fma.rn.f32 x6, x6, m, k;
  fma.rn.f32 x7, x7, m, k;
  fma.rn.f32 x0, x0, m, k;
  fma.rn.f32 x1, x1, m, k;
  fma.rn.f32 x2, x2, m, k;
  fma.rn.f32 x3, x3, m, k;
  fma.rn.f32 x4, x4, m, k;
  fma.rn.f32 x5, x5, m, k;
  fma.rn.f32 x6, x6, m, k;
  fma.rn.f32 x7, x7, m, k;
  add.u32 i, i, 1;
  setp.lt.u32 p, i, 256;
  @p bra LOOP;
  mov.u64 g, %globaltimer;
  setp.lt.u64 p, g, e;
  @p bra AGAIN;
  add.f32 x0, x0, x1;
  add.f32 x2, x2, x3;
  add.f32 x4, x4, x5;
  add.f32 x6, x6, x7;
  add.f32 x0, x0, x2;
  add.f32 x4, x4, x6;
  add.f32 x0, x0, x4;
  setp.neu.f32 p, x0, 0f00000000;
  @p bra END;
  ld.param.u64 a, [out];
  cvta.to.global.u64 a, a;
  st.global.f32 [a], x0;
END:
  ret;
}

.visible .entry poll(.param .u64 out, .param .u64 ns)
{
  .reg .pred p;
  .reg .u64 a, n, g, e, v;
  ld.param.u64 n, [ns];
  ld.param.u64 a, [out];
  cvta.to.global.u64 a, a;
  mov.u64 g, %globaltimer;
  add.u64 e, g, n;
WAIT:
  ld.volatile.global.u64 v, [a];
  mov.u64 g, %globaltimer;
  setp.lt.u64 p, g, e;
  @p bra WAIT;
  ret;
}
"""
# Rows of a stamp buffer: more SMs than any GPU has.
_MOST_SMS = 1024
_MOST_THREADS = 1024


class Probes:
    """The kernels, on the current device of torch; raises `RuntimeError` where the driver refuses them."""

    def __init__(self) -> None:
        torch.cuda.current_stream().synchronize()  # makes the context current
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        self._module = ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), ctypes.c_char_p(_PTX)), "load")
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._word = torch.zeros(2, dtype=torch.int64, device="cuda")

    @cached_property
    def sms(self) -> int:
        """How many the device has."""
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)

    def stamp(self) -> torch.Tensor:
        """Per SM its cycle counter and the time in ns, once the current stream gets here."""
        result = torch.zeros((_MOST_SMS, 2), dtype=torch.int64, device="cuda")
        self._launch("stamp", 2 * self.sms, _MOST_THREADS, [ctypes.c_uint64(result.data_ptr())])
        return result

    def multiply(self, sms: int, ns: int) -> None:
        """Multiply-adds on so many SMs for so long."""
        self._timed("multiply", sms, _MOST_THREADS, ns)

    def poll(self, sms: int, ns: int) -> None:
        """A warp on each of so many SMs reads a word for so long."""
        self._timed("poll", sms, 32, ns)

    def _timed(self, name: str, sms: int, threads: int, ns: int) -> None:
        self._launch(name, sms, threads, [ctypes.c_uint64(self._word.data_ptr()), ctypes.c_uint64(ns)])

    def _launch(self, name: str, blocks: int, threads: int, values: list[Any]) -> None:
        function = self._functions.get(name)
        if function is None:
            function = ctypes.c_void_p()
            found = self._driver.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
            self._check(found, f"find {name} in")
            self._functions[name] = function
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        launched = self._driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)
        self._check(launched, f"launch {name} of")

    def _check(self, result: int, what: str) -> None:
        if result:
            raise RuntimeError(f"the driver could not {what} the probe kernels (error {result})")


def clock_hz(first: torch.Tensor, second: torch.Tensor) -> float:
    """The mean SM clock between two stamps that have run: the median over the SMs that both have."""
    cycles, ns = (second.cpu() - first.cpu()).double().unbind(1)
    both = (first[:, 1].cpu() > 0) & (second[:, 1].cpu() > 0) & (ns > 0) & (cycles > 0)
    return float((cycles[both] / ns[both]).median()) * 1e9
