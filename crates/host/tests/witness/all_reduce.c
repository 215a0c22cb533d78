/* Measures an all-reduce over all devices, compiled with NVIDIA's own headers. Prints the devices, the
 * milliseconds of each all-reduce by the devices' clock, and the first element of each result. Works with
 * the fake libraries, and with the real ones. */

#include <stdio.h>
#include <stdlib.h>

#include <cuda_runtime_api.h>
#include <nccl.h>

#define NUMBERS (16 << 20)
#define MOST 16
#define CUDA(call) check((call) == cudaSuccess, #call)
#define NCCL(call) check((call) == ncclSuccess, #call)

static void check(int well, const char *call) {
    if (!well) {
        fprintf(stderr, "%s failed: %s\n", call, cudaGetErrorString(cudaGetLastError()));
        exit(1);
    }
}

int main(void) {
    int count = 0;
    CUDA(cudaGetDeviceCount(&count));
    check(count <= MOST, "limit of devices");
    ncclComm_t ranks[MOST];
    float *send[MOST], *receive[MOST];
    cudaStream_t streams[MOST];
    cudaEvent_t begin[MOST], end[MOST];
    ncclUniqueId id;
    NCCL(ncclGetUniqueId(&id));
    NCCL(ncclGroupStart());
    for (int at = 0; at < count; at++) {
        CUDA(cudaSetDevice(at));
        NCCL(ncclCommInitRank(&ranks[at], count, id, at));
    }
    NCCL(ncclGroupEnd());
    for (int at = 0; at < count; at++) {
        float first = (float)(at + 1);
        CUDA(cudaSetDevice(at));
        CUDA(cudaMalloc((void **)&send[at], NUMBERS * sizeof(float)));
        CUDA(cudaMalloc((void **)&receive[at], NUMBERS * sizeof(float)));
        CUDA(cudaMemset(send[at], 0, NUMBERS * sizeof(float)));
        CUDA(cudaMemcpy(send[at], &first, sizeof(first), cudaMemcpyHostToDevice));
        CUDA(cudaStreamCreateWithFlags(&streams[at], cudaStreamNonBlocking));
        CUDA(cudaEventCreate(&begin[at]));
        CUDA(cudaEventCreate(&end[at]));
    }
    for (int at = 0; at < count; at++) {
        CUDA(cudaEventRecord(begin[at], streams[at]));
    }
    NCCL(ncclGroupStart());
    for (int at = 0; at < count; at++) {
        NCCL(ncclAllReduce(send[at], receive[at], NUMBERS, ncclFloat, ncclSum, ranks[at], streams[at]));
    }
    NCCL(ncclGroupEnd());
    for (int at = 0; at < count; at++) {
        CUDA(cudaEventRecord(end[at], streams[at]));
    }
    for (int at = 0; at < count; at++) {
        char pci[32];
        float first = 0, milliseconds = 0;
        ncclResult_t went = ncclInternalError;
        CUDA(cudaStreamSynchronize(streams[at]));
        NCCL(ncclCommGetAsyncError(ranks[at], &went));
        NCCL(went);
        CUDA(cudaEventElapsedTime(&milliseconds, begin[at], end[at]));
        CUDA(cudaMemcpy(&first, receive[at], sizeof(first), cudaMemcpyDeviceToHost));
        CUDA(cudaDeviceGetPCIBusId(pci, sizeof(pci), at));
        printf("%s %.4f %.1f\n", pci, milliseconds, first);
        CUDA(cudaStreamDestroy(streams[at]));
        CUDA(cudaEventDestroy(begin[at]));
        CUDA(cudaEventDestroy(end[at]));
        CUDA(cudaFree(send[at]));
        CUDA(cudaFree(receive[at]));
    }
    for (int at = 0; at < count; at++) {
        NCCL(ncclCommDestroy(ranks[at]));
    }
    return 0;
}
