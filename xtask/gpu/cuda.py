"""Jobs for the first CUDA device: two that fault on purpose, and one that computes.

    cuda.py null-store         stores to address 0, which is not mapped
    cuda.py misaligned-store   stores four bytes to an odd address of its own memory
    cuda.py work LAUNCHES      does a fixed amount of work, and says how long that took

They use the driver API, which comes with the driver, and PTX, which the driver compiles: a machine
with a GPU need not have a compiler. The last line of output is JSON.
"""

import ctypes
import json
import sys
import time

# Volta and newer.
PTX = b"""
.version 6.0
.target sm_70
.address_size 64

.visible .entry put(.param .u64 address)
{
    .reg .u64 %place;
    .reg .u32 %value;
    ld.param.u64 %place, [address];
    mov.u32 %value, 1;
    st.volatile.global.u32 [%place], %value;
    ret;
}

.visible .entry busy(.param .u64 address)
{
    .reg .u64 %place;
    .reg .u32 %left;
    .reg .f32 %x, %y;
    .reg .pred %more;
    ld.param.u64 %place, [address];
    mov.u32 %left, 32768;
    mov.f32 %x, 0f3F800000;
    mov.f32 %y, 0f3F7FFFFF;
again:
    fma.rn.f32 %x, %x, %y, %y;
    sub.u32 %left, %left, 1;
    setp.ne.u32 %more, %left, 0;
    @%more bra again;
    st.volatile.global.f32 [%place], %x;
    ret;
}
"""

# CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
MULTIPROCESSORS = 16
BLOCKS_PER_MULTIPROCESSOR = 4
THREADS = 256
# Until the clocks are up.
WARM_UP_S = 1.0


def name(code):
    text = ctypes.c_char_p()
    CUDA.cuGetErrorName(code, ctypes.byref(text))
    return (text.value or str(code).encode()).decode()


def call(function, *args):
    code = getattr(CUDA, function)(*args)
    if code:
        sys.exit(f"{function}: {name(code)}")


def launch(kernel, blocks, address):
    params = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    call("cuLaunchKernel", kernel, blocks, 1, 1, THREADS, 1, 1, 0, None, params, None)


def work(kernel, device, address, launches):
    count = ctypes.c_int()
    call("cuDeviceGetAttribute", ctypes.byref(count), MULTIPROCESSORS, device)
    blocks = count.value * BLOCKS_PER_MULTIPROCESSOR

    def timed(launches):
        start = time.monotonic()
        for _ in range(launches):
            launch(kernel, blocks, address)
        call("cuCtxSynchronize")
        return time.monotonic() - start

    warm = 0.0
    while warm < WARM_UP_S:
        warm += timed(50)
    return timed(launches)


def main(job, launches=0):
    call("cuInit", 0)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(device), 0)
    pci = ctypes.create_string_buffer(32)
    call("cuDeviceGetPCIBusId", pci, len(pci), device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), PTX)
    entry = b"busy" if job == "work" else b"put"
    call("cuModuleGetFunction", ctypes.byref(kernel), module, entry)
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4096))
    said = {"pci": pci.value.decode()}
    if job == "work":
        said["seconds"] = work(kernel, device, address, int(launches))
    else:
        address.value = 0 if job == "null-store" else address.value + 1
        launch(kernel, 1, address)
        said["error"] = name(CUDA.cuCtxSynchronize())
    print(json.dumps(said))


if __name__ == "__main__":
    CUDA = ctypes.CDLL("libcuda.so.1")
    main(*sys.argv[1:])
