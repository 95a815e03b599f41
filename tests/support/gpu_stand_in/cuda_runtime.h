// As much of CUDA's header as Horovod's own headers need.

#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef int cudaError_t;
struct cudaPointerAttributes {};
enum { cudaSuccess = 0 };
