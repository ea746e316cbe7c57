"""The CUDA driver through ctypes: exact control over what is enqueued, at about a microsecond per call, without torch.

Kernels are a few lines of PTX, one thread each. They spin for a given time, stamp `%globaltimer`, or take arguments of a given
size. Host-mapped and device addresses are one address space, so a stamp can go to either.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Enqueue = Callable[[], int]
now = time.perf_counter_ns

# Sizes of kernel arguments, in bytes; 32,764 is the most CUDA allows.
ARGUMENT_BYTES = (8, 256, 1024, 4096, 16384, 32760)

PTX = """
.version 8.1
.target sm_80
.address_size 64

// Spins for `duration` ns; if `slot` is not 0, leaves start and end of the spin there.
.visible .entry spin(.param .u64 duration, .param .u64 slot)
{
    .reg .pred %p<3>;
    .reg .b64 %r<6>;
    ld.param.u64 %r1, [duration];
    ld.param.u64 %r2, [slot];
    mov.u64 %r3, %globaltimer;
AGAIN:
    mov.u64 %r4, %globaltimer;
    sub.u64 %r5, %r4, %r3;
    setp.lt.u64 %p1, %r5, %r1;
    @%p1 bra AGAIN;
    setp.eq.u64 %p2, %r2, 0;
    @%p2 bra DONE;
    st.volatile.global.u64 [%r2], %r3;
    st.volatile.global.u64 [%r2+8], %r4;
DONE:
    ret;
}

// Waits (at most one second) until the host writes `flag`, then leaves the time in `slot`.
.visible .entry echo(.param .u64 flag, .param .u64 slot)
{
    .reg .pred %p<3>;
    .reg .b64 %r<8>;
    ld.param.u64 %r1, [flag];
    ld.param.u64 %r2, [slot];
    mov.u64 %r3, %globaltimer;
AGAIN:
    ld.volatile.global.u64 %r4, [%r1];
    mov.u64 %r5, %globaltimer;
    sub.u64 %r6, %r5, %r3;
    setp.gt.u64 %p1, %r6, 1000000000;
    @%p1 bra DONE;
    setp.eq.u64 %p2, %r4, 0;
    @%p2 bra AGAIN;
DONE:
    st.volatile.global.u64 [%r2], %r5;
    ret;
}
""" + "".join(f"\n.visible .entry args{size}(.param .align 8 .b8 block[{size}])\n{{\n    ret;\n}}\n" for size in ARGUMENT_BYTES)


class Gpu:
    """One context on device 0. `schedule` is how a synchronising host waits: 0 auto, 1 spin, 2 yield, 4 block."""

    def __init__(self, schedule: int = 0) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.cuda.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
        self._streams: list[c_void_p] = []
        self._kept: list[object] = []
        self.call("cuInit", 0)
        device = c_int()
        self.call("cuDeviceGet", byref(device), 0)
        if schedule:
            self.call("cuDevicePrimaryCtxSetFlags_v2", device, c_uint(schedule))
        self.context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(self.context), device)
        self.enter()
        self._module = c_void_p()
        self.call("cuModuleLoadData", byref(self._module), ctypes.c_char_p(PTX.encode()))

    def enter(self) -> None:
        """Makes the context current on the calling thread."""
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls the driver and raises where it returns an error."""
        status = getattr(self.cuda, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} returned CUDA error {status}")

    def stream(self, priority: int = 0) -> c_void_p:
        """A stream that does not wait for the default stream."""
        handle = c_void_p()
        self.call("cuStreamCreateWithPriority", byref(handle), c_uint(1), c_int(priority))
        self._streams.append(handle)
        return handle

    def drop_streams(self) -> None:
        """Destroys the streams made so far, so that the next trial does not share hardware queues with them."""
        for handle in self._streams:
            self.call("cuStreamDestroy_v2", handle)
        self._streams.clear()

    def event(self, flags: int = 2) -> c_void_p:
        """An event; flag 2 is without timing, 1 makes a synchronising host block."""
        handle = c_void_p()
        self.call("cuEventCreate", byref(handle), c_uint(flags))
        return handle

    def pinned(self, size: int) -> int:
        """Address of pinned, mapped host memory, zeroed. Lives as long as the process."""
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), c_size_t(size), c_uint(2))
        ctypes.memset(address, 0, size)
        return int(address.value or 0)

    def memory(self, size: int) -> int:
        """Address of device memory, zeroed. Lives as long as the process."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        self.call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), c_size_t(size))
        return int(address.value)

    def read(self, address: int, count: int) -> npt.NDArray[np.int64]:
        """Copies that many 8-byte integers from device memory."""
        values = np.zeros(count, dtype=np.int64)
        self.call("cuMemcpyDtoH_v2", c_void_p(values.ctypes.data), c_uint64(address), c_size_t(values.nbytes))
        return values

    def synchronize(self) -> None:
        """Waits for everything in the context."""
        self.call("cuCtxSynchronize")

    def kernel(self, stream: c_void_p, name: str, *arguments: int | ctypes.Array[Any]) -> Enqueue:
        """A call that enqueues the kernel on the stream; integers are passed as 8 bytes."""
        function = c_void_p()
        self.call("cuModuleGetFunction", byref(function), self._module, ctypes.c_char_p(name.encode()))
        boxes = [c_uint64(value) if isinstance(value, int) else value for value in arguments]
        pointers = (c_void_p * len(boxes))(*[ctypes.addressof(box) for box in boxes])
        launch = self.cuda.cuLaunchKernel

        def enqueue() -> int:
            return int(launch(function, 1, 1, 1, 1, 1, 1, 0, stream, pointers, None))

        # The argument memory must live as long as the call can be made.
        self._kept.append(boxes)
        return enqueue

    def spin(self, stream: c_void_p, duration_ns: int, slot: int = 0) -> Enqueue:
        """A call that enqueues a kernel of the given duration."""
        return self.kernel(stream, "spin", duration_ns, slot)

    def bind(self, name: str, *arguments: Any) -> Enqueue:
        """Any driver call with its arguments filled in."""
        function = getattr(self.cuda, name)
        return lambda: int(function(*arguments))

    def clocks(self, rounds: int = 60) -> Clocks:
        """One reading of host and GPU clock side by side: the middle of the shortest round trips."""
        board = self.pinned(64)
        flag, slot = (c_uint64.from_address(board + 8 * i) for i in range(2))
        echo = self.kernel(self.stream(), "echo", board, board + 8)
        trips: list[Clocks] = []
        for _ in range(rounds):
            flag.value = slot.value = 0
            echo()
            time.sleep(0.0003)
            asked = now()
            flag.value = 1
            while not slot.value:
                pass
            answered = now()
            trips.append(Clocks((asked + answered) // 2, slot.value, answered - asked))
            self.synchronize()
        best = sorted(trips, key=lambda trip: trip.round_trip_ns)[: rounds // 4]
        return sorted(best, key=lambda trip: trip.host_ns - trip.gpu_ns)[len(best) // 2]


@dataclass(frozen=True)
class Clocks:
    """Host and GPU clock at one moment, known to half a round trip."""

    host_ns: int
    gpu_ns: int
    round_trip_ns: int

    def to_host(self, later: Clocks, stamps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """GPU stamps on the host's clock, with the drift between this reading and a later one taken out."""
        rate = (later.host_ns - self.host_ns) / (later.gpu_ns - self.gpu_ns)
        return np.asarray(self.host_ns + (stamps - self.gpu_ns) * rate, dtype=np.float64)
